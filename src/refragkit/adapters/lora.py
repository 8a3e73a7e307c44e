"""LoRA: a trained low-rank update beside frozen linear layers, chosen by name and by block type.

Glossary
    W = base_layer.weight [out, in]   frozen
    A = lora_A [r, in], B = lora_B [out, r]   trained, float32 whatever W is
    s = scaling = alpha / r, or alpha / sqrt(r) with rslora
    y = W x + bias + s B A dropout(x)

Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1; rsLoRA: Kalajdzievski 2023 (arXiv 2312.03732).
Differs: A starts as in PEFT (Kaiming uniform with a = sqrt(5)), not Gaussian, and each layer draws it from
a generator of its own, seeded by (seed, module path), so that it depends on nothing else in the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from refragkit.adapters.low_rank import LowRank
from refragkit.adapters.report import AdapterReport, Projection, coverage_table
from refragkit.errors import CheckpointError, ConfigError
from refragkit.models.layers.int8 import Int8Linear
from refragkit.models.quantize import checked_quantization

DEFAULT_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# Short names that may be given without their `_proj`.
_SHORT = frozenset({"q", "k", "v", "o", "gate", "up", "down", "r", "in", "out"})


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained update of rank r.

    There is no ``weight`` attribute on purpose: code that reads a projection's weight instead of calling the
    module would silently skip the adapter; here it fails.

    Args:
        base_layer: the layer to wrap; it is frozen.
        rank: r.
        alpha: numerator of the scaling.
        dropout: probability of dropping an input of A, in training mode only (torch's generator).
        rslora: scale by alpha / sqrt(r) in place of alpha / r.
        generator: a CPU generator for A; None draws from torch's own.
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        rslora: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.in_features = base_layer.in_features
        self.out_features = base_layer.out_features
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.rslora = rslora
        device = base_layer.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=torch.float32, device=device))
        if device.type != "meta":
            # Drawn on the CPU, so that a seed means the same adapter on every device.
            start = torch.empty(rank, self.in_features, dtype=torch.float32)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                self.lora_A.copy_(start)
        self.train(base_layer.training)

    @property
    def scaling(self) -> float:
        """The factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer and its update to x [..., in]; returns [..., out] in the base layer's dtype."""
        base: Tensor = self.base_layer(x)
        dropped = nn.functional.dropout(x, self.dropout, self.training) if self.dropout else x
        # The scaling goes onto the r-wide middle: out / r times fewer products than scaling the result.
        low = nn.functional.linear(dropped.to(self.lora_A.dtype), self.lora_A) * self.scaling
        return base + nn.functional.linear(low, self.lora_B).to(base.dtype)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """The update of the base weight, s B A [out, in], float32."""
        return (self.lora_B.float() @ self.lora_A.float()) * self.scaling

    @torch.no_grad()
    def replace(self, update: LowRank) -> None:
        """Take over another update of the same layer, of whatever rank; an optimiser knows of the old one only."""
        self.rank, self.alpha, self.rslora = update.rank, update.alpha, update.rslora
        for parameter, values in ((self.lora_A, update.A), (self.lora_B, update.B)):
            parameter.data = values.to(parameter.device, torch.float32, copy=True)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}, rslora={self.rslora}"


class LoRA:
    """Puts a LoRA update on chosen projections and freezes everything else.

    Args:
        rank: rank of the update, >= 1.
        alpha: the update is scaled by alpha / rank.
        dropout: on the update's input, in [0, 1).
        targets: projections by name; q, k, v, o, gate, up, down, r, in and out stand for ``q_proj`` and so
            on, other names are ends of module paths, such as ``value`` or ``decay.up``.
        blocks: block types to adapt, letters of ``TMR`` such as ``T`` or ``TR``, or ``all``.
        rslora: scale by alpha / sqrt(rank).
        quantize: the form of the frozen weights, ``int8`` or ``bf16``; None leaves them as they are stored. The
            composition root hands it to ``build_model`` or ``load_model``, so that they never exist in another.
        path: an adapter to begin with: its folder, that of the run that trained it, or one of the files there; None
            for a new one.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(
        self,
        rank: int = 32,
        alpha: float = 64,
        dropout: float = 0.0,
        targets: Sequence[str] = DEFAULT_TARGETS,
        blocks: str = "T",
        rslora: bool = False,
        quantize: str | None = None,
        path: str | None = None,
    ) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"adapter.rank: expected an integer of at least 1, got {rank!r}.")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise ConfigError(f"adapter.alpha: expected a positive finite number, got {alpha!r}.")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ConfigError(f"adapter.dropout: expected a number in [0, 1), got {dropout!r}.")
        if isinstance(targets, str) or not targets or not all(isinstance(t, str) and t for t in targets):
            raise ConfigError(
                f"adapter.targets: expected a list of projection names such as [q, k, v, o], got {targets!r}."
            )
        if len(set(targets)) != len(targets):
            raise ConfigError(f"adapter.targets: expected each name once, got {list(targets)!r}.")
        if blocks != "all" and (not isinstance(blocks, str) or not blocks or set(blocks) - set("TMR")):
            raise ConfigError(
                "adapter.blocks: expected 'all' or block types out of T, M and R such as T or TR, "
                f"got {blocks!r}."
            )
        self.rank = rank
        self.alpha = float(alpha)
        self.dropout = float(dropout)
        self.targets = tuple(targets)
        self.blocks = blocks
        self.rslora = rslora
        self.quantize = checked_quantization(quantize, "adapter.quantize")
        self.path = path

    def apply(self, model: nn.Module, *, seed: int = 0, base: str | None = None) -> AdapterReport:
        """Freezes the model and wraps the chosen projections in place; works on the meta device.

        Args:
            model: a stack with ``block_pattern``; its blocks call their projections as modules.
            seed: of the adapter's initial weights.
            base: where the model was read, so that ``path`` can be told from an adapter of another one.

        Returns:
            What was wrapped, with the parameter counts.

        Raises:
            ConfigError: when the model is adapted already, or a listed target or block type matches nothing;
                the message holds the coverage table. The model is unchanged then. Or ``path`` has another scaling.
            CheckpointError: what ``path`` names can't be read, or has other layers or another rank.
        """
        if any(True for _ in lora_layers(model)):
            raise ConfigError(
                "adapter: this model has a LoRA adapter already; merge it before adding another."
            )
        pattern = block_pattern(model)
        available = projections(model)
        kinds = set(pattern) if self.blocks == "all" else set(self.blocks)
        names = {target: f"{target}_proj" if target in _SHORT else target for target in self.targets}
        matches = {
            target: {p.path for p in available if p.kind in kinds and f".{p.path}".endswith(f".{name}")}
            for target, name in names.items()
        }
        chosen = tuple(p for p in available if any(p.path in paths for paths in matches.values()))
        unmatched = [target for target, paths in matches.items() if not paths]
        if unmatched or (self.blocks != "all" and kinds - {p.kind for p in chosen}):
            what = (
                f"targets {unmatched} match no linear layer"
                if unmatched
                else f"block types {sorted(kinds - {p.kind for p in chosen})} have none of the targets"
            )
            raise ConfigError(
                f"adapter.targets={list(self.targets)} with adapter.blocks={self.blocks}: {what} of this "
                f"model (block pattern {pattern}). Projections that would be adapted / that exist:\n"
                f"{coverage_table(chosen, available)}\n"
                "Change adapter.targets or adapter.blocks so that every name and block type matches."
            )
        model.requires_grad_(False)
        for projection in chosen:
            wrap(
                model,
                projection.path,
                rank=self.rank,
                alpha=self.alpha,
                dropout=self.dropout,
                rslora=self.rslora,
                seed=seed,
            )
        if self.path is not None:
            self._begin_with(model, self.path, base)
        return report(model, chosen, available)

    def _begin_with(self, model: nn.Module, path: str, base: str | None) -> None:
        """Gives the wrapped layers the values of a trained adapter."""
        from refragkit.adapters.location import adapter_location
        from refragkit.adapters.peft_format import check_base, put_adapter, read_adapter
        from refragkit.models.weights_hash import weights_hash

        adapter = read_adapter(adapter_location(path, "adapter.path"))
        for update in adapter.layers.values():
            if (update.alpha, update.rslora) != (self.alpha, self.rslora):
                raise ConfigError(
                    f"adapter.path: {adapter.source} was trained with alpha {update.alpha:g} and rslora "
                    f"{str(update.rslora).lower()}; set adapter.alpha={update.alpha:g} "
                    f"adapter.rslora={str(update.rslora).lower()} to go on with it."
                )
        check_base(adapter, None if base is None else weights_hash(base))
        try:
            put_adapter(model, adapter, trainable=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"adapter.path: {error} Set adapter.rank, adapter.targets and adapter.blocks to its own."
            ) from error


def apply_lora(model: nn.Module, lora: LoRA, *, seed: int = 0) -> AdapterReport:
    """The same as ``lora.apply(model, seed=seed)``."""
    return lora.apply(model, seed=seed)


def wrap(
    model: nn.Module, path: str, *, rank: int, alpha: float, dropout: float, rslora: bool, seed: int = 0
) -> LoRALinear:
    """Replaces the linear layer at ``path`` by a ``LoRALinear`` around it, and returns that."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    base = parent.get_submodule(name)
    if not isinstance(base, nn.Linear):
        raise ConfigError(f"adapter: {path} is a {type(base).__name__}, not a linear layer.")
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    layer = LoRALinear(base, rank, alpha, dropout, rslora, generator)
    setattr(parent, name, layer)
    return layer


def block_pattern(model: nn.Module) -> str:
    """The model's block pattern, one letter per block."""
    pattern = getattr(model, "block_pattern", None)
    if not isinstance(pattern, str):
        raise ConfigError(
            f"adapter: {type(model).__name__} has no block pattern, so its projections can't be told apart "
            "by block type; LoRA needs one of the stacks in conf/model (or adapter=none)."
        )
    return pattern


def projections(model: nn.Module) -> tuple[Projection, ...]:
    """Every linear layer inside a block (wrapped ones too), in the order of the stack."""
    pattern = block_pattern(model)
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, LoRALinear)):
            continue
        parts = path.split(".")
        # The first number in a path is the index in the stack's list of blocks; the head has none.
        at = next((position for position, part in enumerate(parts) if part.isdigit()), None)
        if at is None or int(parts[at]) >= len(pattern) or parts[-1] == "base_layer":
            continue
        block, inside = int(parts[at]), parts[at + 1 :]
        name = ".".join(inside[1:] or inside)
        found.append(Projection(path=path, name=name, block=block, kind=pattern[block]))
    return tuple(found)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The adapted layers with their module paths, in the order of the stack."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, LoRALinear))


def report(
    model: nn.Module, chosen: tuple[Projection, ...], available: tuple[Projection, ...]
) -> AdapterReport:
    """Counts the parameters of an adapted model."""
    parameters = list(model.parameters())
    return AdapterReport(
        layers=chosen,
        available=available,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        total_parameters=sum(p.numel() for p in parameters),
    )


@torch.no_grad()
def merge_into_base(model: nn.Module) -> int:
    """Adds every update to its base weight and takes the adapters out, in place.

    The sum is formed in float32 and stored in the base weight's dtype; an int8 layer becomes one in float32, since
    rounding the sum would lose most of a small update. Base weights stay frozen.

    Returns:
        The number of layers merged.

    Raises:
        ConfigError: when the model has no adapter.
    """
    layers = list(lora_layers(model))
    if not layers:
        raise ConfigError("merge: this model has no LoRA adapter.")
    for path, layer in layers:
        base = layer.base_layer
        if isinstance(base, Int8Linear):
            base = base.to_linear()
        base.weight.copy_((base.weight.float() + layer.delta()).to(base.weight.dtype))
        parent_path, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent_path), name, base)
    return len(layers)
