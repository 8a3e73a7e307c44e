from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from refragkit.data.markdown import _headings, sections

ATX = [
    "# One",
    "## Two ##",
    "### ",
    "#",
    "#no",
    "  ## three",
    "\t# tab",
    "# `a` *b* #",
    "####### seven",
    "## a\t",
]
FENCES = ["```", "~~~", "```` x", "``", "``` a`b", "   ~~~~", "    # code"]
SETEXT = ["Title", "===", "---", "--", "-", "text", ""]
LINES = st.sampled_from([*ATX, *FENCES, *SETEXT])


@settings(max_examples=400, deadline=None)
@given(st.lists(LINES, max_size=14), st.sampled_from(["\n", "\r\n"]))
def test_headings_are_those_of_commonmark(lines: list[str], end: str) -> None:
    text = end.join(lines)
    parser = MarkdownIt("zero").enable(["heading", "lheading", "fence", "code"])
    tokens = parser.parse(text)
    found = {text[:start].count("\n"): level for start, _, level, _ in _headings(text, 0)}
    headings = [t for t in tokens if t.type == "heading_open" and t.map]
    expected = {t.map[0]: int(t.tag[1]) for t in headings if t.map}
    assert found.items() <= expected.items()
    for heading in headings:
        assert heading.map
        first, end_line = heading.map
        # A setext heading of several lines, or right below another block, is not looked for.
        if heading.markup.startswith("#") or (end_line == first + 2 and (first == 0 or not lines[first - 1])):
            assert first in found


def test_titles_are_paths_of_headings() -> None:
    text = (
        "Before.\n\n# The **Guide**\n\nIntro.\n\n## [Install](https://x.org/a)\n\n### Linux\nmake `it`\n"
        "```\n# no heading\n```\n## Use\n\nText.\n\nOther\n=====\nEnd."
    )
    title, parts = sections(text, "file")
    assert title == "The Guide"
    ends = [p.start for p in parts[1:]] + [len(text)]
    assert [(p.title, text[p.start : end]) for p, end in zip(parts, ends, strict=True)] == [
        ("The Guide", "Before.\n\n"),
        ("The Guide", "# The **Guide**\n\nIntro.\n\n"),
        # A heading with nothing under it goes with what follows
        (
            "The Guide > Install > Linux",
            "## [Install](https://x.org/a)\n\n### Linux\nmake `it`\n```\n# no heading\n```\n",
        ),
        ("The Guide > Use", "## Use\n\nText.\n\n"),
        ("Other", "Other\n=====\nEnd."),
    ]


def test_titles_without_headings() -> None:
    assert sections("Just text.", "notes") == ("notes", [(parts := sections("Just text.", "notes")[1])[0]])
    assert [(p.start, p.title) for p in parts] == [(0, "notes")]
    front = '---\r\nlayout: page\r\ntitle: "My Page"\r\n---\r\n\r\n## Part\r\n\r\nText.'
    title, parts = sections(front, "notes")
    assert (title, [(p.start, p.title) for p in parts]) == ("My Page", [(0, "My Page > Part")])
    assert sections("---\nnot closed\n# A\n", "notes")[0] == "A"
