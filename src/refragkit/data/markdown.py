"""The sections of a Markdown text: where each starts and the path of headings that leads to it.

Follows CommonMark 0.31 for ATX headings (``## Title``), setext headings (a line underlined with ``===`` or ``---``) and
fenced code.

Differs: looks only at headings that stand at the left margin, not inside lists, quotes or HTML blocks; a setext heading
is one line after a blank one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEADING = re.compile(
    r"^[ ]{0,3}(?:"
    r"(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?P<info>[^\n]*)"
    r"|(?P<hashes>\#{1,6})(?P<title>[ \t][^\n]*|(?=\r?$))"
    r"|(?!(?:[-+*]|\d{1,9}[.)])[ \t]|[>|<])(?P<text>\S[^\n]*)\n[ ]{0,3}(?P<line>=+|-+)[ \t]*\r?$"
    r")",
    re.MULTILINE | re.VERBOSE,
)
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(?P<fields>(?:[^\n]*\n)*?)(?:---|\.\.\.)[ \t]*\r?(?:\n|\Z)")
_FRONT_TITLE = re.compile(r"^title:[ \t]+(?P<title>[^\n]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of a document.

    Attributes:
        start: its first character.
        title: the headings that lead to it, ``Guide > Install``.
    """

    start: int
    title: str


def sections(text: str, name: str) -> tuple[str, list[Section]]:
    """The title of a Markdown text and its sections, in order, without a gap.

    The title is the ``title`` of the front matter, else the first heading. A heading without any text under it belongs
    to the section that follows.

    Args:
        text: the whole text.
        name: the title where the text has none.
    """
    front = _FRONT_MATTER.match(text)
    body = front.end() if front else 0
    titled = _FRONT_TITLE.search(front["fields"]) if front else None
    front_title = titled["title"].strip().strip("\"'") if titled else ""
    headings = _headings(text, body)
    first = next((title for _, _, _, title in headings if title), "")
    title = front_title or first or name

    found = [Section(0, title)]
    above: list[tuple[int, str]] = []
    filled = body
    for start, end, level, heading in headings:
        above = [(n, t) for n, t in above if n < level]
        if heading:
            above.append((level, heading))
        path = [t for _, t in above]
        if front_title and path[:1] != [front_title]:
            path.insert(0, front_title)
        if not text[filled:start].strip():
            start = found.pop().start
        found.append(Section(start, " > ".join(path) or title))
        filled = end
    return title, found


def _headings(text: str, start: int) -> list[tuple[int, int, int, str]]:
    """(start, end, level, title) of each heading."""
    found: list[tuple[int, int, int, str]] = []
    fence = ""
    for match in _HEADING.finditer(text, start):
        if match["fence"]:
            if not fence:
                fence = match["fence"]
            elif match["fence"].startswith(fence) and not match["info"].strip():
                fence = ""
        elif fence:
            continue
        elif match["hashes"]:
            title = re.sub(r"(?:^|[ \t])#+$", "", (match["title"] or "").strip())
            found.append((match.start(), match.end(), len(match["hashes"]), _plain(title)))
        elif _follows_blank_line(text, match.start()):
            level = 1 if match["line"][0] == "=" else 2
            found.append((match.start(), match.end(), level, _plain(match["text"])))
    return found


def _follows_blank_line(text: str, start: int) -> bool:
    before = "\n" + text[max(start - 3, 0) : start]
    return start == 0 or before.endswith(("\n\n", "\n\r\n"))


def _plain(title: str) -> str:
    """A heading without the marks of links, code and emphasis."""
    title = re.sub(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])", r"\1", title)
    title = re.sub(r"<[^<>]+>|[*`]+|\\(?=[^\w\s])", "", title)
    return " ".join(title.split())
