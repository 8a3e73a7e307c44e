"""The policy gradient against a plain implementation: whole sequences, one at a time, straight from the formula."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch

from refragkit import build_model, compose
from refragkit.config import instantiate
from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.methods.base import Components
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.methods.policy_gradient import PolicyGradientModule, StartModel, all_equal, group_advantages
from refragkit.methods.rollouts import Rollout, Rollouts
from refragkit.models.base import SequenceModel
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.types import Batch, Question

MODEL = ["model=hybrid", "model.block_pattern=TMR", "model.d_model=32", "model.n_heads=2", "model.n_kv_heads=1",
         "model.head_dim=16", "model.d_ff=48", "model.d_state=16", "model.ssm_head_dim=16",
         "model.wkv_head_dim=16"]  # fmt: skip
N, G = 3, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MultiHopQA:
    data = MultiHopQA(max_train_questions=N, max_validation_questions=2, vocab_size=400)
    data.prepare(cache_dir=tmp_path_factory.mktemp("cache"), seed=0)
    return data


@pytest.fixture(scope="module")
def tokenizer(data: MultiHopQA) -> Tokenizer:
    return data.build_tokenizer()


@pytest.fixture(scope="module")
def bm25(data: MultiHopQA) -> BM25Retriever:
    retriever = BM25Retriever()
    retriever.index(data.corpus)
    return retriever


Make = Callable[..., PolicyGradientModule]


@pytest.fixture
def make(data: MultiHopQA, tokenizer: Tokenizer, bm25: BM25Retriever) -> Make:
    def make(*overrides: str, planner: str = "repeat", micro_batch_size: int = 2) -> PolicyGradientModule:
        cfg = compose(["method=refrag", *MODEL, "method.objective=policy_gradient", f"method.group_size={G}",
                       "method.max_seq_len=1024", "method.max_new_tokens=5", f"method.global_batch_size={N}",
                       "method.max_document_tokens=16", f"hardware.micro_batch_size={micro_batch_size}",
                       *overrides])  # fmt: skip
        model = build_model(cfg.model, vocab_size=tokenizer.vocab_size, seed=0)
        if planner == "model":
            likes_to_search(model, tokenizer, bm25, data)
        instantiate(cfg, "adapter").apply(model, seed=0)
        retriever = MultiHopRetriever(bm25, planner, 3, 2)
        module = instantiate(cfg, "method").module(
            Components(
                model=model,
                tokenizer=tokenizer,
                retriever=retriever,
                reward=instantiate(cfg, "reward"),
                hardware=instantiate(cfg, "hardware"),
                validation=data.validation,
                n_steps=4,
                seed=0,
                from_scratch=True,
                log_metrics=lambda metrics, step: None,
            )
        )
        # Without a Trainer, Lightning's backward is the plain one.
        module.manual_backward = lambda loss: loss.backward()
        return module

    return make


@torch.no_grad()
def likes_to_search(
    model: SequenceModel, tokenizer: Tokenizer, bm25: BM25Retriever, data: MultiHopQA
) -> None:
    """Random weights, of which the head often prefers to begin a turn with a search."""
    model.lm_head.weight = torch.nn.Parameter(model.head_weight.clone())
    one_hop = EpisodeBuilder(MultiHopRetriever(bm25, "repeat", 1, 2), tokenizer, 1024, 5, 16)
    for question, hops in zip(data.train, one_hop.retrieve(data.train), strict=True):
        for found in ((), hops):
            hidden = model.hidden_states(torch.tensor([one_hop.prompt(question, found)]))[0][0, -1]
            model.lm_head.weight[tokenizer.special_ids["<|search|>"]] += hidden / hidden.norm()


def move_away(model: SequenceModel) -> None:
    """As if some steps had been taken since the start; and let it search now and then."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * parameter.abs().mean().clamp(min=0.02) * noise


def rewarded(module: PolicyGradientModule) -> list[Rollout]:
    """Let rewards be made up, and probabilities at sampling differ from those at learning, so that clips happen."""
    seen: list[Rollout] = []
    roll_out = module._roll_out

    def remember(*args: object, **kwargs: object) -> Rollouts:
        rolled = roll_out(*args, **kwargs)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        for r in rolled.all:
            shift = 0.3 * torch.randn(len(r.logprobs), generator=generator)
            r.logprobs = (torch.tensor(r.logprobs) + shift).tolist()
        seen.extend(rolled.all)
        return rolled

    module._roll_out = remember  # type: ignore[method-assign]
    rewards = [0.0, 1.0, 0.25, 0.5, 0.5, 0.5, 0.9, 0.1, 0.3]  # the second group tells nothing
    module.reward = lambda episodes: rewards[: len(episodes)]  # type: ignore[assignment]
    seen.clear()
    return seen


def written_logprobs(model: SequenceModel, rollout: Rollout) -> torch.Tensor:
    ids = torch.tensor(rollout.token_ids)
    every = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return every[torch.tensor(rollout.written[1:])]


def plain_loss(
    model: SequenceModel,
    start: SequenceModel,
    rollouts: list[Rollout],
    rewards: list[float],
    e: float,
    kl_coef: float,
) -> torch.Tensor:
    total = torch.zeros(())
    for n in range(0, len(rollouts), G):
        group = torch.tensor(rewards[n : n + G])
        spread = group.std(correction=0)
        for rollout, reward in zip(rollouts[n : n + G], group, strict=True):
            advantage = (reward - group.mean()) / spread if spread > 0 else torch.zeros(())
            now = written_logprobs(model, rollout)
            with torch.no_grad():
                before = written_logprobs(start, rollout)
            per_token = []
            for t in range(len(now)):
                ratio = torch.exp(now[t] - rollout.logprobs[t])
                gain = torch.min(ratio * advantage, torch.clip(ratio, 1 - e, 1 + e) * advantage)
                kl = torch.exp(before[t] - now[t]) - (before[t] - now[t]) - 1
                per_token.append(kl_coef * kl - gain)
            total = total + sum(per_token) / len(per_token) / G
    return total / (len(rollouts) // G)


def gradients(model: SequenceModel) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("planner", "micro_batch_size", "overrides"),
    [
        ("repeat", 1, ()),
        ("repeat", 2, ("method.kl_coef=0.5",)),
        ("repeat", 3, ("method.kl_coef=0",)),
        ("model", 1, ("method.kl_coef=0.5", "method.first_query=model")),
        ("model", 3, ("method.clip_range=0.05",)),
        ("repeat", 2, ("method.kl_coef=0.5", "adapter=lora", "adapter.blocks=TM", "adapter.targets=[q,out]")),
    ],
)
def test_the_gradient_is_that_of_the_formula(
    make: Make, data: MultiHopQA, planner: str, micro_batch_size: int, overrides: tuple[str, ...]
) -> None:
    module = make(*overrides, planner=planner, micro_batch_size=micro_batch_size)
    start = copy.deepcopy(module.model).eval()
    move_away(module.model)
    rollouts = rewarded(module)
    learnt = module.learn(Batch(0, data.train))
    found = gradients(module.model)
    module.model.zero_grad()
    recipe = module.recipe
    loss = plain_loss(
        module.model,
        start,
        rollouts,
        module.reward(rollouts),
        recipe.clip_range,
        recipe.kl_coef,  # type: ignore[arg-type]
    )
    loss.backward()
    assert (learnt.examples, learnt.kept) == (N * G, N * G)
    assert learnt.metrics["train/objective"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    expected = gradients(module.model)
    assert set(found) == set(expected)
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * float(scale), msg=name)
    assert (planner == "model") == (sum(r.searches for r in rollouts) > N)
    assert 0 < learnt.metrics["train/clip_fraction"] < 1
    assert learnt.metrics["rollouts/equal_reward_groups"] == pytest.approx(1 / 3)
    assert (learnt.metrics["train/kl"] > 0) == (recipe.kl_coef > 0)
    # What the samples of a question share is read once
    shared = sum((G - 1) * (r.prompt_tokens - 1) for r in rollouts[::G])
    whole = sum(len(r.token_ids) for r in rollouts)
    assert learnt.tokens == whole - shared


def test_right_after_sampling_the_ratio_is_one_and_the_start_is_near(make: Make, data: MultiHopQA) -> None:
    module = make(planner="model")
    learnt = module.learn(Batch(0, data.train))
    assert learnt.metrics["train/ratio_deviation"] < 1e-4
    assert learnt.metrics["train/kl"] == pytest.approx(0, abs=1e-6)
    assert learnt.metrics["train/clip_fraction"] == 0
    assert learnt.metrics["rollouts/entropy"] == pytest.approx(learnt.metrics["train/loss"], rel=1e-4)
    assert learnt.metrics["rollouts/tokens_read"] < learnt.metrics["rollouts/tokens_reread"]


def test_retrieved_tokens_are_read_and_not_learnt(make: Make, data: MultiHopQA) -> None:
    module = make(planner="model")
    special = module.tokenizer.special_ids
    rolled = module._roll_out(data.train, G, return_logprobs=True)
    assert sum(len(h.new_documents) for r in rolled.all for h in r.hops[1:]) > 0
    for rollout in rolled.all:
        reading = True  # from the start, and from each closed turn up to the header of the next one
        for token, written in zip(rollout.token_ids, rollout.written, strict=True):
            if not written:
                reading = token != special["<|assistant|>"]
            else:
                assert not reading
        assert sum(rollout.written) == len(rollout.logprobs)
        assert rollout.searches == len(rollout.hops) - 1


def test_equal_rewards_give_no_advantage_and_others_add_up_to_nothing() -> None:
    assert group_advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert all_equal([0.1 + 0.2, 0.3]) and not all_equal([0.3, 0.31])
    advantages = group_advantages([0.0, 1.0, 0.25, 0.25])
    assert sum(advantages) == pytest.approx(0)
    assert sum(a * a for a in advantages) / 4 == pytest.approx(1)


def test_without_a_signal_nothing_is_done(make: Make, data: MultiHopQA) -> None:
    module = make("method.kl_coef=0")
    module.reward = lambda episodes: [0.0] * len(episodes)  # type: ignore[assignment]
    learnt = module.learn(Batch(0, data.train))
    assert not gradients(module.model)
    assert learnt.metrics["train/objective"] == 0
    assert not module._start


def test_a_question_that_does_not_fit_is_left_out(make: Make, data: MultiHopQA) -> None:
    module = make(planner="model")
    long = Question(id="long", question="why " * 900, answers=("because",))
    learnt = module.learn(Batch(0, [long, *data.train[:2]]))
    assert (learnt.examples, learnt.kept, module.dropped_examples) == (3 * G, 2 * G, G)
    assert learnt.metrics["rollouts/too_long"] == pytest.approx(1 / 3)


def test_the_start_model_shares_what_is_not_trained(make: Make) -> None:
    adapted = make("adapter=lora", "adapter.blocks=T", "adapter.targets=[q]", "adapter.rank=2").model
    start = StartModel(adapted)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert start.own_bytes == sum(4 * p.numel() for p in trained.values()) < 2000
    for name, parameter in start.model.named_parameters():
        other = dict(adapted.named_parameters())[name]
        assert (parameter is other) == (name not in trained)
        assert not parameter.requires_grad
    assert all(p.requires_grad for p in trained.values())
    ids = torch.arange(300, 320)[None]
    before = adapted(ids).logits
    move_away(adapted)
    assert not torch.equal(adapted(ids).logits, before)
    assert torch.equal(start.model(ids).logits, before)
    with torch.no_grad():
        adapted.blocks[0].mixer.q_proj.lora_B.zero_()
    whole = make("method.kl_coef=1")
    assert whole._start[0].own_bytes == sum(4 * p.numel() for p in whole.model.parameters())
    # It is no part of what is saved
    assert not [n for n in whole.state_dict() if "start" in n]


@pytest.mark.parametrize("overrides", [(), ("adapter=lora", "adapter.blocks=TM", "adapter.targets=[q,out]")])
def test_the_start_behind_a_warm_up_comes_back_with_a_checkpoint(
    make: Make, data: MultiHopQA, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    # Behind the warm-up of one step; what a resumed run is built from is what stood before it
    monkeypatch.setattr(PolicyGradientModule, "global_step", property(lambda module: 5))
    warmed_up = ("method.warmup=gold_traces", "method.trace_steps=1", "method.kl_coef=0.5", *overrides)
    module = make(*warmed_up, planner="model")
    move_away(module.model)
    assert not module._start
    module.learn(Batch(0, data.train))
    start = {name: value.clone() for name, value in module._start[0].state_dict().items()}
    move_away(module.model)
    loops = {
        "fit_loop": pl.Trainer(logger=False, enable_checkpointing=False, barebones=True).fit_loop.state_dict()
    }
    checkpoint = {"state_dict": module.state_dict(), "loops": loops}
    module.on_save_checkpoint(checkpoint)
    file = io.BytesIO()
    torch.save(checkpoint, file)
    expected = module.learn(Batch(1, data.train)).metrics

    resumed = make(*warmed_up, planner="model")
    file.seek(0)
    read = torch.load(file, weights_only=True)
    resumed.on_load_checkpoint(read)
    resumed.load_state_dict(read["state_dict"], strict=not overrides)
    found = resumed.learn(Batch(1, data.train)).metrics
    assert expected["train/kl"] > 1e-5
    assert found["train/kl"] == expected["train/kl"]
    restored = resumed._start[0].state_dict()
    assert set(restored) == set(start)
    assert all(torch.equal(restored[name], value) for name, value in start.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("method.group_size=1",), r"method\.group_size: expected at least 2, got 1"),
        (("method.temperature=0.7",), r"method\.temperature=0\.7: policy_gradient samples"),
        (("method.clip_range=1.5",), r"method\.clip_range: expected a number in \(0, 1\), got 1\.5"),
        (("method.kl_coef=-1",), r"method\.kl_coef: expected a finite number"),
        (("adapter=lora", "adapter.dropout=0.1"), r"adapter\.dropout=0\.1: .*set adapter\.dropout=0"),
        (("method.warmup=gold_traces",), r"set retriever\.planner=model"),
    ],
)
def test_what_cannot_be_is_refused(make: Make, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(*overrides)


def test_an_order_needs_its_planner(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"method\.order=sandwich needs all documents at once"):
        make("method.order=sandwich", planner="model")
    make("method.order=sandwich")
