"""Training data as token ids: `Tokens`, files that ``task=tokenize`` or the seed wrote."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from refragkit.data.datamodule import DataModule, _check_counts, _share
from refragkit.data.token_file import TokenFile, open_token_file
from refragkit.errors import ConfigError, DataError
from refragkit.types import TokenSequence

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer

MIN_TOKENS = 2
"""The first token of an example is never predicted: with one alone there is nothing to learn."""


class TokenSequences(Sequence[TokenSequence]):
    """Some examples of some token files, each read from the disk when it is asked for.

    Args:
        files: open files, whose examples are numbered through.
        positions: [N] numbers of the examples meant.
    """

    def __init__(self, files: Sequence[TokenFile], positions: NDArray[np.int64]) -> None:
        self.files = list(files)
        self.positions = positions
        self._first = [0, *accumulate(len(file) for file in self.files)]

    def __len__(self) -> int:
        """N."""
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> TokenSequence: ...

    @overload
    def __getitem__(self, index: slice) -> TokenSequences: ...

    def __getitem__(self, index: int | slice) -> TokenSequence | TokenSequences:
        """One example, or some of them."""
        if isinstance(index, slice):
            return TokenSequences(self.files, self.positions[index])
        position = int(self.positions[index])
        number = bisect_right(self._first, position) - 1
        file, within = self.files[number], position - self._first[number]
        ids, learnt = file.example(within)
        mask = learnt.tolist()
        mask[:1] = [False]
        return TokenSequence(f"{file.path.name}#{within}", (), tuple(ids.tolist()), tuple(mask))


class Tokens(DataModule):
    """Token files, memory-mapped; see `refragkit.data.token_file`.

    Files of the seed's layout have no loss mask: every token of an example but the first is learnt. Ours have one, and
    know the tokenizer that wrote them: another one is refused.

    Args:
        path: a file, or a folder whose ``.bin`` files are taken together; required.
        validation_path: the same to validate on; None holds out a part of the first. Examples whose conversations open
            with the same turn (in the seed's layout: the same examples) stay on one side.
        validation_examples: how many examples a split holds out, at most a fifth of them.
        max_train_examples: train on so many only, None for all.
        max_validation_examples: the same for validation.
        tokenizer: folder of the tokenizer that wrote the files; None: that of the model.
        cache_dir: not used; every kind of data has it.
        seed: of the order of batches.
    """

    train: Sequence[TokenSequence]
    validation: Sequence[TokenSequence]

    def __init__(
        self,
        path: str | None = None,
        validation_path: str | None = None,
        validation_examples: int = 100,
        max_train_examples: int | None = None,
        max_validation_examples: int | None = None,
        tokenizer: str | None = None,
        cache_dir: str | Path = "outputs/cache",
        seed: int = 0,
    ) -> None:
        super().__init__(None, None, 0, None, tokenizer, 4096, cache_dir, seed)
        self.path = path
        self.validation_path = validation_path
        self.validation_examples = validation_examples
        self.max_train_examples = max_train_examples
        self.max_validation_examples = max_validation_examples
        self.files: list[TokenFile] = []

    def _read(self) -> None:
        _check_counts(
            validation_examples=self.validation_examples,
            max_train_examples=self.max_train_examples,
            max_validation_examples=self.max_validation_examples,
        )
        if self.path is None:
            raise ConfigError(
                "data.path: expected a token file that task=tokenize or the seed wrote, or a folder of them, got null;"
                " set data.path=FILE"
            )
        train_files = _open(self.path, "data.path")
        validation_files = (
            [] if self.validation_path is None else _open(self.validation_path, "data.validation_path")
        )
        self.files = [*train_files, *validation_files]
        self.vocab_size = max((f.vocab_size or 0 for f in self.files), default=0) or self.vocab_size
        positions, groups = _usable(train_files)
        if validation_files:
            held_positions, held_groups = _usable(validation_files)
        else:
            source = Path(self.path)
            wanted = _share(len(positions), self.validation_examples, "data.validation_examples", source)
            held = hold_out_groups(groups, wanted)
            if not held.any():
                raise DataError(
                    f"{source}: can't hold out {wanted} examples: too many open with the same turn; give"
                    " data.validation_path"
                )
            held_positions, held_groups = positions[held], groups[held]
            positions, groups = positions[~held], groups[~held]
        in_files = sum(len(file) for file in self.files)
        usable = len(positions) + len(held_positions)
        self.train = TokenSequences(train_files, _subset(positions, groups, self.max_train_examples))
        self.validation = TokenSequences(
            validation_files or train_files,
            _subset(held_positions, held_groups, self.max_validation_examples),
        )
        for side, key in ((self.train, "data.path"), (self.validation, "data.validation_path")):
            if not side:
                raise DataError(
                    f"{key}: expected examples of at least {MIN_TOKENS} tokens, but there is none in"
                    f" {self.path if key == 'data.path' else self.validation_path}"
                )
        self.counts |= {
            "train_examples": len(self.train),
            "validation_examples": len(self.validation),
            "examples_in_files": in_files,
            "too_short": in_files - usable,
        }

    def tokenizer_texts(self) -> list[str]:
        """None: a tokenizer can't be trained on ids."""
        return []

    def build_tokenizer(self, cache_dir: str | Path | None = None) -> Tokenizer:
        """Load the ``tokenizer`` folder.

        Raises:
            ConfigError: there is none.
            DataError: it is no tokenizer, or not the one that wrote the files.
        """
        if self.tokenizer_path is None:
            raise ConfigError(
                "data=tokens needs the tokenizer that wrote the files, since none can be trained on ids: give its"
                " folder as data.tokenizer=DIR, or a model that has it (model.path, model.init)"
            )
        return super().build_tokenizer(cache_dir)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Make sure that ``tokenizer`` wrote the files, or at least has all ids that are in them.

        Raises:
            DataError: names the file, and for an id outside the vocabulary its byte.
        """
        for file in self.files:
            if file.tokenizer_hash is None:
                file.check_ids(tokenizer.vocab_size)
            elif file.tokenizer_hash != tokenizer.fingerprint:
                raise DataError(
                    f"{file.path}: was written with another tokenizer (sha256 {file.tokenizer_hash[:16]}..., this run's"
                    f" has {tokenizer.fingerprint[:16]}...): its ids mean other tokens. Choose the model or"
                    " data.tokenizer that it was written for, or write the file again with task=tokenize"
                )

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            assert isinstance(part, TokenSequences)
            for file in part.files:
                digest.update(bytes.fromhex(file.sha256))
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.positions.astype("<i8").tobytes())
        return digest.hexdigest()


def hold_out_groups(groups: NDArray[np.uint64], n_validation: int) -> NDArray[np.bool_]:
    """Which examples to validate on: whole groups in the order of their numbers (which are hashes), while they fit.

    Args:
        groups: [N]; see `TokenFile`.
        n_validation: upper bound.

    Returns:
        [N] flags, a function of contents only: the order of examples and the seed make no difference.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    held = np.zeros(len(sizes), dtype=np.bool_)
    room = n_validation
    for i, size in enumerate(sizes.tolist()):
        if size <= room:
            held[i] = True
            room -= size
        if not room:
            break
    return np.asarray(held[group], dtype=np.bool_)


def _subset(positions: NDArray[np.int64], groups: NDArray[np.uint64], n: int | None) -> NDArray[np.int64]:
    """``n`` of the positions (None: all) in file order; a smaller subset is part of a larger one."""
    if n is None or n >= len(positions):
        return positions
    return np.sort(positions[np.lexsort((positions, groups))[:n]])


def _usable(files: Sequence[TokenFile]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Numbers of the examples with something to learn, numbered through all files, and their groups."""
    lengths = np.concatenate([file.lengths for file in files])
    groups = np.concatenate([file.groups for file in files])
    positions = np.flatnonzero(lengths >= MIN_TOKENS)
    return positions, groups[positions]


def _open(path: str, key: str) -> list[TokenFile]:
    """The file, or the files of the folder in the order of the numbers in their names."""
    given = Path(path).expanduser()
    paths = [given]
    if given.is_dir():
        paths = sorted(given.glob("*.bin"), key=_natural)
        if not paths:
            raise DataError(f"{key}: {given}: expected token files (*.bin) in this folder, but there is none")
    try:
        return [open_token_file(file) for file in paths]
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _natural(path: Path) -> list[tuple[int, str]]:
    """``train_2`` before ``train_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
