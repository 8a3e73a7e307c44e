"""What goes into and comes out of a teacher's mixers: what new ones are fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from refragkit.models.base import SequenceModel
from refragkit.models.convert.blocks import mixer_of
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.mamba2 import Mamba2
from refragkit.models.layers.rwkv7 import RWKV7TimeMix
from refragkit.models.layout import TokenLayout

Activations = dict[int, tuple[Tensor, Tensor]]


@torch.no_grad()
def mixer_activations(model: SequenceModel, layers: Sequence[int], input_ids: Tensor) -> Activations:
    """Inputs (after the norm) and outputs (before the residual) of the mixers of some blocks.

    Args:
        model: the teacher.
        layers: its blocks.
        input_ids: int64 ``[B, T]``, no padding.

    Returns:
        By block, two tensors ``[B, T, d_model]`` in the model's precision.
    """
    return activations_and_ends(model, layers, 0, input_ids)[0]


@torch.no_grad()
def activations_and_ends(
    model: SequenceModel, layers: Sequence[int], first: int, input_ids: Tensor
) -> tuple[Activations, Tensor, Tensor]:
    """:func:`mixer_activations`, what enters block ``first``, and the hidden states after the last norm.

    The latter two are ``[B, T, d_model]``.
    """
    assert isinstance(model, HybridLM)
    found: Activations = {}
    start: list[Tensor] = []

    def keep(index: int) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            found[index] = (inputs[0].detach(), output[0].detach())

        return mixer_of(model, index).register_forward_hook(hook)

    handles = [keep(index) for index in layers]
    handles.append(model.blocks[first].register_forward_pre_hook(lambda _, inputs: start.append(inputs[0])))
    try:
        final, _ = model.hidden_states(input_ids)
    finally:
        for handle in handles:
            handle.remove()
    return found, start[0], final


def teacher_activations(
    model: SequenceModel,
    layers: Sequence[int],
    batches: Iterable[Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Activations]:
    """:func:`mixer_activations` of each batch, rounded for keeping: 4 bytes per channel, token and block in bfloat16.

    Args:
        model: the teacher.
        layers: its blocks.
        batches: int64 ``[B, T]`` each.
        dtype: of the result.
    """
    for input_ids in batches:
        found = mixer_activations(model, layers, input_ids)
        yield {i: (x.to(dtype), y.to(dtype)) for i, (x, y) in found.items()}


def run_mixer(mixer: nn.Module, x: Tensor) -> Tensor:
    """The output of a recurrent mixer for inputs without padding, from an empty state: ``[B, T, d_model]``."""
    layout = TokenLayout.of(
        (x.shape[0], x.shape[1]), x.device, attention_mask=None, segment_ids=None, past_lengths=None
    )
    y: Tensor
    if isinstance(mixer, RWKV7TimeMix):
        y, _, _ = mixer(x, layout, None, None, False)
    elif isinstance(mixer, Mamba2):
        y, _ = mixer(x, layout, None, False)
    else:
        raise TypeError(f"expected a Mamba-2 or RWKV-7 mixer, got {type(mixer).__name__}")
    return y
