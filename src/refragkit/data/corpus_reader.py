"""A knowledge base of a user's own documents: a file or folder, its long documents cut into passages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from refragkit.data.chunking import Chunker, Span, check_chunking, load_chunk_tokenizer
from refragkit.data.document_files import CorpusFile, Problem, SourceDocument, corpus_files, read_file
from refragkit.data.jsonl import MAX_REPORTED_LINES, bad_lines
from refragkit.data.markdown import Section
from refragkit.errors import ConfigError, DataError
from refragkit.types import Document

log = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 200
"""For ``.txt`` and ``.md``: what all-MiniLM-L6-v2 reads at once, less a title."""

MAX_WARNINGS = 5
_BATCH_CHARACTERS = 1 << 20


class CorpusReader:
    """Reads a file or folder of a user's own documents and cuts the long ones into passages.

    A passage that is one of several of a document has the document's id and ``#`` and its number as id, the document's
    metadata and its number as ``chunk``; those of a Markdown section have its headings as title. A document that fits
    one chunk stays as it is.

    In a folder, what can't be read is left out, with a warning for the first few and counts for all. A single file that
    is bad is an error.

    Attributes:
        counts: after a reading: ``corpus_files`` (read to some end), ``corpus_documents``, ``passages``, and what was
            left out: ``corpus_bad_files``, ``corpus_bad_lines``, ``corpus_other_files``, ``corpus_refused_links``.
    """

    def __init__(
        self,
        source: str | Path,
        chunk_tokens: int | None = None,
        chunk_overlap: int = 32,
        chunk_tokenizer: str | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            source: the file or folder.
            chunk_tokens: tokens of a passage at most; None leaves ``.jsonl`` and ``.parquet``, which hold passages, as
                they are and cuts ``.txt`` and ``.md`` at `DEFAULT_CHUNK_TOKENS`.
            chunk_overlap: tokens that a passage repeats of the one before, at most.
            chunk_tokenizer: see `load_chunk_tokenizer`.

        Raises:
            ConfigError: sizes that can't be, or an empty name.
        """
        if not str(source).strip():  # would be the current folder
            raise ConfigError("data.corpus: expected a file or folder, got an empty name; null means none")
        check_chunking(DEFAULT_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens, chunk_overlap)
        self.source = source
        self.chunk_tokens = chunk_tokens
        self.chunk_overlap = chunk_overlap
        self.chunk_tokenizer = chunk_tokenizer
        self.counts: dict[str, int] = {}
        self._chunker: Chunker | None = None

    def passages(self) -> Iterator[Document]:
        """The passages, one file after the other, sorted by name; nothing but their ids is kept.

        Raises:
            DataError: nothing at all could be read, the one file given is bad, or an id is used twice.
        """
        found = _Findings(self.source)
        self.counts = found.counts
        first_use: dict[str, str] = {}
        for passage, file in self._cut(found.documents()):
            other = first_use.setdefault(passage.doc_id, file)
            if other != file or len(first_use) == found.counts["passages"]:
                where = f"twice in {file}" if other == file else f"in {other} and in {file}"
                raise DataError(
                    f"data.corpus={self.source}: the id {passage.doc_id!r} is used {where}; ids must be unique in the"
                    " whole corpus: rename one, or leave the key id out to have ids made of file and line"
                )
            found.counts["passages"] += 1
            yield passage
        found.report()

    def _cut(self, documents: Iterable[tuple[SourceDocument, str]]) -> Iterator[tuple[Document, str]]:
        """Passages with the file that each is from."""
        batch: list[tuple[SourceDocument, str]] = []
        characters = 0
        for item in documents:
            if item[0].is_passage and self.chunk_tokens is None:
                yield from self._cut_batch(batch)
                batch, characters = [], 0
                yield item[0].document, item[1]
                continue
            batch.append(item)
            characters += len(item[0].document.text)
            if characters >= _BATCH_CHARACTERS:
                yield from self._cut_batch(batch)
                batch, characters = [], 0
        yield from self._cut_batch(batch)

    def _cut_batch(self, batch: list[tuple[SourceDocument, str]]) -> Iterator[tuple[Document, str]]:
        if not batch:
            return
        if self._chunker is None:
            tokens = self.chunk_tokens or DEFAULT_CHUNK_TOKENS
            self._chunker = Chunker(load_chunk_tokenizer(self.chunk_tokenizer), tokens, self.chunk_overlap)
        fits = self._chunker.fits([source.document.text for source, _ in batch])
        for (source, file), whole in zip(batch, fits, strict=True):
            if whole:
                yield source.document, file
            else:
                for passage in _chunks(source, self._chunker):
                    yield passage, file


def _chunks(source: SourceDocument, chunker: Chunker) -> Iterator[Document]:
    document = source.document
    number = 0
    for section, (start, end) in _section_spans(source, chunker):
        text = document.text[start:end].strip()
        if (start, end) == (0, len(document.text)):
            yield document
        elif text:
            metadata = {**document.metadata}
            metadata.setdefault("chunk", number)
            yield Document(f"{document.doc_id}#{number}", section.title, text, metadata)
            number += 1


def _section_spans(source: SourceDocument, chunker: Chunker) -> Iterator[tuple[Section, Span]]:
    text = source.document.text
    parts = source.sections or [Section(0, source.document.title)]
    ends = [part.start for part in parts[1:]] + [len(text)]
    for part, end in zip(parts, ends, strict=True):
        for a, b in chunker.spans(text[part.start : end]):
            yield part, (part.start + a, part.start + b)


_COUNTS = {
    "file": "corpus_bad_files",
    "line": "corpus_bad_lines",
    "other": "corpus_other_files",
    "link": "corpus_refused_links",
}


class _Findings:
    """What a reading came upon: the documents, and an account of everything that was left out."""

    def __init__(self, source: str | Path) -> None:
        self.source = source
        self.single = Path(source).expanduser().is_file()
        self.counts = dict.fromkeys(("passages", "corpus_files", "corpus_documents", *_COUNTS.values()), 0)
        self._places = 0
        self._shown: list[str] = []
        self._other: Counter[str] = Counter()

    def documents(self) -> Iterator[tuple[SourceDocument, str]]:
        """The documents with the file of each."""
        for file in corpus_files(self.source):
            if isinstance(file, Problem):
                self._note([file.message], 1, file.kind)
            else:
                yield from self._read(file)
        if not self.counts["corpus_documents"]:
            raise DataError(self._nothing())

    def _read(self, file: CorpusFile) -> Iterator[tuple[SourceDocument, str]]:
        before = self.counts["corpus_documents"]
        problems: dict[str, list[str]] = {"line": [], "file": []}
        n_lines = 0
        for item in read_file(file):
            if not isinstance(item, Problem):
                self.counts["corpus_documents"] += 1
                yield item, file.name
                continue
            n_lines += item.kind == "line"
            if len(problems[item.kind]) < MAX_REPORTED_LINES:
                problems[item.kind].append(item.message)
        self.counts["corpus_files"] += self.counts["corpus_documents"] > before
        found = problems["file"] + problems["line"]
        if self.single and found:
            n_problems = n_lines + len(problems["file"])
            raise DataError(f"data.corpus: {bad_lines(file.path, found[:MAX_REPORTED_LINES], n_problems)}")
        self._note(problems["line"], n_lines, "line")
        self._note(problems["file"], len(problems["file"]), "file")

    def _note(self, messages: list[str], count: int, kind: str) -> None:
        """Count what was left out of one place and warn of it, the first few times."""
        self.counts[_COUNTS[kind]] += count
        if kind == "other":
            self._other.update(messages)
        elif messages:
            self._places += 1
            more = f" (and {count - 1} more bad lines in this file)" if count > 1 else ""
            if self._places <= MAX_WARNINGS:
                self._shown.append(messages[0] + more)
                log.warning("data.corpus: left out %s%s", messages[0], more)

    def report(self) -> None:
        """Log what was read and what was left out."""
        counts = self.counts
        left_out = [
            f"{counts[f'corpus_{key}']} {key.replace('_', ' ')}"
            for key in ("bad_files", "bad_lines", "refused_links")
        ]
        if self._other:
            left_out.append(f"{counts['corpus_other_files']} files of other types ({self._others()})")
        if self._places > MAX_WARNINGS:
            log.warning("data.corpus: problems in %d more files, not shown", self._places - MAX_WARNINGS)
        log.info(
            "data.corpus=%s: %d passages of %d documents in %d files; left out: %s",
            self.source,
            counts["passages"],
            counts["corpus_documents"],
            counts["corpus_files"],
            ", ".join(part for part in left_out if not part.startswith("0 ")) or "nothing",
        )

    def _nothing(self) -> str:
        head = f"data.corpus={self.source}: no document could be read"
        if not self._places:
            found = f"only files of other types ({self._others()})" if self._other else "nothing"
            return f"{head}: expected .jsonl, .md, .parquet or .txt files in this folder, found {found}"
        left = self._places - len(self._shown)
        more = f"\n  ... and problems in {left} more files" if left else ""
        return "\n  ".join([f"{head}:", *self._shown]) + more

    def _others(self) -> str:
        most = self._other.most_common(MAX_WARNINGS)
        rest = len(self._other) - len(most)
        return ", ".join(f"{suffix} {n}" for suffix, n in most) + (f" and {rest} more" if rest > 0 else "")
