"""A token file cut into parts, for workers that train on one each: ``<base>_0.bin``, ``<base>_1.bin``, ..."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from refragkit.data.token_file import TokenFile, new_token_file
from refragkit.errors import ConfigError, DataError

_COPIED_TOKENS = 1 << 20  # at a time


def part_weights(split: int | None, split_weights: Sequence[float] | None) -> list[float] | None:
    """The share of each part, or None for a file in one piece.

    Args:
        split: so many equal parts.
        split_weights: one number for each part.

    Raises:
        ConfigError: both are set, or numbers that can't be.
    """
    if split is not None and split_weights is not None:
        raise ConfigError(
            f"split={split} and split_weights={list(split_weights)} both cut the file; leave one null: split for equal"
            " parts, split_weights for unequal ones"
        )
    if split is not None:
        if split < 1:
            raise ConfigError(f"split: expected at least 1 part, got {split}")
        return [1.0] * split
    if split_weights is None:
        return None
    if not split_weights or not all(0 < weight < math.inf for weight in split_weights):
        raise ConfigError(
            f"split_weights: expected a positive number for each part, such as [6,2], got {list(split_weights)}"
        )
    return list(split_weights)


def boundaries(n_examples: int, weights: Sequence[float]) -> list[int]:
    """Where parts begin and end: part i is examples ``boundaries[i]`` to ``boundaries[i + 1]`` - 1.

    Parts of equal weight differ by one example at most.

    Raises:
        DataError: a part would be empty.
    """
    total, so_far, cuts = math.fsum(weights), [0.0], [0]
    for weight in weights:
        so_far.append(so_far[-1] + weight)
        cuts.append(round(n_examples * so_far[-1] / total))
    cuts[-1] = n_examples
    sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
    if not all(sizes):
        raise DataError(
            f"{n_examples} examples can't be cut into parts by the weights {list(weights)}: they would hold {sizes};"
            " use fewer parts"
        )
    return cuts


def write_parts(
    whole: TokenFile, paths: Sequence[Path], weights: Sequence[float], tokenizer_hash: str
) -> None:
    """Write the examples of ``whole`` in their order into files of the same layout.

    None of them appears before all are written.

    Args:
        whole: the file.
        paths: of the parts.
        weights: the share of each, by examples.
        tokenizer_hash: kept by our layout.

    Raises:
        DataError: there are fewer examples than parts.
        OSError: the disk is full.
    """
    cuts = boundaries(len(whole), weights)
    with ExitStack() as stack:
        writers = []
        for i, path in enumerate(paths):
            writer = stack.enter_context(
                new_token_file(path, whole.format, tokenizer_hash, whole.vocab_size or 1)
            )
            writers.append(writer)
            begin = cuts[i]
            while begin < cuts[i + 1]:
                end, tokens = begin, 0
                while end < cuts[i + 1] and (end == begin or tokens < _COPIED_TOKENS):
                    tokens += int(whole.lengths[end])
                    end += 1
                examples = [whole.example(n) for n in range(begin, end)]
                writer.append(
                    np.concatenate([ids for ids, _ in examples]),
                    np.concatenate([learnt for _, learnt in examples]),
                    np.array([len(ids) for ids, _ in examples], dtype=np.int64),
                    np.asarray(whole.groups[begin:end]),
                )
                begin = end
        for writer in writers:
            writer.commit()
