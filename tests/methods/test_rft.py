"""rft: its gradient against sft's, its samples, what it keeps, and runs from files of rollouts."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional

from refragkit import build_model, compose, load_model
from refragkit.config import instantiate
from refragkit.data.gsm8k import GSM8K
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError, DataError
from refragkit.experiment import run_experiment
from refragkit.methods.base import Components
from refragkit.methods.rft import RftModule
from refragkit.methods.rollout_file import SampledPrompt, drop_rollouts, read_rollouts, write_rollouts
from refragkit.rewards.numeric import NumericReward
from refragkit.types import Batch, Conversation, Episode, Message, Question

MODEL = ["model=hybrid", "model.block_pattern=TM", "model.d_model=32", "model.n_heads=2", "model.n_kv_heads=1",
         "model.head_dim=16", "model.d_ff=48", "model.d_state=16", "model.ssm_head_dim=16",
         "model.wkv_head_dim=16"]  # fmt: skip
METHOD = ["method=rft", "data=gsm8k", "retriever=none", "reward=numeric", "method.max_seq_len=512",
          "method.max_new_tokens=6", "method.eval_batches=1", "method.global_batch_size=4",
          "data.vocab_size=400"]  # fmt: skip


def pseudo_reward(episodes: Sequence[Episode]) -> list[float]:
    """A value in [0, 1] that depends on the text alone: a random model earns nothing else."""
    return [int(hashlib.sha256(e.completion.encode()).hexdigest()[:4], 16) / 0xFFFF for e in episodes]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> GSM8K:
    data = GSM8K(max_train_questions=8, max_validation_questions=4, vocab_size=400)
    data.prepare(cache_dir=tmp_path_factory.mktemp("cache"), seed=0)
    return data


@pytest.fixture(scope="module")
def tokenizer(data: GSM8K) -> Tokenizer:
    return data.build_tokenizer()


Make = Callable[..., RftModule]


@pytest.fixture
def make(data: GSM8K, tokenizer: Tokenizer, tmp_path: Path) -> Make:
    def make(*overrides: str, micro_batch_size: int = 4, folder: Path = tmp_path) -> RftModule:
        cfg = compose([*MODEL, *METHOD, f"hardware.micro_batch_size={micro_batch_size}", *overrides])
        module: RftModule = instantiate(cfg, "method").module(
            Components(
                model=build_model(cfg.model, vocab_size=tokenizer.vocab_size, seed=0),
                tokenizer=tokenizer,
                retriever=None,
                reward=instantiate(cfg, "reward"),
                hardware=instantiate(cfg, "hardware"),
                validation=data.validation,
                n_steps=4,
                seed=0,
                from_scratch=True,
                log_metrics=lambda metrics, step: None,
                train=data.train,
                folder=folder,
            )
        )
        module.manual_backward = lambda loss: (
            loss.backward()
        )  # without a Trainer, Lightning's is the plain one
        module.reward = pseudo_reward  # type: ignore[assignment]
        return module

    return make


def learn(module: RftModule, data: GSM8K, n_prompts: int = 4) -> tuple[Any, list[SampledPrompt]]:
    learnt = module.learn(Batch(0, data.train[:n_prompts]))
    return learnt, read_rollouts(module.components.folder / "rollouts")  # type: ignore[operator]


# --- the gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["TM", "R"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_the_gradient_is_that_of_sft_on_the_kept_samples(
    make: Make, data: GSM8K, pattern: str, micro_batch_size: int
) -> None:
    overrides = (f"model.block_pattern={pattern}", "method.global_batch_size=12")
    module = make(*overrides, micro_batch_size=micro_batch_size)
    learnt, rollouts = learn(module, data)
    kept = [(r.prompt_ids, s.token_ids) for r in rollouts for s in r.kept]
    assert len(kept) == learnt.kept > 8
    found = {n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None}

    module.model.zero_grad()
    losses = []
    for prompt, answer in kept:  # each alone and unpadded, through full logits
        ids = torch.tensor(prompt + answer)
        logits = module.model(ids[None]).logits[0, len(prompt) - 1 : -1]
        losses.append(functional.cross_entropy(logits, ids[len(prompt) :], reduction="none"))
    expected = torch.cat(losses).mean()
    expected.backward()
    assert learnt.metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)

    # and that of the plain walk over micro batches, with which sft trains
    module.model.zero_grad()
    examples = [a.as_example() for a in module._answers(rollouts)]
    plain = module._accumulate([(example, None) for example in examples])
    assert plain["train/loss"] == pytest.approx(learnt.metrics["train/loss"], rel=1e-5)
    for name, parameter in module.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_prompt_is_read_once_for_its_kept_samples(make: Make, data: GSM8K) -> None:
    module = make()
    learnt, rollouts = learn(module, data)
    each = sum(len(r.prompt_ids) + len(s.token_ids) for r in rollouts for s in r.kept)
    once = sum(len(r.prompt_ids) - 1 + len(r.kept) + sum(len(s.token_ids) for s in r.kept) for r in rollouts)
    assert max(len(r.kept) for r in rollouts) == 4
    assert learnt.tokens == once < each / 2


def test_dropout_is_for_learning_and_not_for_sampling(make: Make, data: GSM8K) -> None:
    module = make()
    instantiate(compose(["adapter=lora", "adapter.dropout=0.5", "adapter.blocks=all"]), "adapter").apply(
        module.model, seed=0
    )
    for name, parameter in module.model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter)
    prompts = module.prompts(data.train[:3])
    module.model.train()
    torch.manual_seed(0)
    one = module.sample(prompts, 4, seed=1)
    assert module.model.training
    module.model.eval()
    assert [[s.token_ids for s in g] for g in module.sample(prompts, 4, seed=1)] == [
        [s.token_ids for s in g] for g in one
    ]
    learnt, rollouts = learn(module, data)
    # Samples of a prompt don't share a mask: each is read whole
    assert learnt.tokens == sum(len(r.prompt_ids) + len(s.token_ids) for r in rollouts for s in r.kept)


# --- sampling ---------------------------------------------------------------------------------------------


def test_samples_are_those_of_each_prompt_alone(make: Make, data: GSM8K) -> None:
    """One prefill for all, states forked, against one row at a time without any sharing."""
    module = make()
    prompts = module.prompts(data.train[:3])
    groups = module.sample(prompts, 4, seed=5)
    assert all(len({tuple(s.token_ids) for s in group}) > 1 for group in groups)
    assert all(len(s.token_ids) <= 6 for group in groups for s in group)
    from refragkit.generation.sampling import RowGenerator, choose_tokens

    for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for number, sample in enumerate(group):
            draws, ids = RowGenerator(5, row, number), list(prompt.ids)
            for token in sample.token_ids:
                with torch.no_grad():
                    logits = module.model(torch.tensor([ids])).logits[:, -1]
                uniform = torch.tensor([draws.uniform()], dtype=torch.float64)
                assert int(choose_tokens(logits, uniform)) == token
                ids.append(token)
            assert sample.finished == (sample.token_ids[-1] == module.tokenizer.end_id)


def test_the_same_seed_gives_the_same_rollouts_and_another_step_others(
    make: Make, data: GSM8K, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learn(make(folder=tmp_path / "a"), data)[1]
    assert one == learn(make(folder=tmp_path / "b"), data)[1]
    for number, (attribute, value) in enumerate((("global_step", 1), ("global_rank", 1))):
        with monkeypatch.context() as patched:
            patched.setattr(RftModule, attribute, value)
            other = learn(make(folder=tmp_path / str(number)), data)[1]
        assert [r.prompt_ids for r in other] == [r.prompt_ids for r in one]
        assert [[s.token_ids for s in r.samples] for r in other] != [
            [s.token_ids for s in r.samples] for r in one
        ]
    module = make(folder=tmp_path / "c")
    module.components.seed = 1
    assert learn(module, data)[1] != one


def test_a_prompts_samples_are_scored_in_one_call(make: Make, data: GSM8K) -> None:
    module = make()
    calls: list[list[Episode]] = []

    def reward(episodes: Sequence[Episode]) -> list[float]:
        calls.append(list(episodes))
        return pseudo_reward(episodes)

    module.reward = reward  # type: ignore[assignment]
    learn(module, data)
    assert [len(c) for c in calls] == [8] * 4
    assert [{e.id for e in c} for c in calls] == [{q.id} for q in data.train[:4]]
    assert calls[0][0].answers == data.train[0].answers


def test_what_is_kept_and_what_is_measured(make: Make, data: GSM8K) -> None:
    module = make("method.top_k=2", "method.min_reward=0.6")
    learnt, rollouts = learn(module, data)
    for rollout in rollouts:
        rewards = [s.rewards["total"] for s in rollout.samples]
        assert rewards == pytest.approx(
            pseudo_reward([Episode("", completion=s.text) for s in rollout.samples])
        )
        accepted = {s.text: s.reward for s in rollout.samples if s.reward >= 0.6}
        assert {s.reward for s in rollout.kept} == set(sorted(accepted.values())[-2:])
    samples = [s for r in rollouts for s in r.samples]
    metrics = learnt.metrics
    assert metrics["reward/total"] == pytest.approx(sum(s.reward for s in samples) / 32)
    kept = [s for s in samples if s.kept]
    assert metrics["reward/kept"] == pytest.approx(sum(s.reward for s in kept) / len(kept)) and len(kept) <= 8
    assert metrics["reward/kept"] > metrics["reward/total"]
    assert metrics["rollout/acceptance_rate"] == sum(s.reward >= 0.6 for s in samples) / 32
    assert metrics["rollout/completion_tokens"] == sum(len(s.token_ids) for s in samples) / 32
    assert metrics["rollout/prompts_without_kept"] == sum(not r.kept for r in rollouts)
    assert metrics["train/kept_tokens"] == sum(len(s.token_ids) for s in kept)
    assert metrics["rollout/tokens_per_second"] > 0 and metrics["train/learn_tokens_per_second"] > 0
    assert {
        "time/retrieve_seconds",
        "time/sample_seconds",
        "time/score_seconds",
        "time/learn_seconds",
    } <= set(metrics)


def test_a_prompt_whose_samples_all_fail_is_skipped_and_no_sample_at_all_is_no_gradient(
    make: Make, data: GSM8K
) -> None:
    module = make()
    failing = data.train[1].id
    module.reward = lambda episodes: [0.0 if e.id == failing else 1.0 for e in episodes]  # type: ignore[assignment]
    learnt, rollouts = learn(module, data)
    assert learnt.metrics["rollout/prompts_without_kept"] == 1
    assert [r.id for r in rollouts if not r.kept] == [failing]
    module.model.zero_grad()
    module.reward = lambda episodes: [0.0] * len(episodes)  # type: ignore[assignment]
    learnt = module.learn(Batch(0, data.train[:4]))
    assert learnt.kept == learnt.tokens == 0 and learnt.metrics["rollout/prompts_without_kept"] == 4
    assert all(p.grad is None for p in module.model.parameters())
    assert not any(math.isnan(v) for v in learnt.metrics.values())
    assert not {"train/loss", "reward/kept"} & set(learnt.metrics)


def test_the_reward_rises_and_more_than_with_the_control(
    make: Make, data: GSM8K, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reward_after(*overrides: str) -> list[float]:
        module = make("method.max_new_tokens=1", "method.min_reward=1", *overrides)
        module.reward = lambda episodes: [float(e.completion[:1].islower()) for e in episodes]  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(module.model.parameters(), lr=0.02)
        rewards = []
        for step in range(12):
            monkeypatch.setattr(RftModule, "global_step", step)
            optimizer.zero_grad()
            rewards.append(module.learn(Batch(step, data.train[:4])).metrics["reward/total"])
            optimizer.step()
        return rewards

    best, control = reward_after(), reward_after("method.selection=random")
    assert best[0] == control[0] < 0.75, (best, control)
    assert sum(best[-4:]) / 4 > 0.85
    assert sum(best[-4:]) > sum(control[-4:])


def test_an_update_waits_for_enough_samples(make: Make, data: GSM8K, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make("method.min_kept=5")
    module.reward = lambda episodes: [1.0, 1.0] + [0.0] * 6  # type: ignore[assignment]
    batches = [Batch(n, data.train[n : n + 1]) for n in range(4)]
    learnt = []
    for step in (0, 1):
        monkeypatch.setattr(RftModule, "global_step", step)
        learnt.append(module.learn(batches[step]))
    assert [x.kept for x in learnt] == [0, 0]
    assert [x.metrics["rollout/waiting"] for x in learnt] == [2, 4]
    assert all(p.grad is None for p in module.model.parameters())
    module._nothing_learnt(3)  # nothing to complain of
    loops = pl.Trainer(logger=False, enable_checkpointing=False, barebones=True).fit_loop.state_dict()
    saved: dict[str, Any] = {"state_dict": {}, "loops": {"fit_loop": loops}}
    module.on_save_checkpoint(saved)
    resumed = make("method.min_kept=5")
    resumed.reward = module.reward
    resumed.on_load_checkpoint(saved)
    for each in (module, resumed):
        monkeypatch.setattr(RftModule, "global_step", 2)
        last = each.learn(batches[2])
        assert last.kept == 6 and "rollout/waiting" not in last.metrics
        monkeypatch.setattr(RftModule, "global_step", 3)
        assert each.learn(batches[3]).kept == 2  # the run ends
    for one, other in zip(module.model.parameters(), resumed.model.parameters(), strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad)


def test_samples_cut_short_do_not_learn_to_end(make: Make, data: GSM8K) -> None:
    module = make("method.max_new_tokens=3", "method.min_reward=0")
    _, rollouts = learn(module, data)
    end = module.tokenizer.end_id
    examples = [a.as_example() for a in module._answers(rollouts)]
    samples = [s for r in rollouts for s in r.kept]
    for example, sample in zip(examples, samples, strict=True):
        assert example.supervised_tokens == len(sample.token_ids)
        assert (example.input_ids[-1] == end) == sample.finished
        assert example.input_ids[-len(sample.token_ids) :] == sample.token_ids
    assert not all(s.finished for s in samples)


def test_prompts_that_do_not_fit_are_counted(make: Make, data: GSM8K) -> None:
    module = make("method.max_seq_len=60")
    long = Question("long", "why " * 100, ("1",))
    short = Question("short", "1 + 1?", ("2",))
    learnt = module.learn(Batch(0, [long, short]))
    assert learnt.metrics["rollout/too_long_prompts"] == 1 and learnt.metrics["rollout/prompts"] == 1
    assert module.dropped_examples == 1 and learnt.examples == learnt.kept + 1
    assert module.learn(Batch(0, [long])).kept == 0
    module = make("method.max_seq_len=60")
    module.learn(Batch(0, [long, long]))
    with pytest.raises(
        DataError, match=r"none of the 2 prompts of the first 3 steps fits into method\.max_seq_len=60"
    ):
        module._nothing_learnt(3)


def test_a_resumed_round_learns_what_it_would_have(
    make: Make, data: GSM8K, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("method.rounds=1", "method.selection=random", "method.min_reward=0.3")
    whole, resumed = (make(*overrides, folder=tmp_path) for _ in range(2))
    monkeypatch.setattr(RftModule, "global_step", 0)
    assert whole._lessons(Batch(0, []))[1]["rollout/prompts"] == len(data.train)
    monkeypatch.setattr(RftModule, "global_step", 2)
    expected = whole._lessons(Batch(2, []))[0]
    resumed.model.requires_grad_(False).zero_grad()
    for parameter in resumed.model.parameters():  # it has learnt meanwhile, and would sample otherwise
        torch.nn.init.normal_(parameter)
    assert resumed._lessons(Batch(2, []))[0] == expected


def test_conversations_are_answered_where_their_last_assistant_turn_stands(make: Make) -> None:
    module = make("method.add_given=true", "method.min_reward=0")
    turns = (("user", "Hello"), ("assistant", "Hi"), ("user", "What is 2 + 2?"), ("assistant", "4"))
    conversation = Conversation("c", tuple(Message(role, text) for role, text in turns))  # type: ignore[arg-type]
    (prompt,) = module.prompts([conversation])
    special = module.tokenizer.special_ids
    assert prompt.ids[-1] == special["<|assistant|>"] and prompt.ids.count(special["<|assistant|>"]) == 2
    assert prompt.question == Question("c", "What is 2 + 2?", ("4",))
    assert prompt.given_ids == [*module.tokenizer.encode("4"), module.tokenizer.end_id]
    (open_end,) = module.prompts([Conversation("d", conversation.messages[:1])])
    assert open_end.question.answers == () and open_end.given_ids == [] and open_end.ids
    assert module.learn(Batch(0, [conversation])).kept == 4 + 1


def test_given_answers_are_learnt_beside_the_samples(make: Make, data: GSM8K) -> None:
    module = make("method.add_given=true")
    module.reward = lambda episodes: [0.0] * len(episodes)  # type: ignore[assignment]
    learnt, rollouts = learn(module, data)
    examples = [module.episodes.example(q, (), q.answers[0]) for q in data.train[:4]]
    fitting = [e.input_ids for e in examples if 0 < len(e) <= 512]
    assert len(fitting) > 1
    assert [a.prompt_ids + a.token_ids for a in module._answers(rollouts)] == fitting
    assert learnt.kept == len(fitting) and "train/loss" in learnt.metrics


def test_pass_at_k_of_validation(make: Make, data: GSM8K) -> None:
    module = make("method.eval_samples_per_prompt=4", "method.min_reward=0.5")
    right = data.validation[0].id
    module.reward = lambda episodes: [float(e.id == right) for e in episodes]  # type: ignore[assignment]
    metrics, records = module.evaluate()
    assert {metrics[f"val/pass@{k}"] for k in (1, 2, 4)} == {0.25}
    assert metrics["val/sampled_reward"] == 0.25 and len(records) == 4
    module.reward = lambda episodes: [float(n == 0) for n, _ in enumerate(episodes)]  # type: ignore[assignment]
    metrics, _ = module.evaluate()
    assert [metrics[f"val/pass@{k}"] for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert not [m for m in make("method.eval_samples_per_prompt=0").evaluate()[0] if "pass" in m]


# --- whole runs -------------------------------------------------------------------------------------------

Run = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    outputs = tmp_path_factory.mktemp("outputs")

    def run(name: str, *overrides: str) -> tuple[dict[str, Any], Path]:
        small = ["tracking=none", f"paths.outputs={outputs}", "data.max_train_questions=6", "method.max_steps=3",
                 "data.max_validation_questions=2", "method.num_prompts_per_step=2", "method.num_samples_per_prompt=4",
                 "method.lr=0.01", "method.schedule=constant"]  # fmt: skip
        run_experiment(compose([*MODEL, *METHOD, *small, *overrides]), outputs / name, "python run.py ...")
        return json.loads((outputs / name / "summary.json").read_text()), outputs / name

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NumericReward, "score", lambda self, episodes: pseudo_reward(episodes))
        yield run


@pytest.fixture(scope="module")
def sampled(run: Run) -> tuple[dict[str, Any], Path]:
    return run("sampled")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder / "model").state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_from_its_rollouts_ends_with_the_same_weights(
    run: Run, sampled: tuple[dict[str, Any], Path]
) -> None:
    summary, folder = sampled
    assert summary["status"] == "finished", summary["error"]
    assert summary["artifacts"]["rollouts"] == "rollouts"
    assert [r.step for r in read_rollouts(folder / "rollouts")] == [1, 1, 2, 2, 3, 3]
    again, replayed = run("replayed", f"method.rollouts={folder / 'rollouts' / 'streaming.jsonl'}")
    assert again["status"] == "finished", again["error"]
    assert same(weights(folder), weights(replayed))
    assert not (replayed / "rollouts").exists()
    assert [r["step"] for r in rows(folder)] == ["0", "1", "2", "3"]
    for name in ("train/loss", "reward/kept", "rollout/acceptance_rate", "val/pass@1", "val/loss"):
        assert [r[name] for r in rows(folder)] == [r[name] for r in rows(replayed)]


def test_nothing_kept_is_no_update(run: Run) -> None:
    summary, folder = run("none", "method.min_reward=1")
    assert summary["status"] == "finished", summary["error"]
    trained = load_model(folder / "model")
    start = build_model(compose([*MODEL, *METHOD]).model, vocab_size=trained.vocab_size, seed=0)
    assert same(start.state_dict(), trained.state_dict())
    assert "train/loss" not in summary["metrics"] and summary["metrics"]["rollout/prompts_without_kept"] == 2
    assert "nothing was kept in the first 3 steps" in (folder / "train.log").read_text()


def test_rounds_sample_for_all_prompts_and_learn_what_they_kept(run: Run) -> None:
    overrides = ("method.rounds=2", "method.max_steps=4", "method.add_given=true", "method.max_seq_len=1024")
    summary, folder = run("rounds", *overrides)
    assert summary["status"] == "finished", summary["error"]
    files = sorted(f.name for f in (folder / "rollouts").iterdir())
    assert files == ["round-001.jsonl", "round-002.jsonl"]
    first, second = (read_rollouts(folder / "rollouts" / f) for f in files)
    assert len(first) == len(second) == 6 and {r.step for r in first} == {0}
    assert [[s.text for s in r.samples] for r in first] != [[s.text for s in r.samples] for r in second]
    steps = rows(folder)[1:]
    assert [float(r["rollout/round"]) for r in steps] == [1, 1, 2, 2]
    assert [bool(r["rollout/acceptance_rate"]) for r in steps] == [True, False, True, False]
    kept = sum(len(r.kept) for r in first)
    assert float(steps[1]["rollout/passes"]) == pytest.approx(2 * 4 / (kept + 6))
    again, replayed = run("again", *overrides, f"method.rollouts={folder / 'rollouts'}")
    assert again["status"] == "finished", again["error"]
    assert same(weights(folder), weights(replayed))


def test_what_is_exported_and_evaluated_are_the_averaged_weights(
    run: Run, sampled: tuple[dict[str, Any], Path]
) -> None:
    summary, averaged = sampled
    plain, late = run("late", "method.ema_start_step=3")  # no update at all
    checkpoint = torch.load(averaged / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    raw = {k.removeprefix("model."): v for k, v in checkpoint.items() if k.startswith("model.")}
    assert same(weights(late), raw)
    assert not same(weights(late), weights(averaged))
    assert int(checkpoint["ema.average.n_averaged"]) == 3
    assert plain["metrics"]["train/loss"] == summary["metrics"]["train/loss"]
    assert plain["metrics"]["val/loss"] != summary["metrics"]["val/loss"]
    module_average = [v for k, v in checkpoint.items() if k.startswith("ema.average.module")]
    exported = load_model(averaged / "model")
    for value, parameter in zip(module_average, exported.parameters(), strict=True):
        assert torch.equal(value, parameter)


def test_it_works_with_retrieval_and_with_an_adapter(run: Run) -> None:
    overrides = ("data=multihop_qa", "retriever=bm25", "reward=refrag", "method.min_reward=0", "adapter=lora",
                 "adapter.blocks=all", "method.max_seq_len=256", "method.max_steps=1")  # fmt: skip
    summary, folder = run("retrieval", *overrides)
    assert summary["status"] == "finished", summary["error"]
    assert {"reward/answer", "reward/relevance", "val/support_recall", "val/pass@1"} <= set(
        summary["metrics"]
    )
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    (rollout, *_) = read_rollouts(folder / "rollouts")
    assert set(rollout.samples[0].rewards) == {"answer", "relevance", "efficiency", "total"}
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    averaged = sum(v.numel() for k, v in state.items() if k.startswith("ema.average.module"))
    assert averaged == summary["trainable_parameters"]


# --- files and settings -----------------------------------------------------------------------------------


def test_rollouts_are_read_back_as_they_were(make: Make, data: GSM8K, tmp_path: Path) -> None:
    _, rollouts = learn(make(), data)
    path = tmp_path / "copy.jsonl"
    write_rollouts(path, rollouts)
    assert read_rollouts(path) == rollouts
    write_rollouts(path, rollouts[:1], append=True)
    assert len(read_rollouts(path)) == len(rollouts) + 1


def test_a_resumed_run_samples_again_what_came_after_its_checkpoint(
    make: Make, data: GSM8K, tmp_path: Path
) -> None:
    _, rollouts = learn(make(), data)
    path = tmp_path / "copy.jsonl"
    for step, rollout in enumerate(rollouts):
        rollout.step = step
    write_rollouts(path, rollouts)
    with path.open("a") as file:
        file.write('{"step": 1, "cut sho')
    drop_rollouts(path, 2)
    assert [r.step for r in read_rollouts(path)] == [0, 1]
    drop_rollouts(tmp_path / "none.jsonl", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, r"file\.jsonl:1: key 'prompt_ids': expected at least one token id"),
        ({"prompt_ids": [999999]}, r"file\.jsonl:1: .*999999 is outside of the vocabulary \[0, 400\)"),
        ({"prompt_ids": "x"}, r"file\.jsonl:1: key 'prompt_ids': expected a list of token ids"),
        (
            {"samples": [{"text": "a", "token_ids": []}]},
            r"key 'samples\[0\]\.token_ids': expected at least one",
        ),
        ({"samples": [{"text": "a", "token_ids": [1]}]}, r"key 'samples\[0\]\.rewards': expected an object"),
        ({"samples": [{"text": "a", "token_ids": [1], "rewards": {"total": "1"}}]}, r"rewards\.total"),
        (
            {"samples": [{"text": "a", "token_ids": [1], "rewards": {"total": 1}, "kept": 1}]},
            r"key 'samples\[0\]\.kept': expected true or false, got 1",
        ),
    ],
)
def test_broken_files_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {"id": "a", "prompt_ids": [1], "samples": []}
    (tmp_path / "file.jsonl").write_text(json.dumps(row | change) + "\n")
    with pytest.raises(DataError, match=message):
        read_rollouts(tmp_path / "file.jsonl", 400)


def test_files_of_another_tokenizer_and_missing_ones_are_refused(
    make: Make, data: GSM8K, tmp_path: Path
) -> None:
    _, rollouts = learn(make(), data)
    rollouts[0].samples[0].text = "something else"
    write_rollouts(tmp_path / "other.jsonl", rollouts)
    module = make(f"method.rollouts={tmp_path / 'other.jsonl'}")
    with pytest.raises(DataError, match="was written with another tokenizer"):
        module.learn(Batch(0, data.train[:4]))
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere.jsonl", tmp_path / "empty"):
        with pytest.raises(DataError, match="expected"):
            instantiate(compose([*METHOD, f"method.rollouts={path}"]), "method").n_steps(10)
    write_rollouts(tmp_path / "plain.jsonl", rollouts[1:])
    module = make(f"method.rollouts={tmp_path / 'plain.jsonl'}", "method.add_given=true")
    with pytest.raises(DataError, match="holds no given answers"):
        module.learn(Batch(0, data.train[:4]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method.top_k=0",
            r"method\.top_k: expected null or 1 to .*=8, got 0; with none kept there is nothing",
        ),
        ("method.top_k=9", r"method\.top_k: expected null or 1 to"),
        ("method.num_samples_per_prompt=0", r"method\.num_samples_per_prompt: expected at least 1"),
        ("method.min_kept=0", r"method\.min_kept: expected at least 1"),
        ("method.num_prompts_per_step=0", r"method\.num_prompts_per_step: expected at least 1"),
        ("method.temperature=0", r"method\.temperature=0 makes all 8 samples of a prompt the same"),
        ("method.temperature=-1", r"method\.temperature: expected a finite number"),
        ("method.top_p=0", r"method\.top_p: expected a number in \(0, 1\]"),
        ("method.min_reward=1.5", r"method\.min_reward: expected a number from 0 to 1"),
        ("method.ema_decay=1", r"method\.ema_decay: expected a number in \[0, 1\)"),
        ("method.rounds=0", r"method\.rounds: expected null or at least 1"),
        ("method.selection=recorded", r"set method\.rollouts=FILE"),
    ],
)
def test_settings_that_can_not_work_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        instantiate(compose(["method=rft", override]), "method")


def test_defaults_and_steps() -> None:
    recipe = instantiate(compose(["method=rft"]), "method")
    assert (recipe.num_samples_per_prompt, recipe.num_prompts_per_step, recipe.kept_per_prompt) == (8, 4, 4)
    assert recipe.grad_clip == 1.0 and 0 < recipe.ema_decay < 1
    assert [recipe.n_steps(n) for n in (1, 4, 5, 400)] == [1, 1, 2, 100]
    for samples, kept in ((1, 1), (2, 1), (3, 2)):
        assert (
            instantiate(
                compose(["method=rft", f"method.num_samples_per_prompt={samples}"]), "method"
            ).kept_per_prompt
            == kept
        )
    rounds = instantiate(compose(["method=rft", "method.rounds=3", "method.epochs=2"]), "method")
    assert rounds.n_steps(400) == 3 * 200
