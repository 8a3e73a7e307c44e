"""What a run trains and validates on: `MultiHopQA` and `Conversations`.

Constructors only store their arguments; `prepare` reads. A loader yields one whole global batch per step.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from refragkit.data.conversation_file import load_conversations
from refragkit.data.corpus import open_corpus
from refragkit.data.corpus_reader import CorpusReader
from refragkit.data.document_store import DocumentStore
from refragkit.data.questions import load_questions
from refragkit.data.split import hold_out, shared_gold, subset_positions
from refragkit.errors import ConfigError, DataError
from refragkit.types import Conversation, Document, Question

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from refragkit.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SAMPLE_DIR = Path(__file__).parent / "samples" / "multihop_qa"
MAX_VALIDATION_SHARE = 5
"""A split keeps at least four fifths for training."""


class DataModule(ABC):
    """What both kinds of data share.

    Attributes:
        train: examples to learn from, in file order.
        validation: examples to measure on, in file order; nothing of them is in ``train``.
        corpus: the passages to search, None where there are none.
        counts: how many examples there are, and what was left out.
        fingerprint: sha256 of everything above.
    """

    train: Sequence[Question] | Sequence[Conversation]
    validation: Sequence[Question] | Sequence[Conversation]
    corpus: Sequence[Document] | None
    counts: dict[str, int]
    fingerprint: str

    def __init__(
        self,
        corpus: str | None,
        chunk_tokens: int | None,
        chunk_overlap: int,
        chunk_tokenizer: str | None,
        tokenizer: str | None,
        vocab_size: int,
        cache_dir: str | Path,
        seed: int,
    ) -> None:
        self.corpus_path = corpus
        self.chunk_tokens = chunk_tokens
        self.chunk_overlap = chunk_overlap
        self.chunk_tokenizer = chunk_tokenizer
        self.tokenizer_path = tokenizer
        self.vocab_size = vocab_size
        self.cache_dir = Path(cache_dir)
        self.seed = seed
        self.train = []
        self.validation = []
        self.corpus = None
        self.counts = {}
        self.fingerprint = ""

    def prepare(self, cache_dir: str | Path | None = None, seed: int | None = None) -> None:
        """Read, check and split the files.

        Args:
            cache_dir: where `build_tokenizer` caches; None keeps what the constructor got.
            seed: of the order of batches; None keeps what the constructor got. The split doesn't depend on
                it: runs with different seeds are measured on the same examples.

        Raises:
            DataError: a missing, empty, broken or inconsistent file.
            ConfigError: a setting that can't be.
        """
        if cache_dir is not None:
            self.cache_dir = Path(cache_dir)
        if seed is not None:
            self.seed = seed
        self.counts = {}
        self._read()
        self.fingerprint = self._hash()

    def read_corpus(self) -> Sequence[Document] | None:
        """Read ``corpus`` alone, which is all that a search needs, and return it.

        Raises:
            DataError: there is none where one is expected, or it can't be read.
            ConfigError: a setting that can't be.
        """
        if self.corpus_path is None:
            cut = [key for key in ("chunk_tokens", "chunk_tokenizer") if getattr(self, key) is not None]
            if cut:
                raise ConfigError(
                    f"data.{cut[0]}={getattr(self, cut[0])} is about data.corpus, and data.corpus is null; set"
                    f" data.corpus=FILE_OR_FOLDER or leave data.{cut[0]} out"
                )
            self.corpus = self._own_corpus()
        else:
            reader = CorpusReader(
                self.corpus_path, self.chunk_tokens, self.chunk_overlap, self.chunk_tokenizer
            )
            self.corpus = list(reader.passages())
            self.counts |= reader.counts
        return self.corpus

    def _own_corpus(self) -> Sequence[Document] | None:
        """The corpus that comes with the examples, None where none does."""
        return None

    @abstractmethod
    def _read(self) -> None:
        """Fill in ``train``, ``validation``, ``corpus`` and ``counts``."""

    @abstractmethod
    def tokenizer_texts(self) -> list[str]:
        """What a tokenizer is trained on: never a validation question, answer or conversation."""

    def build_tokenizer(self, cache_dir: str | Path | None = None) -> Tokenizer:
        """Load the ``tokenizer`` folder, or train one on `tokenizer_texts` (cached by content).

        Raises:
            DataError: the folder is missing or no tokenizer.
        """
        from refragkit.data.tokenizer import Tokenizer

        if self.tokenizer_path is not None:
            try:
                return Tokenizer.load(self.tokenizer_path)
            except DataError as error:
                raise DataError(f"data.tokenizer: {error}") from error
        self._require_prepared()
        return Tokenizer.train(self.tokenizer_texts(), self.vocab_size, cache_dir or self.cache_dir)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that can't be the one that made the data; text goes with any.

        Raises:
            DataError: it is another one.
        """
        return

    def train_loader(self, global_batch_size: int, n_steps: int, first_step: int = 0) -> DataLoader[Any]:
        """Yields the global batches of steps ``first_step`` to ``n_steps`` - 1."""
        from refragkit.data.batches import BatchDataset, batch_loader

        self._require_prepared()
        return batch_loader(BatchDataset(self.train, self.seed, global_batch_size, n_steps, first_step))

    def validation_loader(self, batch_size: int, max_examples: int | None = None) -> DataLoader[Any]:
        """Yields every validation example once, in order."""
        from refragkit.data.batches import SequentialBatches, batch_loader

        self._require_prepared()
        return batch_loader(SequentialBatches(self.validation, batch_size, max_examples))

    def _require_prepared(self) -> None:
        if not self.train:
            raise RuntimeError(f"{type(self).__name__}: call prepare() first")

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.corpus or []):
            digest.update(f"{len(part)}\n".encode())
            if isinstance(part, DocumentStore):  # read once already, and not again
                digest.update(str(part.table.corpus_hash).encode())
                continue
            for item in part:
                digest.update(json.dumps(asdict(item), sort_keys=True, default=str).encode())
        return digest.hexdigest()


class MultiHopQA(DataModule):
    """Multi-hop questions with their gold passages, and the corpus to search.

    A folder holds ``corpus.jsonl`` and either ``train.jsonl`` and ``validation.jsonl`` (used as they are) or
    ``questions.jsonl`` (or ``train.jsonl`` alone), which is split so that no passage is gold on both sides.

    Args:
        path: the folder; None is the bundled sample.
        corpus: a file or folder of documents to search instead of ``corpus.jsonl``; see `CorpusReader`.
        chunk_tokens: tokens of a passage of ``corpus`` at most; None cuts ``.txt`` and ``.md`` only.
        chunk_overlap: tokens that such a passage repeats of the one before, at most.
        chunk_tokenizer: folder of the tokenizer whose tokens are meant; None is the default sentence encoder's.
        validation_questions: how many questions a split holds out, at most a fifth of them.
        max_train_questions: train on so many only, None for all.
        max_validation_questions: the same for validation.
        tokenizer: folder of a Hugging Face tokenizer; None trains one on the corpus and the questions.
        vocab_size: of the trained tokenizer, special tokens included.
        cache_dir: where the trained tokenizer is kept.
        seed: of the order of batches.
    """

    train: list[Question]
    validation: list[Question]

    def __init__(
        self,
        path: str | None = None,
        validation_questions: int = 200,
        max_train_questions: int | None = None,
        max_validation_questions: int | None = None,
        corpus: str | None = None,
        chunk_tokens: int | None = None,
        chunk_overlap: int = 32,
        chunk_tokenizer: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        cache_dir: str | Path = "outputs/cache",
        seed: int = 0,
    ) -> None:
        super().__init__(
            corpus, chunk_tokens, chunk_overlap, chunk_tokenizer, tokenizer, vocab_size, cache_dir, seed
        )
        self.path = path
        self.validation_questions = validation_questions
        self.max_train_questions = max_train_questions
        self.max_validation_questions = max_validation_questions

    def _read(self) -> None:
        _check_counts(
            validation_questions=self.validation_questions,
            max_train_questions=self.max_train_questions,
            max_validation_questions=self.max_validation_questions,
        )
        folder = self._folder()
        if not any((folder / name).is_file() for name in ("questions.jsonl", "train.jsonl")):
            self._incomplete(folder)
        corpus = self.read_corpus() or []
        doc_ids = corpus.table.positions if isinstance(corpus, DocumentStore) else {d.doc_id for d in corpus}
        train_file, validation_file = folder / "train.jsonl", folder / "validation.jsonl"
        if validation_file.is_file() and train_file.is_file():
            train, validation = load_questions(train_file, doc_ids), load_questions(validation_file, doc_ids)
            _check_disjoint(train, validation, folder)
        else:
            source = train_file if train_file.is_file() else folder / "questions.jsonl"
            questions = load_questions(source, doc_ids)
            train, validation = self._split(questions, source)
        in_files = len(train) + len(validation)
        self.train = [train[i] for i in subset_positions([q.id for q in train], self.max_train_questions)]
        self.validation = [
            validation[i] for i in subset_positions([q.id for q in validation], self.max_validation_questions)
        ]
        self.counts |= {
            "train_questions": len(self.train),
            "validation_questions": len(self.validation),
            "questions_in_files": in_files,
            "passages": len(corpus),
            "shared_gold_passages": len(shared_gold(self.train, self.validation)),
        }

    def tokenizer_texts(self) -> list[str]:
        """The corpus, and the questions and answers of the training side."""
        self._require_prepared()
        texts = [f"{d.title}\n{d.text}" for d in self.corpus or []]
        for question in self.train:
            texts += [question.question, *question.answers]
        return texts

    def _folder(self) -> Path:
        if self.path is None:
            return SAMPLE_DIR
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise DataError(
                f"data.path={self.path}: expected a folder with {self._expected()}, but it {problem}; "
                "data.path=null uses the bundled sample"
            )
        return folder

    def _own_corpus(self) -> Sequence[Document]:
        folder = self._folder()
        if not (folder / "corpus.jsonl").is_file():
            self._incomplete(folder)
        return open_corpus(folder / "corpus.jsonl", self.cache_dir)

    def _incomplete(self, folder: Path) -> NoReturn:
        found = ", ".join(sorted(f.name for f in folder.glob("*.jsonl"))) or "none"
        raise DataError(
            f"data.path={self.path}: expected {self._expected()} in this folder, found JSONL files: {found}"
        )

    def _expected(self) -> str:
        corpus = "corpus.jsonl and " if self.corpus_path is None else ""
        return f"{corpus}questions.jsonl (or train.jsonl and validation.jsonl)"

    def _split(self, questions: list[Question], source: Path) -> tuple[list[Question], list[Question]]:
        n_validation = _share(len(questions), self.validation_questions, "data.validation_questions", source)
        train, validation = hold_out(
            [q.id for q in questions], [q.supporting_ids for q in questions], n_validation
        )
        if not validation:
            raise DataError(
                f"{source}: can't hold out {n_validation} questions without sharing a gold passage (supporting_ids) "
                "with training: too many questions hang together; give train.jsonl and validation.jsonl instead"
            )
        return [questions[i] for i in train], [questions[i] for i in validation]


class Conversations(DataModule):
    """A user's own conversations.

    Conversations that open with the same user turn (paths of one tree, say) stay on one side of the split.

    Args:
        path: JSONL of ``{id, messages}``; required, except to search ``corpus`` only.
        validation_path: a second such file; None holds out a part of the first.
        corpus: a file or folder of documents to search; see `CorpusReader`.
        chunk_tokens: tokens of a passage of ``corpus`` at most; None cuts ``.txt`` and ``.md`` only.
        chunk_overlap: tokens that such a passage repeats of the one before, at most.
        chunk_tokenizer: folder of the tokenizer whose tokens are meant; None is the default sentence encoder's.
        validation_conversations: how many conversations a split holds out, at most a fifth of them.
        max_train_conversations: train on so many only, None for all.
        max_validation_conversations: the same for validation.
        tokenizer: folder of a Hugging Face tokenizer; None trains one on the conversations.
        vocab_size: of the trained tokenizer, special tokens included.
        cache_dir: where the trained tokenizer is kept.
        seed: of the order of batches.
    """

    train: list[Conversation]
    validation: list[Conversation]

    def __init__(
        self,
        path: str | None = None,
        validation_path: str | None = None,
        validation_conversations: int = 100,
        max_train_conversations: int | None = None,
        max_validation_conversations: int | None = None,
        corpus: str | None = None,
        chunk_tokens: int | None = None,
        chunk_overlap: int = 32,
        chunk_tokenizer: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        cache_dir: str | Path = "outputs/cache",
        seed: int = 0,
    ) -> None:
        super().__init__(
            corpus, chunk_tokens, chunk_overlap, chunk_tokenizer, tokenizer, vocab_size, cache_dir, seed
        )
        self.path = path
        self.validation_path = validation_path
        self.validation_conversations = validation_conversations
        self.max_train_conversations = max_train_conversations
        self.max_validation_conversations = max_validation_conversations

    def _read(self) -> None:
        _check_counts(
            validation_conversations=self.validation_conversations,
            max_train_conversations=self.max_train_conversations,
            max_validation_conversations=self.max_validation_conversations,
        )
        if self.path is None:
            raise ConfigError(
                'data.path: expected a JSONL file of conversations, one {"id": ..., "messages": [{"role": "user", '
                '"content": ...}, ...]} a line, got null; set data.path=FILE'
            )
        self.read_corpus()
        try:
            train = load_conversations(self.path)
        except DataError as error:
            raise DataError(f"data.path: {error}") from error
        if self.validation_path is not None:
            try:
                validation = load_conversations(self.validation_path)
            except DataError as error:
                raise DataError(f"data.validation_path: {error}") from error
        else:
            source = Path(self.path)
            wanted = _share(
                len(train), self.validation_conversations, "data.validation_conversations", source
            )
            openings = [[opening(c)] for c in train]
            train_positions, positions = hold_out([c.id for c in train], openings, wanted)
            if not positions:
                raise DataError(
                    f"{source}: can't hold out {wanted} conversations: too many open with the same turn; give "
                    "data.validation_path"
                )
            validation = [train[i] for i in positions]
            train = [train[i] for i in train_positions]
        in_files = len(train) + len(validation)
        self.train = [train[i] for i in subset_positions([c.id for c in train], self.max_train_conversations)]
        self.validation = [
            validation[i]
            for i in subset_positions([c.id for c in validation], self.max_validation_conversations)
        ]
        self.counts |= {
            "train_conversations": len(self.train),
            "validation_conversations": len(self.validation),
            "conversations_in_files": in_files,
        }

    def tokenizer_texts(self) -> list[str]:
        """The corpus, and the turns and documents of the training side."""
        self._require_prepared()
        texts = [f"{d.title}\n{d.text}" for d in self.corpus or []]
        for conversation in self.train:
            for message in conversation.messages:
                texts += [message.content] if message.content else []
                texts += [f"{hit.document.title}\n{hit.document.text}" for hit in message.documents]
        return texts


def opening(conversation: Conversation) -> str:
    """The first user turn, else the first turn at all: conversations that share it stay on one side of a split."""
    turns = [m for m in conversation.messages if m.role == "user"] or list(conversation.messages)
    return " ".join(turns[0].content.split())


def _check_counts(**counts: int | None) -> None:
    wrong = [
        f"data.{k}: expected an integer of at least 1, got {v}"
        for k, v in counts.items()
        if v is not None and v < 1
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _share(n_examples: int, wanted: int, key: str, source: Path) -> int:
    """``wanted``, or what can be spared of ``n_examples``."""
    if n_examples < 2:
        raise DataError(
            f"{source}: expected at least 2 examples (one to train, one to validate), got {n_examples}"
        )
    most = max(n_examples // MAX_VALIDATION_SHARE, 1)
    if wanted > most:
        log.warning(
            "%s=%d is more than a fifth of the %d examples of %s: %d are held out",
            key,
            wanted,
            n_examples,
            source,
            most,
        )
    return min(wanted, most)


def _check_disjoint(train: Sequence[Question], validation: Sequence[Question], folder: Path) -> None:
    same = sorted({q.id for q in train} & {q.id for q in validation})
    if same:
        raise DataError(
            f"{folder}: {len(same)} question ids are in train.jsonl and in validation.jsonl, such as {same[0]!r}"
        )
    shared = shared_gold(train, validation)
    if shared:
        log.warning("%s: %d passages are gold in train.jsonl and in validation.jsonl", folder, len(shared))
