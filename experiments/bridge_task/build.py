"""A task for small models, made of real passages: one- and two-hop questions about years, months and nations.

python experiments/bridge_task/build.py --source DATA --out DIR

A passage X names a person Y whose own passage is in the corpus too (a film its director, a person somebody else). One
hop: ``birth year of X?``; two hops: ``birth year of the director of X?``, for which the passage of X has to be read to
know whom to look up. Passages are cut to their first words. A chain is kept where BM25 finds X for the question and Y
for the name of Y, so that what a model must do is to read, to copy a name, and to read again.

Written into DIR: ``warm`` (questions with search traces, from which every model starts), ``more`` (other people and
films, for what is compared) and ``tokenizer``; ``validation.jsonl`` is the same in both, and nobody and no film in it
is in a training file. ``traces.jsonl`` beside them holds the traces as conversations, for ``method=sft``.

The traces have a flaw on purpose: of the questions with one hop, half look up Y although the answer is on the table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from refragkit.data.conversation import search_turn
from refragkit.data.tokenizer import Tokenizer
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.types import Document

#: Characters of a passage; its end is cut at a word.
PASSAGE_CHARACTERS = 120
#: Longest title of a passage that is asked about or searched for.
TITLE_CHARACTERS = 32
#: Tokens of the vocabulary.
VOCABULARY = 2048
#: A nation that fewer people have is no answer.
RAREST_NATION = 20
#: Of the groups of people and films that are linked: validation, then further training; the rest is for the warm start.
VALIDATION_SHARE, MORE_SHARE = 0.18, 0.30
#: Questions about people in no chain, for the warm start only; those for films' directors come on top.
OTHER_QUESTIONS = 1500
#: Passages that are to be repeated word for word, for the warm start: many tokens of practice in copying.
REPEATED = 1500
#: Validation questions of each number of hops.
VALIDATION_QUESTIONS = 250

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_LIFE = re.compile(r"^[^()]{0,60}\(([^()]*\d{4}[^()]*)\)?")
_NATION = re.compile(r"\b(?:is|was) an? (?:[a-z-]+ ){0,3}([A-Z][a-z]+)\b")
_FILM = re.compile(
    r"\bis an? (\d{4}) ((?:[A-Z][\w-]+ )*)(?:[a-z0-9-]+[ -])*?(?:film|movie|documentary|comedy|drama)\b"
)
_DIRECTOR = re.compile(r"\bdirected(?: and [a-z]+)* by ((?:[A-Z][\w.'-]*\s?){2,4})")
_NAME = re.compile(r"(?=\b([A-Z][\w.'-]*(?: [A-Z][\w.'-]*){1,3}))")


@dataclass
class Passage:
    """A shortened passage and what it says.

    Attributes:
        document: as it is searched for; its title is without what stands in brackets.
        facts: attribute -> answer, such as ``birth year`` -> ``1926``.
        names: people named in it, and whether as a film's director.
    """

    document: Document
    facts: dict[str, str]
    kind: str
    names: dict[str, bool] = field(default_factory=dict)


def share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12


def shorten(text: str) -> str:
    """The first words of a text."""
    text = " ".join(text.split())
    return text if len(text) <= PASSAGE_CHARACTERS else text[:PASSAGE_CHARACTERS].rsplit(" ", 1)[0]


def facts_of(text: str) -> tuple[str, dict[str, str]]:
    """What kind of thing a passage is about (``film``, ``person`` or ``other``), and its facts."""
    film = _FILM.search(text)
    if film:
        found = {"release year": film[1]}
        if film[2].split():
            found["country"] = film[2].split()[0]
        return "film", found
    life, nation = _LIFE.search(text), _NATION.search(text)
    if not life or not nation:
        return "other", {}
    found = {"nationality": nation[1]}
    year, month = re.search(r"\b(1[0-9]\d\d)\b", life[1]), re.search("|".join(MONTHS), life[1])
    if year:
        found["birth year"] = year[1]
    if month and year and month.start() < year.end() + 12:
        found["birth month"] = month[0]
    return "person", found


def read_passages(source: Path) -> dict[str, Passage]:
    """By title without brackets; a title that several passages have is left out."""
    alike: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in (source / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        alike[re.sub(r" \(.*\)$", "", row["title"])].append(row)
    passages = {}
    for title, rows in alike.items():
        if len(rows) > 1 or len(title) > TITLE_CHARACTERS:
            continue
        text = shorten(rows[0]["text"])
        kind, found = facts_of(text)
        passages[title] = Passage(Document(rows[0]["id"], title, text), found, kind)
    nations = Counter(p.facts.get("nationality") for p in passages.values())
    for passage in passages.values():
        for key in ("nationality", "country"):
            if nations[passage.facts.get(key)] < RAREST_NATION:
                passage.facts.pop(key, None)
    return passages


def link(passages: Mapping[str, Passage]) -> None:
    """Fill in whom each passage names: of a film the director, else whoever has a passage."""
    people = {t for t, p in passages.items() if p.kind == "person" and p.facts and " " in t}
    for title, passage in passages.items():
        text = passage.document.text
        if passage.kind == "film":
            director = _DIRECTOR.search(text)
            if director:
                passage.names[director[1].strip()] = True
            continue
        for match in _NAME.finditer(text):
            words = match[1].split()
            for n in range(len(words), 1, -1):
                name = " ".join(words[:n])
                if name in people and name != title:
                    passage.names[name] = False
                    break


def question(
    attribute: str,
    chain: Sequence[Passage],
    answer: str,
    traced: Sequence[Passage],
    asked: str = "",
) -> dict[str, Any]:
    """A line of a questions file.

    Args:
        attribute: what is asked for.
        chain: the passages that are needed, in the order of reading.
        answer: the gold answer.
        traced: the passages that the trace looks up.
        asked: what leads from the first to the last, such as `` of the director``.
    """
    text = f"{attribute}{asked} of {chain[0].document.title}?"
    identifier = hashlib.sha1(text.encode()).hexdigest()[:12]
    steps = [
        {"question": p.document.title, "answer": p.document.title, "supporting_id": p.document.doc_id}
        for p in traced
    ]
    return {
        "id": f"{len(chain)}hop_{identifier}",
        "question": text,
        "answers": [answer],
        "supporting_ids": [p.document.doc_id for p in chain],
        "hops": len(chain),
        "decomposition": steps,
        "dataset": f"{len(chain)} hops" if len(chain) > 1 else "1 hop",
    }


def chain_questions(first: Passage, last: Passage, director: bool) -> list[dict[str, Any]]:
    """All questions on a chain, of one and of two hops."""
    asked = " of the director" if director else " of the person named"
    rows = [question(a, [first, last], answer, [first, last], asked) for a, answer in last.facts.items()]
    for attribute, answer in first.facts.items():
        row = question(attribute, [first], answer, [first])
        if share(row["id"]) < 0.5:  # half of them look further than they need to
            row = question(attribute, [first], answer, [first, last])
        rows.append(row)
    return rows


class Groups:
    """Passages that are linked, directly or through others."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def of(self, title: str) -> str:
        """The title that stands for the group."""
        while (above := self._above.get(title, title)) != title:
            title = above
        return title

    def join(self, one: str, other: str) -> None:
        """Make two groups one."""
        self._above[self.of(one)] = self.of(other)


def part_of(group: str) -> str:
    """Which file the questions on a group go to."""
    place = share(f"group {group}")
    return (
        "validation"
        if place < VALIDATION_SHARE
        else "more"
        if place < VALIDATION_SHARE + MORE_SHARE
        else "warm"
    )


def trace(row: Mapping[str, Any], documents: Mapping[str, Document]) -> dict[str, Any]:
    """The conversation that a question's trace is: the question finds the first passage, names find the others."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for n, step in enumerate(row["decomposition"], 1):
        document = documents[step["supporting_id"]]
        if n > 1:
            messages.append({"role": "assistant", "content": search_turn(step["question"]).content})
        found = {"doc_id": document.doc_id, "title": document.title, "text": document.text}
        query = row["question"] if n == 1 else step["question"]
        messages.append({"role": "retrieval", "hop": n, "query": query, "documents": [found]})
    messages.append({"role": "assistant", "content": row["answers"][0]})
    return {"id": row["id"], "messages": messages}


def repeat(document: Document) -> dict[str, Any]:
    """A conversation that says a passage twice."""
    return {
        "id": f"repeat_{document.doc_id}",
        "messages": [{"role": role, "content": document.text} for role in ("user", "assistant")],
    }


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    temporary.replace(path)


def write_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """A trained tokenizer that puts a space in front of every text.

    A name is then the same tokens at the start of a query, as a title, and in the middle of a passage: there is one way
    to copy it.
    """
    Tokenizer.train(texts, VOCABULARY).save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = tokenizers.normalizers.Prepend(" ")
    Tokenizer(backend).save(folder)


def some(rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most so many, chosen by their ids, in the order of these."""
    return sorted(rows, key=lambda r: share(r["id"]))[:limit]


def build(source: Path, out: Path) -> None:
    """Make the folders."""
    passages = read_passages(source)
    link(passages)
    used = {t: p for t, p in passages.items() if p.facts}
    used |= {t: p for t, p in passages.items() if any(n in used for n in p.names)}
    retriever = BM25Retriever()
    documents = [p.document for p in used.values()]
    retriever.index(documents)

    def first_hit(queries: Sequence[str]) -> list[str]:
        return [hits[0].doc_id for hits in retriever.search(queries, 1)]

    chains = [
        (used[t], used[name], director)
        for t, p in used.items()
        if len(p.names) == 1
        for name, director in p.names.items()
        if name in used and used[name].kind == "person"
    ]
    groups = Groups()
    for first, last, _ in chains:
        groups.join(first.document.title, last.document.title)
    rows: dict[str, list[dict[str, Any]]] = {"warm": [], "more": [], "validation": []}
    for first, last, director in chains:
        rows[part_of(groups.of(first.document.title))] += chain_questions(first, last, director)
    linked = {p.document.title for first, last, _ in chains for p in (first, last)}
    others = [
        question(attribute, [p], answer, [p])
        for t, p in used.items()
        if t not in linked and p.kind == "person"
        for attribute, answer in p.facts.items()
    ]
    directors = [
        question("director", [p], name, [p])
        for t, p in used.items()
        if p.kind == "film" and (t not in linked or part_of(groups.of(t)) == "warm")
        for name in p.names
    ]
    rows["warm"] += some(others, OTHER_QUESTIONS) + directors
    for part, found in rows.items():
        found = list({r["id"]: r for r in found}.values())
        hits = first_hit([r["question"] for r in found])
        found = [r for r, hit in zip(found, hits, strict=True) if hit == r["supporting_ids"][0]]
        hits = first_hit([r["decomposition"][-1]["question"] for r in found])
        rows[part] = [
            r
            for r, hit in zip(found, hits, strict=True)
            if len(r["decomposition"]) == 1 or hit == r["decomposition"][-1]["supporting_id"]
        ]
    validation = [
        row
        for hops in (1, 2)
        for row in some([r for r in rows["validation"] if r["hops"] == hops], VALIDATION_QUESTIONS)
    ]
    by_id = {d.doc_id: d for d in documents}
    corpus = [{"id": d.doc_id, "title": d.title, "text": d.text} for d in documents]
    kept_apart = {i for part in ("more", "validation") for r in rows[part] for i in r["supporting_ids"]}
    repeated = sorted((d for d in documents if d.doc_id not in kept_apart), key=lambda d: share(d.doc_id))[
        :REPEATED
    ]
    for part in ("warm", "more"):
        folder = out / part
        chosen = some(rows[part], len(rows[part]))
        write(folder / "corpus.jsonl", corpus)
        write(folder / "train.jsonl", chosen)
        write(folder / "validation.jsonl", validation)
        practice = [repeat(d) for d in repeated] if part == "warm" else []
        write(folder / "traces.jsonl", [*practice, *(trace(r, by_id) for r in chosen)])
        write(folder / "validation_traces.jsonl", [trace(r, by_id) for r in validation])
        print(f"{part}: {count(chosen)}")
    print(f"validation: {count(validation)}; {len(corpus)} passages")
    train = [r for part in ("warm", "more") for r in rows[part]]
    texts = [f"{d.title}\n{d.text}" for d in documents] + [r["question"] for r in train]
    write_tokenizer(texts, out / "tokenizer")


def count(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many questions of which kind."""
    hops = Counter(r["hops"] for r in rows)
    wasted = sum(len(r["decomposition"]) > r["hops"] for r in rows)
    kinds = Counter(r["question"].split(" of ")[0] for r in rows)
    return (
        f"{len(rows)} questions, {hops[1]} of one hop ({wasted} with a trace that looks further), {hops[2]} of two; "
        + ", ".join(f"{n} {k}" for k, n in kinds.most_common())
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="a folder with corpus.jsonl")
    parser.add_argument("--out", type=Path, default=Path("outputs/bridge_task/data"))
    arguments = parser.parse_args()
    build(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
