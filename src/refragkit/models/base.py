"""What methods, generation and evaluation ask of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from refragkit.models.config import ModelConfig
from refragkit.models.state import ModelState


@dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns.

    Attributes:
        logits: ``[B, T, vocab]``, or ``[B, logits_to_keep, vocab]``.
        state: after each row's last real token; None unless asked for.
    """

    logits: Tensor
    state: ModelState | None


class SequenceModel(nn.Module, ABC):
    """A causal language model whose padding, packing and state are exact."""

    config: ModelConfig
    gradient_checkpointing: bool

    @abstractmethod
    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, ModelState | None]:
        """Read tokens.

        Args:
            input_ids: int64 ``[B, T]``; anything at padding.
            state: what earlier calls returned; not changed.
            attention_mask: ``[B, T]``, non-zero for real tokens; padding may be on either side.
            segment_ids: ``[B, T]``, 0 for padding, one number per packed document.
            return_state: whether to return the state after each row's last real token (of its last document).

        Returns:
            Hidden states after the final norm ``[B, T, d_model]``, zeros at padding, and the state.
        """

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        *,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
        logits_to_keep: int = 0,
    ) -> ModelOutput:
        """Logits of the next token; arguments as in :meth:`hidden_states`.

        Args:
            input_ids: see there.
            state: see there.
            attention_mask: see there.
            segment_ids: see there.
            return_state: see there.
            logits_to_keep: 0 for all positions; k for the last k real positions of each row (rows with fewer
                get zeros in front), which saves the head's cost on a prompt.
        """

    @abstractmethod
    def compile_blocks(self) -> None:
        """Run the blocks through ``torch.compile`` from their first call on."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """The output head ``[vocab, d_model]``; int8 where ``head_scale`` belongs to it."""

    @property
    def head_scale(self) -> Tensor | None:
        """Scales ``[vocab]`` of an int8 head (see :mod:`refragkit.ops.int8`); None for one in floating point."""
        return None

    @abstractmethod
    def parameter_counts(self) -> dict[str, int]:
        """Parameters by kind: embedding, T, M, R (mixers), mlp, norm, head (0 if tied)."""

    @abstractmethod
    def state_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of the state of ``batch`` rows after ``tokens`` tokens, without building it."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.config.d_model

    @property
    def n_layers(self) -> int:
        """Blocks in the stack."""
        return self.config.n_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.config.vocab_size

    @property
    def block_pattern(self) -> str:
        """One letter per block: T, M or R."""
        return self.config.block_pattern

    @property
    def has_recurrent_block(self) -> bool:
        """Whether any block carries a recurrent state."""
        return any(kind in "MR" for kind in self.block_pattern)
