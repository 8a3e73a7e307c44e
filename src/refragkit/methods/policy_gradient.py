"""Policy gradient on rollouts with live retrieval (``method=refrag method.objective=policy_gradient``).

For each of N questions of a global batch, G rollouts o_1 .. o_G are sampled, searches on the way, and rewarded. With
w_it the tokens that the model wrote in rollout i (queries and answer), s_it everything in front of one of them, and A_i
the rollout's advantage in its group,

    A_i  = (reward_i - mean_j reward_j) / std_j reward_j
    r_it = p(w_it | s_it) / p_sampling(w_it | s_it)
    d_it = q - log q - 1,   q = p_start(w_it | s_it) / p(w_it | s_it)          (k3, >= 0, unbiased for the KL)
    loss = 1/N sum 1/G sum_i 1/|w_i| sum_t [ kl_coef * d_it - min(r_it A_i, clip(r_it, 1 - e, 1 + e) A_i) ]

Source: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1, equations 3 and 4; retrieved tokens masked as in
Search-R1, Jin et al. 2025 (arXiv 2503.09516); k3: Schulman 2020.

Differs from GRPO:
- What was retrieved is in s_it and never in w_it: it is read, and neither rewarded nor pushed up. |w_i| counts all that
  a rollout wrote, in all its turns.
- One update for each batch of rollouts. So r_it is 1 but for rounding (tokens are sampled step by step and learnt in
  chunks), and the clip bounds what rounding may do; ``train/ratio_deviation`` and ``train/clip_fraction`` show it.
- p_start is the model at the start of the run (behind ``method.warmup``, where there is one), and is never replaced.
- The reward is given once, for the whole rollout (outcome supervision); it is computed from texts, not by a model.
- std is that of the G rewards themselves (divided by G); a group whose rewards are all equal has advantage 0, and is
  left with the KL term.
- Sampling is at temperature 1 from the whole vocabulary, so that p_sampling is the model's own probability.

What the G rollouts of a question share is read once, with its gradient. The start model shares every weight that is not
trained: with an adapter it costs an adapter.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from refragkit.adapters.lora import lora_layers
from refragkit.data.collate import IGNORED, collate, micro_batch_indices
from refragkit.data.conversation import Rendered
from refragkit.errors import ConfigError
from refragkit.methods.base import Components, Learnt
from refragkit.methods.refrag import RefragModule
from refragkit.methods.rollouts import Rollout
from refragkit.ops.cross_entropy import linear_cross_entropy
from refragkit.types import Batch

if TYPE_CHECKING:
    from refragkit.methods.recipes import Refrag
    from refragkit.models.base import SequenceModel
    from refragkit.models.state import ModelState

log = logging.getLogger("refragkit")

# Rewards that differ by less are equal: the rest is rounding.
_EQUAL = 1e-6


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """How much better than its group each rollout did, in standard deviations; zeros where all did alike."""
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / len(rewards)
    if all_equal(rewards):
        return [0.0] * len(rewards)
    return [float((r - mean) / variance**0.5) for r in rewards]


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group has nothing to tell its rollouts apart by."""
    return max(rewards) - min(rewards) < _EQUAL


@dataclass(slots=True)
class PolicyLoss:
    """The loss of some tokens and what it is made of.

    Attributes:
        loss: the weighted sum; differentiable.
        sums: of each token's ``cross_entropy``, ``kl``, ``ratio_deviation`` (of 1, absolute) and ``clipped``.
    """

    loss: Tensor
    sums: dict[str, float]


def policy_loss(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    start_logprobs: Tensor | None,
    advantages: Tensor,
    scales: Tensor,
    clip_range: float,
    kl_coef: float,
) -> PolicyLoss:
    """The loss above for some tokens.

    Args:
        logprobs: under the model as it is, ``[tokens]``, in nats, with gradient.
        sampled_logprobs: under the model that wrote them.
        start_logprobs: under the start model; None without a KL term.
        advantages: each token's rollout's.
        scales: what each token counts, 1 / (N G |w_i|).
        clip_range: e.
        kl_coef: weight of the KL term.
    """
    ratio = (logprobs - sampled_logprobs).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    losses = -gain
    kl = torch.zeros_like(losses)
    if start_logprobs is not None:
        difference = start_logprobs - logprobs
        kl = difference.exp() - difference - 1
        losses = losses + kl_coef * kl
    with torch.no_grad():
        sums = {
            "cross_entropy": float(-logprobs.sum()),
            "kl": float(kl.sum()),
            "ratio_deviation": float((ratio - 1).abs().sum()),
            "clipped": float((clipped * advantages < ratio * advantages).sum()),
        }
    return PolicyLoss((losses * scales).sum(), sums)


class StartModel:
    """The model as it is now, kept; what is not trained is shared and not copied.

    Args:
        model: of which a copy is made.
    """

    def __init__(self, model: SequenceModel) -> None:
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        shared: dict[int, Any] = {
            id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in trained
        }
        self.model: SequenceModel = copy.deepcopy(model, shared)
        self.model.requires_grad_(False).eval()
        self._own = [name for name, p in model.named_parameters() if id(p) in trained]

    @property
    def own_bytes(self) -> int:
        """What it holds beyond the model that it was made of."""
        parameters = dict(self.model.named_parameters())
        return sum(parameters[n].numel() * parameters[n].element_size() for n in self._own)

    def state_dict(self) -> dict[str, Tensor]:
        """Its own weights."""
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].detach() for name in self._own}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state_dict`` gave."""
        parameters = dict(self.model.named_parameters())
        for name, value in state.items():
            parameters[name].copy_(value)


def rest(rollout: Rollout) -> Rendered:
    """What follows all but the last token of a rollout's prompt, of which what the model wrote counts."""
    start = rollout.prompt_tokens - 1
    return Rendered(rollout.token_ids[start:], rollout.written[start:])


def read_prompts(
    model: SequenceModel, groups: Sequence[Sequence[Rollout]], pad_id: int, device: torch.device
) -> ModelState:
    """The state after all but the last token of each group's prompt, a row for each group."""
    prompts = [g[0].token_ids[: g[0].prompt_tokens - 1] for g in groups]
    batch = collate([Rendered(p, [False] * len(p)) for p in prompts], pad_id, device)
    _, state = model.hidden_states(batch.input_ids, attention_mask=batch.attention_mask, return_state=True)
    assert state is not None
    return state


def rollout_logprobs(
    model: SequenceModel, rollouts: Sequence[Rollout], state: ModelState, pad_id: int, device: torch.device
) -> Tensor:
    """Log-probability of each written token, rollout by rollout, ``[tokens]``.

    Args:
        model: reads what follows the prompts.
        rollouts: R rollouts.
        state: R rows that have read all but the last token of each one's prompt.
        pad_id: fills short rows.
        device: where the model is.
    """
    batch = collate([rest(r) for r in rollouts], pad_id, device)
    hidden, _ = model.hidden_states(batch.input_ids, state=state, attention_mask=batch.attention_mask)
    written = batch.labels != IGNORED
    targets = batch.labels[written]
    return -linear_cross_entropy(hidden[written], model.head_weight, targets, scale=model.head_scale)


class PolicyGradientModule(RefragModule):
    """Trains on groups of rollouts."""

    def __init__(self, recipe: Refrag, components: Components) -> None:
        super().__init__(recipe, components)
        dropout = max((layer.dropout for _, layer in lora_layers(self.model)), default=0.0)
        if dropout:
            raise ConfigError(
                f"adapter.dropout={dropout}: method.objective=policy_gradient compares the probability of a token"
                " under two models, which dropout would change at random; set adapter.dropout=0"
            )
        # In a list, so that it is no part of this module: not in its checkpoints, not among its parameters
        self._start: list[StartModel] = []
        if recipe.kl_coef and not self.warms_up:
            self._keep_start()

    def _keep_start(self) -> None:
        start = StartModel(self.model)
        self._start = [start]
        log.info(
            "the start model is kept for the KL term: %.1f MiB beyond what is shared", start.own_bytes / 2**20
        )

    def learn(self, batch: Batch) -> Learnt:
        """Sample, reward, and accumulate the gradient; gold traces first, where these are asked for."""
        if self.warming_up:
            return super().learn(batch)
        if self.recipe.kl_coef and not self._start:
            self._keep_start()
        questions = self._questions(batch)
        rolled = self._roll_out(questions, self.recipe.group_size, return_logprobs=True)
        started = time.perf_counter()
        parts = self._rewards(
            questions=[r.question for r in rolled.all],
            hops=[r.hops for r in rolled.all],
            texts=[r.text for r in rolled.all],
        )
        size = self.recipe.group_size
        rewards = [parts["total"][n : n + size] for n in range(0, len(parts["total"]), size)]
        metrics = self._reward_metrics(parts, [r.text for r in rolled.all])
        metrics["time/reward_seconds"] = time.perf_counter() - started
        metrics |= self._rollout_metrics(rolled)
        metrics["rollouts/equal_reward_groups"] = sum(map(all_equal, rewards)) / len(rewards)
        metrics |= self.alarms.watch(metrics)
        started = time.perf_counter()
        usable = [n for n, group in enumerate(rolled.groups) if group[0].token_ids]
        self.dropped_examples += size * (len(rolled.groups) - len(usable))
        self.truncated_documents += sum(r.documents_cut for r in rolled.all)
        groups = [rolled.groups[n] for n in usable]
        if groups:
            metrics |= self._accumulate_groups(groups, [group_advantages(rewards[n]) for n in usable])
        metrics["time/learn_seconds"] = time.perf_counter() - started
        tokens = sum(sum(len(rest(r)) for r in g) + g[0].prompt_tokens - 1 for g in groups)
        return Learnt(metrics, len(rolled.all), sum(map(len, groups)), tokens)

    def _accumulate_groups(
        self, groups: Sequence[list[Rollout]], advantages: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """Add the gradient of all groups: prompts in micro batches, their rollouts in chunks of as many tokens."""
        self.model.train()
        totals = dict.fromkeys(
            ("objective", "tokens", "cross_entropy", "kl", "ratio_deviation", "clipped"), 0.0
        )
        # A group without advantages has the KL term only
        telling = [n for n in range(len(groups)) if self._start or any(advantages[n])]
        for part in micro_batch_indices([groups[n][0].prompt_tokens for n in telling], self.micro_batch_size):
            chosen = [telling[i] for i in part]
            self._learn_part(
                [groups[n] for n in chosen], [a for n in chosen for a in advantages[n]], len(groups), totals
            )
        if not telling:
            return {"train/objective": 0.0}
        n_tokens = totals["tokens"]
        return {
            "train/loss": totals["cross_entropy"] / n_tokens,
            "train/objective": totals["objective"],
            "train/kl": totals["kl"] / n_tokens,
            "train/ratio_deviation": totals["ratio_deviation"] / n_tokens,
            "train/clip_fraction": totals["clipped"] / n_tokens,
        }

    def _learn_part(
        self,
        groups: Sequence[list[Rollout]],
        advantages: Sequence[float],
        n_groups: int,
        totals: dict[str, float],
    ) -> None:
        """Read some prompts, learn their rollouts in chunks from the state behind, then take it back to the prompts."""
        pad_id, size = self.tokenizer.pad_id, self.recipe.group_size
        state = read_prompts(self.model, groups, pad_id, self.device)
        # The rollouts' gradients gather in leaves, so that no more than one chunk is in memory beside the prompts
        leaves = state.detach()
        for leaf, tensor in zip(leaves.tensors(), state.tensors(), strict=True):
            leaf.requires_grad_(tensor.requires_grad)
        before = None
        if self._start:
            start = self._start[0].model.to(self.device)
            with torch.no_grad():
                before = read_prompts(start, groups, pad_id, self.device)
        rollouts = [r for group in groups for r in group]
        for chunk in self._chunks(rollouts):
            members = [rollouts[i] for i in chunk]
            prompts = [i // size for i in chunk]
            logprobs = rollout_logprobs(self.model, members, leaves.select(prompts), pad_id, self.device)
            start_logprobs = None
            if before is not None:
                with torch.no_grad():
                    start_logprobs = rollout_logprobs(
                        self._start[0].model, members, before.select(prompts), pad_id, self.device
                    )

            def per_token(values: Sequence[float], members: Sequence[Rollout] = members) -> Tensor:
                repeated = [v for v, r in zip(values, members, strict=True) for _ in r.logprobs]
                return torch.tensor(repeated, device=self.device)

            found = policy_loss(
                logprobs,
                torch.tensor([p for r in members for p in r.logprobs], device=self.device),
                start_logprobs,
                per_token([advantages[i] for i in chunk]),
                per_token([1 / (n_groups * size * len(r.logprobs)) for r in members]),
                self.recipe.clip_range,
                self.recipe.kl_coef,
            )
            self.manual_backward(found.loss)
            totals["objective"] += float(found.loss.detach())
            totals["tokens"] += len(logprobs)
            for name, value in found.sums.items():
                totals[name] += value
        gathered = [
            (tensor, leaf.grad)
            for tensor, leaf in zip(state.tensors(), leaves.tensors(), strict=True)
            if leaf.grad is not None
        ]
        if gathered:
            tensors, gradients = zip(*gathered, strict=True)
            torch.autograd.backward(tensors, gradients)

    def _chunks(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Rollouts that are learnt together: as many tokens as the prompts of a micro batch have, or its size."""
        lengths = [len(rest(r)) for r in rollouts]
        room = self.micro_batch_size * max(r.prompt_tokens for r in rollouts)
        return micro_batch_indices(lengths, max(self.micro_batch_size, room // max(lengths)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the start model where it is not what the run is built from: behind a warm-up."""
        super().on_save_checkpoint(checkpoint)
        if self._start and self.warms_up:
            checkpoint["start_model"] = self._start[0].state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it."""
        super().on_load_checkpoint(checkpoint)
        if "start_model" in checkpoint:
            self._start = [StartModel(self.model)]
            self._start[0].load_state_dict(checkpoint["start_model"])
