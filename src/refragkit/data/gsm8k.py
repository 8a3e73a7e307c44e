r"""Questions whose worked answer ends in a number, as GSM8K's do.

One JSON object a line: ``{"question": ..., "answer": "48/2 = <<48/2=24>>24 ...\n#### 24"[, "id", "final_answer"]}``.

Source: Cobbe et al. 2021 (arXiv 2110.14168).
"""

from __future__ import annotations

import re
from pathlib import Path

from refragkit.data.datamodule import DataModule, _check_counts, _share
from refragkit.data.jsonl import LineError, Record, read_jsonl
from refragkit.data.split import hold_out, subset_positions
from refragkit.errors import DataError
from refragkit.rewards.numeric import final_number
from refragkit.types import Question

SAMPLE_DIR = Path(__file__).parent / "samples" / "gsm8k"
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


def load_worked_answers(path: str | Path, annotations: bool = True) -> list[Question]:
    """The questions of ``path`` in file order, each with its worked answer and, as an alias, the number alone.

    Rows without an ``id`` get ``<name of the file>_<number of the row, from 0>``. Other keys become metadata.

    Args:
        path: the file.
        annotations: keep GSM8K's calculator annotations ``<<48/2=24>>``; without them answers are a seventh shorter.

    Raises:
        DataError: a missing or empty file, broken lines, repeated ids, an answer that arrives at no number or not at
            ``final_answer``; names file and line.
    """
    rows = 0
    stem = Path(path).stem

    def question(record: Record) -> tuple[str, Question]:
        nonlocal rows
        identifier = record.identifier("id", default=f"{stem}_{rows:05d}")
        rows += 1
        text = record.string("question")
        answer = record.string("answer")
        number = final_number(answer)
        if number is None:
            raise LineError(
                "key 'answer': expected a last line with a number, such as '#### 72', got "
                f"{answer.strip().splitlines()[-1][:60]!r}"
            )
        final = answer.rpartition("####")[2].strip().replace(",", "") if "####" in answer else answer.strip()
        if "final_answer" in record.fields:
            final = str(record.fields["final_answer"])
            if final_number(final) != number:
                raise LineError(f"key 'final_answer': {final!r} is not what the answer arrives at ({number})")
        worked = answer.strip() if annotations else _ANNOTATION.sub("", answer).strip()
        metadata = {k: v for k, v in record.rest().items() if k != "final_answer"}
        answers = tuple(dict.fromkeys((worked, final)))
        return identifier, Question(identifier, text, answers, metadata=metadata)

    return read_jsonl(path, "questions with worked answers", question)


class GSM8K(DataModule):
    """Grade-school maths word problems: the bundled sample, or a file or folder of the same kind.

    A folder holds ``train.jsonl`` and, if it is to be used as it is, ``validation.jsonl``; a ``test.jsonl`` beside them
    is never read unless ``validation_path`` names it. Questions that read the same stay on one side of a split.

    Args:
        path: the folder or file; None is the bundled sample.
        validation_path: a file to validate on; None takes ``validation.jsonl`` or holds out a part of the first.
        validation_questions: how many questions a split holds out, at most a fifth of them.
        max_train_questions: train on so many only, None for all.
        max_validation_questions: the same for validation.
        annotations: keep the calculator annotations ``<<48/2=24>>``.
        corpus: a file or folder of documents to search; see `CorpusReader`.
        chunk_tokens: tokens of a passage of ``corpus`` at most; None cuts ``.txt`` and ``.md`` only.
        chunk_overlap: tokens that such a passage repeats of the one before, at most.
        chunk_tokenizer: folder of the tokenizer whose tokens are meant; None is the default sentence encoder's.
        tokenizer: folder of a Hugging Face tokenizer; None trains one on questions and answers.
        vocab_size: of the trained tokenizer, special tokens included.
        cache_dir: where the trained tokenizer is kept.
        seed: of the order of batches.
    """

    train: list[Question]
    validation: list[Question]

    def __init__(
        self,
        path: str | None = None,
        validation_path: str | None = None,
        validation_questions: int = 200,
        max_train_questions: int | None = None,
        max_validation_questions: int | None = None,
        annotations: bool = True,
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
        self.validation_questions = validation_questions
        self.max_train_questions = max_train_questions
        self.max_validation_questions = max_validation_questions
        self.annotations = annotations

    def _read(self) -> None:
        _check_counts(
            validation_questions=self.validation_questions,
            max_train_questions=self.max_train_questions,
            max_validation_questions=self.max_validation_questions,
        )
        self.read_corpus()
        train_file, validation_file = self._files()
        train = self._load(train_file, "data.path")
        if validation_file is not None:
            validation = self._load(
                validation_file, "data.path" if self.validation_path is None else "data.validation_path"
            )
            same = sorted({q.id for q in train} & {q.id for q in validation})
            if same:
                raise DataError(
                    f"{len(same)} question ids are in {train_file} and in {validation_file}, such as {same[0]!r}"
                )
        else:
            wanted = _share(len(train), self.validation_questions, "data.validation_questions", train_file)
            wordings = [[" ".join(q.question.split())] for q in train]
            kept, held = hold_out([q.id for q in train], wordings, wanted)
            if not held:
                raise DataError(
                    f"{train_file}: can't hold out {wanted} questions: too many read the same; give"
                    " data.validation_path"
                )
            train, validation = [train[i] for i in kept], [train[i] for i in held]
        in_files = len(train) + len(validation)
        self.train = [train[i] for i in subset_positions([q.id for q in train], self.max_train_questions)]
        self.validation = [
            validation[i] for i in subset_positions([q.id for q in validation], self.max_validation_questions)
        ]
        self.counts |= {
            "train_questions": len(self.train),
            "validation_questions": len(self.validation),
            "questions_in_files": in_files,
        }

    def tokenizer_texts(self) -> list[str]:
        """The corpus, and the questions and worked answers of the training side."""
        self._require_prepared()
        texts = [f"{d.title}\n{d.text}" for d in self.corpus or []]
        for question in self.train:
            texts += [question.question, question.answers[0]]
        return texts

    def _load(self, file: Path, key: str) -> list[Question]:
        try:
            return load_worked_answers(file, self.annotations)
        except DataError as error:
            raise DataError(f"{key}: {error}") from error

    def _files(self) -> tuple[Path, Path | None]:
        given = None if self.validation_path is None else Path(self.validation_path).expanduser()
        path = SAMPLE_DIR if self.path is None else Path(self.path).expanduser()
        if path.is_file():
            return path, given
        if not (path / "train.jsonl").is_file():
            found = ", ".join(sorted(f.name for f in path.glob("*.jsonl"))) or "none"
            problem = f"found JSONL files: {found}" if path.is_dir() else "but it does not exist"
            raise DataError(
                f"data.path={self.path}: expected a JSONL file of questions with worked answers or a folder with"
                f" train.jsonl, {problem}; data.path=null uses the bundled sample"
            )
        beside = path / "validation.jsonl"
        return path / "train.jsonl", given or (beside if beside.is_file() else None)
