"""One stack for every family: attention, Mamba-2 and RWKV-7 blocks in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from refragkit.models.base import ModelOutput, SequenceModel
from refragkit.models.config import ModelConfig
from refragkit.models.layers.attention import Attention
from refragkit.models.layers.int8 import Int8Embedding, Int8Linear
from refragkit.models.layers.linear import Linear
from refragkit.models.layers.mamba2 import Mamba2
from refragkit.models.layers.mlp import ChannelMix, SwiGLU
from refragkit.models.layers.norm import LayerNorm, RMSNorm, make_norm
from refragkit.models.layers.rope import rotary_tables
from refragkit.models.layers.rwkv7 import RWKV7TimeMix
from refragkit.models.layout import TokenLayout
from refragkit.models.state import BlockState, KVCache, Mamba2State, ModelState, RWKV7State
from refragkit.ops.graph_break import exclude_from_graphs

_EMBEDDING_STD = 0.02


class Block(nn.Module):
    """``x += mixer(norm(x))``, then ``x += mlp(norm(x))`` where the architecture has one.

    Args:
        config: the model's.
        index: place in the stack.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.kind = config.block_pattern[index]
        self.mixer_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.mixer: Attention | Mamba2 | RWKV7TimeMix
        if self.kind == "T":
            self.mixer = Attention(config)
        elif self.kind == "M":
            self.mixer = Mamba2(config)
        else:
            self.mixer = RWKV7TimeMix(config, index, first="R" not in config.block_pattern[:index])
        self.mlp_norm: RMSNorm | LayerNorm | None = None
        self.mlp: SwiGLU | ChannelMix | None = None
        if config.mlp != "none":
            self.mlp_norm = make_norm(config.norm, config.d_model, config.norm_eps)
            self.mlp = SwiGLU(config) if config.mlp == "swiglu" else ChannelMix(config, index)

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout,
        rotary: tuple[Tensor, Tensor] | None,
        v_first: Tensor | None,
        state: BlockState | None,
        return_state: bool,
        recompute_mixer: bool = False,
    ) -> tuple[Tensor, Tensor | None, BlockState | None]:
        """Run the block.

        Args:
            x: residual stream ``[B, T, d_model]``, real tokens first.
            layout: where they are.
            rotary: tables for T blocks.
            v_first: values of the first R block.
            state: this block's, of earlier calls.
            return_state: whether to build the new one.
            recompute_mixer: run the mixer again in the backward pass instead of keeping its activations.

        Returns:
            The residual stream, ``v_first`` for the blocks above, and the new state.
        """
        arguments = (x, layout, rotary, v_first, state, return_state)
        if recompute_mixer:
            y, v_first, new_state = checkpoint(self._mix, *arguments, use_reentrant=False)
        else:
            y, v_first, new_state = self._mix(*arguments)
        x = x + y
        if self.mlp is None or self.mlp_norm is None:
            return x, v_first, new_state
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, SwiGLU):
            return x + self.mlp(normed), v_first, new_state
        shift = state.ffn_shift_state if isinstance(state, RWKV7State) else None
        y, shift = self.mlp(normed, layout, shift, return_state)
        if isinstance(new_state, RWKV7State):
            new_state = RWKV7State(new_state.shift_state, new_state.wkv_state, shift)
        return x + y, v_first, new_state

    def _mix(
        self,
        x: Tensor,
        layout: TokenLayout,
        rotary: tuple[Tensor, Tensor] | None,
        v_first: Tensor | None,
        state: BlockState | None,
        return_state: bool,
    ) -> tuple[Tensor, Tensor | None, BlockState | None]:
        """What the mixer adds to the residual stream, and the rest as in :meth:`forward`."""
        normed = self.mixer_norm(x)
        new_state: BlockState | None
        if isinstance(self.mixer, Attention):
            y, new_state = self.mixer(
                normed, layout, cast(tuple[Tensor, Tensor], rotary), cast(KVCache | None, state), return_state
            )
        elif isinstance(self.mixer, Mamba2):
            y, new_state = self.mixer(normed, layout, cast(Mamba2State | None, state), return_state)
        else:
            y, v_first, new_state = self.mixer(
                normed, layout, v_first, cast(RWKV7State | None, state), return_state
            )
        return y, v_first, new_state


class HybridLM(SequenceModel):
    """Embedding, blocks, final norm, head.

    Parameters are allocated on the current default device and not initialised: use
    :func:`refragkit.models.build.build_from_config`, or load a checkpoint.
    """

    def __init__(self, config: ModelConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = LayerNorm(config.d_model, config.norm_eps) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head be the embedding where the configuration says so (again, after a device move)."""
        if not self.config.tie_embeddings:
            return
        if isinstance(self.embed_tokens, Int8Embedding):
            rows, width = self.embed_tokens.weight.shape
            head = Int8Linear(width, rows, False, torch.device("meta"))
            head.scale = self.embed_tokens.scale
            self.lm_head = head.train(self.training)
        self.lm_head.weight = self.embed_tokens.weight

    def parts(self) -> Iterator[str]:
        """Paths of the modules that weights are drawn for, each on its own; a tied head is not one."""
        yield "embed_tokens"
        if not self.config.tie_embeddings:
            yield "lm_head"
        for name in ("embedding_norm", "norm"):
            if getattr(self, name) is not None:
                yield name
        for index, block in enumerate(self.blocks):
            for name in ("mixer_norm", "mixer", "mlp_norm", "mlp"):
                if getattr(block, name) is not None:
                    yield f"blocks.{index}.{name}"

    def init_weights(self, seed: int) -> None:
        """Draw all weights. Each module's depend on the seed and its own name only."""
        for path in self.parts():
            self.init_part(path, seed)

    @torch.no_grad()
    def init_part(self, path: str, seed: int) -> None:
        """Draw the weights of one of :meth:`parts`."""
        module = self.get_submodule(path)
        digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=next(module.parameters()).device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        if path in ("embed_tokens", "lm_head"):
            nn.init.normal_(module.get_parameter("weight"), 0.0, _EMBEDDING_STD, generator=generator)
        else:
            cast(RMSNorm, module).init_weights(generator)

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, ModelState | None]:
        """See :meth:`SequenceModel.hidden_states`."""
        hidden, layout, new_state = self._run(input_ids, state, attention_mask, segment_ids, return_state)
        return layout.restore(hidden), new_state

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
        """See :meth:`SequenceModel.forward`."""
        hidden, layout, new_state = self._run(input_ids, state, attention_mask, segment_ids, return_state)
        hidden = layout.last(hidden, logits_to_keep) if logits_to_keep else layout.restore(hidden)
        return ModelOutput(self.lm_head(hidden), new_state)

    def _run(
        self,
        input_ids: Tensor,
        state: ModelState | None,
        attention_mask: Tensor | None,
        segment_ids: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, TokenLayout, ModelState | None]:
        """Hidden states with real tokens first ``[B, T', d_model]``, the layout that puts them back, the state."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [batch, tokens], got shape {tuple(input_ids.shape)}")
        if state is not None and len(state) != self.n_layers:
            raise ValueError(
                f"the state has {len(state)} blocks, the model {self.n_layers}: another model's state?"
            )
        layout = TokenLayout.of(
            (input_ids.shape[0], input_ids.shape[1]),
            input_ids.device,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            past_lengths=None if state is None else state.lengths,
        )
        x = self.embed_tokens(layout.compact(input_ids))
        if not input_ids.shape[1]:  # nothing to read
            if return_state and state is None:
                state = self.empty_state(input_ids.shape[0])
            return x, layout, state if return_state else None
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x, states = self._blocks(x, layout, 0, state, return_state)
        new_state = ModelState(tuple(states), layout.total_lengths) if return_state else None
        return self.norm(x), layout, new_state

    def hidden_states_from(self, x: Tensor, block: int) -> Tensor:
        """Hidden states after the final norm, from the residual stream that enters a block.

        Args:
            x: ``[B, T, d_model]``, whole texts without padding.
            block: the first to run. No R block may lie below: those above read values of the first one.

        Returns:
            ``[B, T, d_model]``.
        """
        layout = TokenLayout.of(
            (x.shape[0], x.shape[1]), x.device, attention_mask=None, segment_ids=None, past_lengths=None
        )
        hidden: Tensor = self.norm(self._blocks(x, layout, block, None, False)[0])
        return hidden

    def _blocks(
        self, x: Tensor, layout: TokenLayout, first: int, state: ModelState | None, return_state: bool
    ) -> tuple[Tensor, list[BlockState]]:
        """The residual stream behind the last block, and the new states of the blocks from ``first`` on."""
        rotary = None
        if "T" in self.block_pattern:
            config = self.config
            rotary = rotary_tables(
                layout.positions, config.head_dim, config.rope_theta, config.rope_scaling, x.dtype
            )
        v_first: Tensor | None = None
        states: list[BlockState] = []
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks[first:], first):
            arguments = (x, layout, rotary, v_first, None if state is None else state[index], return_state)
            # Where nothing is trained yet, autograd keeps nothing
            if recompute and (x.requires_grad or any(p.requires_grad for p in block.parameters())):
                mlp = cast(Block, block).mlp
                if isinstance(mlp, SwiGLU) and mlp.is_frozen_int8:  # it keeps little itself
                    x, v_first, block_state = block(*arguments, recompute_mixer=True)
                else:
                    x, v_first, block_state = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, v_first, block_state = block(*arguments)
            if block_state is not None:
                states.append(block_state)
        return x, states

    def compile_blocks(self) -> None:
        """Run each block through ``torch.compile`` from its first call on; names of parameters stay as they are.

        Blocks of one kind share their compiled code. Lengths and batch sizes are symbolic, but 1 is a case of its own
        (decoding).
        """
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor
        from torch.fx.experimental import _config as shapes

        exclude_from_graphs()
        # Kinds x (one row, many) x (one token, many) x padding x state x gradients; dynamo's own limit is 8
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 1024)
        # One break in a block means two graphs, not one for each function on the way to it
        if hasattr(dynamo, "nested_graph_breaks"):  # not in every torch
            dynamo.nested_graph_breaks = True
        # Sizes that happen to be equal (as many rows as heads) stay symbols of their own
        shapes.use_duck_shape = False
        # Dropout draws the numbers that it draws uncompiled
        inductor.fallback_random = True
        for block in self.blocks:
            block.compile(dynamic=True)

    @property
    def head_weight(self) -> Tensor:
        """See :attr:`SequenceModel.head_weight`."""
        return self.lm_head.weight

    @property
    def head_scale(self) -> Tensor | None:
        """See :attr:`SequenceModel.head_scale`."""
        return self.lm_head.scale if isinstance(self.lm_head, Int8Linear) else None

    @property
    def _stream_dtype(self) -> torch.dtype:
        """The type of the residual stream as it leaves the embedding."""
        weight = self.embed_tokens.weight
        return weight.dtype if weight.is_floating_point() else torch.float32

    def empty_state(self, batch: int) -> ModelState:
        """The state before the first token."""
        config, weight = self.config, self.embed_tokens.weight
        precise = torch.promote_types(self._stream_dtype, torch.float32)
        lengths = torch.zeros(batch, dtype=torch.int64, device=weight.device)

        def zeros(*shape: int, dtype: torch.dtype = precise) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=weight.device)

        blocks: list[BlockState] = []
        for kind in self.block_pattern:
            if kind == "T":
                cache = zeros(config.n_kv_heads, 0, config.head_dim, dtype=self._stream_dtype)
                blocks.append(KVCache(cache, cache, lengths))
            elif kind == "M":
                channels = config.d_inner + 2 * config.n_groups * config.d_state
                blocks.append(
                    Mamba2State(
                        zeros(config.d_conv - 1, channels),
                        zeros(config.ssm_heads, config.ssm_head_dim, config.d_state),
                    )
                )
            else:
                N = config.wkv_head_dim
                ffn = zeros(config.d_model) if config.mlp == "channel_mix" else None
                blocks.append(RWKV7State(zeros(config.d_model), zeros(config.wkv_heads, N, N), ffn))
        return ModelState(tuple(blocks), lengths)

    def state_bytes(self, batch: int, tokens: int) -> int:
        """See :meth:`SequenceModel.state_bytes`."""
        config, item = self.config, self._stream_dtype.itemsize
        precise = max(4, item)
        channels = config.d_inner + 2 * config.n_groups * config.d_state
        shifts = 2 if config.mlp == "channel_mix" else 1
        per_block = {
            "T": 2 * tokens * config.n_kv_heads * config.head_dim * item + 8,  # and the length
            "M": ((config.d_conv - 1) * channels + config.d_inner * config.d_state) * precise,
            "R": (shifts * config.d_model + config.d_model * config.wkv_head_dim) * precise,
        }
        return batch * sum(per_block[kind] for kind in self.block_pattern)

    def parameter_counts(self) -> dict[str, int]:
        """See :meth:`SequenceModel.parameter_counts`."""
        counts = dict.fromkeys(("embedding", "T", "M", "R", "mlp", "norm", "head"), 0)

        def count(module: nn.Module | None) -> int:
            return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())

        counts["embedding"] = count(self.embed_tokens)
        counts["norm"] = count(self.norm) + count(self.embedding_norm)
        counts["head"] = 0 if self.config.tie_embeddings else count(self.lm_head)
        for block in cast(list[Block], self.blocks):
            counts[block.kind] += count(block.mixer)
            counts["mlp"] += count(block.mlp)
            counts["norm"] += count(block.mixer_norm) + count(block.mlp_norm)
        return counts
