"""Averages of adapters, from several workers or machines, with different ranks and scalings.

What is wanted is the average of the updates, D = sum_i w_i s_i B_i A_i, layer by layer. It has the rank of all adapters
together, so that there are three ways:

    exact    the factors side by side: A = [A_1; A_2; ...], B = [w_1 s_1 B_1, w_2 s_2 B_2, ...], which is D itself
    svd      the best update of a given rank (Eckart and Young 1936), from the factors, never as an [out, in] matrix
    factors  A = sum_i w_i A_i, B = sum_i w_i B_i: the seed's. Its product is not D: adapters that were trained apart
             share no basis, and the mixed terms w_i w_j B_i A_j enter as noise. Where they were started from the same
             A and meet often (local SGD), they do share one

Source: Hu et al. 2021 (arXiv 2106.09685) for B A; the concatenation is PEFT's ``cat``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from refragkit.adapters.low_rank import AdapterWeights, LowRank
from refragkit.errors import CheckpointError, ConfigError

Average = Literal["exact", "svd", "factors"]
AVERAGES: tuple[Average, ...] = ("exact", "svd", "factors")

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Merged:
    """An average of adapters.

    Attributes:
        adapter: the average.
        layer_errors: by layer, |D' - D| / |D| of the Frobenius norms, D' what was written; 0 where D is 0.
        relative_error: the same of all layers together.
    """

    adapter: AdapterWeights
    layer_errors: dict[str, float]
    relative_error: float


def merge_weights(n_adapters: int, weights: Sequence[float] | None) -> list[float]:
    """The weight of each adapter.

    Args:
        n_adapters: how many there are.
        weights: numbers that sum to 1; None for equal ones.

    Raises:
        ConfigError: another number of weights, or one that is not positive and finite, or another sum.
    """
    if n_adapters < 1:
        raise ConfigError("adapters: expected at least one adapter, such as adapters=[DIR,DIR], got none")
    if weights is None:
        return [1 / n_adapters] * n_adapters
    if len(weights) != n_adapters:
        raise ConfigError(
            f"weights: expected one number for each of the {n_adapters} adapters, got {len(weights)}: {list(weights)}"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"weights: expected positive finite numbers, got {list(weights)}")
    total = math.fsum(weights)
    if abs(total - 1) > _SUM_TOLERANCE:
        shares = ",".join(f"{weight / total:.7g}" for weight in weights)
        raise ConfigError(
            f"weights: expected numbers that sum to 1, got {list(weights)}, which sum to {total:g}; in proportion that"
            f" is weights=[{shares}]"
        )
    return [weight / total for weight in weights]


def merge_adapters(
    adapters: Sequence[AdapterWeights],
    weights: Sequence[float] | None = None,
    average: Average = "exact",
    rank: int | None = None,
) -> Merged:
    """The weighted average of adapters of one base model.

    A layer that an adapter leaves alone counts as one that it changes by 0.

    Args:
        adapters: at least one.
        weights: see `merge_weights`.
        average: see the module.
        rank: of ``svd``, and at most that of all adapters together; None: the highest rank of an adapter.

    Raises:
        ConfigError: weights, average or rank that can't be, or ``factors`` of adapters that differ in rank, scaling or
            layers.
        CheckpointError: adapters of different base models.
    """
    shares = merge_weights(len(adapters), weights)
    if average not in AVERAGES:
        raise ConfigError(f"average: expected one of {', '.join(AVERAGES)}, got {average!r}")
    if rank is not None and average != "svd":
        raise ConfigError(
            f"rank={rank} belongs to average=svd; average={average} has the rank that its adapters give it: leave rank"
            " null"
        )
    if rank is not None and rank < 1:
        raise ConfigError(f"rank: expected null or at least 1, got {rank}")
    _check_same_base(adapters)
    if average == "factors":
        _check_same_factors(adapters)
    paths = list(dict.fromkeys(path for adapter in adapters for path in adapter.layers))
    highest = max(update.rank for adapter in adapters for update in adapter.layers.values())
    layers: dict[str, LowRank] = {}
    errors: dict[str, float] = {}
    lost = total = 0.0
    for path in paths:
        terms = [(s, a.layers[path]) for s, a in zip(shares, adapters, strict=True) if path in a.layers]
        exact_a, exact_b = _side_by_side(terms)
        if average == "exact":
            layers[path] = _exact(exact_a, exact_b)
        elif average == "svd":
            layers[path] = _truncated(exact_a, exact_b, rank or highest)
        else:
            layers[path] = _mean_of_factors(terms)
        norm, difference = _norm(exact_a, exact_b), _difference(layers[path], exact_a, exact_b)
        errors[path] = difference / norm if norm else 0.0
        lost, total = lost + difference**2, total + norm**2
    return Merged(_like(adapters, layers), errors, math.sqrt(lost / total) if total else 0.0)


def _like(adapters: Sequence[AdapterWeights], layers: dict[str, LowRank]) -> AdapterWeights:
    """The layers as an adapter, with what its parts agree on."""
    first = adapters[0]
    agree = all(
        (set(a.layers), a.target_modules) == (set(first.layers), first.target_modules) for a in adapters
    )
    known = [adapter.base_hash for adapter in adapters if adapter.base_hash is not None]
    return AdapterWeights(
        layers=layers,
        dropout=first.dropout if all(a.dropout == first.dropout for a in adapters) else 0.0,
        target_modules=first.target_modules if agree else (),
        base_hash=known[0] if known else None,
        source="the merged adapter",
    )


def _check_same_base(adapters: Sequence[AdapterWeights]) -> None:
    known = [adapter for adapter in adapters if adapter.base_hash is not None]
    for other in known[1:]:
        if other.base_hash != known[0].base_hash:
            raise CheckpointError(
                f"{known[0].source} and {other.source} were trained on different base models (weights hashes"
                f" {str(known[0].base_hash)[:16]}... and {str(other.base_hash)[:16]}...): their updates don't add up"
            )
    first = adapters[0]
    for adapter in adapters[1:]:
        shared = set(first.layers) & set(adapter.layers)
        if not shared:
            raise CheckpointError(
                f"{first.source} and {adapter.source} have no layer in common (such as {next(iter(first.layers))} and"
                f" {next(iter(adapter.layers))}): they were trained on different base models"
            )
    shapes: dict[str, tuple[tuple[int, int], str]] = {}
    for adapter in adapters:
        for path, update in adapter.layers.items():
            shape, source = shapes.setdefault(path, (update.shape, adapter.source))
            if shape != update.shape:
                raise CheckpointError(
                    f"{path} is [{shape[0]}, {shape[1]}] in {source} and [{update.shape[0]}, {update.shape[1]}] in"
                    f" {adapter.source}: they were trained on different base models"
                )


def _check_same_factors(adapters: Sequence[AdapterWeights]) -> None:
    """The mean of factors makes sense for factors of one shape and scaling only."""
    first = adapters[0]
    for adapter in adapters[1:]:
        if set(adapter.layers) != set(first.layers):
            odd = sorted(set(adapter.layers) ^ set(first.layers))
            raise ConfigError(
                f"average=factors needs adapters of the same layers, and {odd[0]} is only in one of {first.source} and"
                f" {adapter.source}; use average=exact or average=svd"
            )
        for path, update in adapter.layers.items():
            for name in ("rank", "scaling"):
                mine, other = getattr(first.layers[path], name), getattr(update, name)
                if mine != other:
                    raise ConfigError(
                        f"average=factors needs adapters of the same rank and alpha, and the {name} of {path} is"
                        f" {mine:g} in {first.source} and {other:g} in {adapter.source}; use average=exact or"
                        " average=svd"
                    )


def _side_by_side(terms: Sequence[tuple[float, LowRank]]) -> tuple[Tensor, Tensor]:
    """A [R, in] and B [out, R] with B A = sum of w s B_i A_i, in float64."""
    a = torch.cat([update.A.double() for _, update in terms])
    b = torch.cat([weight * update.scaling * update.B.double() for weight, update in terms], dim=1)
    return a, b


def _exact(a: Tensor, b: Tensor) -> LowRank:
    """Stored with scaling 1, each direction's length shared by both factors, as training can go on from best."""
    lengths = a.norm(dim=1), b.norm(dim=0)
    balance = (lengths[1] / lengths[0]).sqrt()
    # A direction that is 0 (an adapter that has not learnt yet has B = 0) keeps its A: it may be learnt later.
    balance = torch.where(torch.isfinite(balance) & (balance > 0), balance, torch.ones_like(balance))
    return LowRank((a * balance[:, None]).float(), (b / balance).float(), float(len(a)))


def _truncated(a: Tensor, b: Tensor, rank: int) -> LowRank:
    """The best update of a rank, through the small [R, R] matrix between the factors' bases."""
    basis_b, inner_b = torch.linalg.qr(b)
    basis_a, inner_a = torch.linalg.qr(a.T)
    left, values, right = torch.linalg.svd(inner_b @ inner_a.T, full_matrices=False)
    rank = min(rank, len(values))
    root = values[:rank].sqrt()
    return LowRank(
        (root[:, None] * (right[:rank] @ basis_a.T)).float().contiguous(),
        (basis_b @ left[:, :rank] * root).float().contiguous(),
        float(rank),
    )


def _mean_of_factors(terms: Sequence[tuple[float, LowRank]]) -> LowRank:
    a = sum((weight * update.A.double() for weight, update in terms), start=torch.zeros(()).double())
    b = sum((weight * update.B.double() for weight, update in terms), start=torch.zeros(()).double())
    return replace(terms[0][1], A=a.float(), B=b.float())


def _norm(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of B A, from the triangles of both: nothing of the size [out, in] is made."""
    inner_a = torch.linalg.qr(a.T, mode="r").R
    inner_b = torch.linalg.qr(b, mode="r").R
    return float((inner_b @ inner_a.T).norm())


def _difference(found: LowRank, a: Tensor, b: Tensor) -> float:
    """Frobenius norm of what was stored minus B A."""
    return _norm(torch.cat([found.A.double(), a]), torch.cat([found.scaling * found.B.double(), -b], dim=1))
