"""Live rollouts of three hops against reading everything again in every turn, and against one question at a time.

python experiments/benchmarks/rollouts.py --questions 8 --group 1

The weights are random, except that every turn begins with a search; what is searched for is the question, shorter
by a word in each hop, so that each hop finds new documents. That is what a trained model costs, without training one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import torch
from measure import arguments, median_seconds

from refragkit import build_model, compose
from refragkit.data.datamodule import MultiHopQA
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.methods.rollouts import Rollout, roll_out
from refragkit.models.base import SequenceModel
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.base import Trail
from refragkit.retrievers.planners.model import ModelPlanner


class SearchesOn(ModelPlanner):
    """Lets the model write, and then asks for something that finds new documents."""

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The question, shorter by a word in each hop."""
        wanted = super().plan(trails)
        return [
            " ".join(t.question.question.split()[len(t.hops) :]) if t.hops and query else query
            for t, query in zip(trails, wanted, strict=True)
        ]

    @staticmethod
    def _new(trail: Trail, query: str | None) -> str | None:
        return query


@torch.no_grad()
def always_search(model: SequenceModel, assistant: int, search: int) -> None:
    """An embedding of the header that outweighs everything else, and a head that answers it with a search."""
    model.lm_head.weight = torch.nn.Parameter(model.head_weight.clone())
    direction = torch.nn.functional.normalize(model.embed_tokens.weight[assistant], dim=0)
    model.embed_tokens.weight[assistant] = 1000 * direction
    model.lm_head.weight[search] = 10 * direction


def turns(rollout: Rollout) -> list[tuple[int, int]]:
    """Where each turn of the model begins, and its length."""
    found, at = [], 0
    for written, tokens in groupby(rollout.written):
        length = len(list(tokens))
        if written:
            found.append((at, length))
        at += length
    return found


def main() -> None:
    args = arguments(__doc__, questions=8, group=1, width=256, pattern="TMTM", new=12)
    data = MultiHopQA(max_train_questions=args.questions, vocab_size=1024, cache_dir="outputs/cache")
    data.prepare()
    tokenizer = data.build_tokenizer("outputs/cache")
    cfg = compose(["model=hybrid", f"model.block_pattern={args.pattern}", f"model.d_model={args.width}",
                   f"model.d_ff={3 * args.width}", "model.n_heads=4", "model.n_kv_heads=2",
                   f"model.head_dim={args.width // 4}"])  # fmt: skip
    model = build_model(cfg.model, vocab_size=tokenizer.vocab_size, seed=0).eval()
    always_search(model, tokenizer.special_ids["<|assistant|>"], tokenizer.special_ids["<|search|>"])
    bm25 = BM25Retriever()
    bm25.index(data.corpus or [])
    episodes = EpisodeBuilder(MultiHopRetriever(bm25, SearchesOn(), 3, 3), tokenizer, 4096, args.new, 64)
    temperature = 1.0 if args.group > 1 else 0.0

    def batched() -> object:
        return roll_out(
            model, tokenizer, episodes, data.train, group_size=args.group, temperature=temperature
        )

    def one_by_one() -> None:
        for question in data.train:
            for sample in range(args.group):
                roll_out(model, tokenizer, episodes, [question], temperature=temperature, seed=sample)

    result = roll_out(model, tokenizer, episodes, data.train, group_size=args.group, temperature=temperature)
    everything = result.all
    n_turns = max(len(turns(r)) for r in everything)

    def read_again() -> None:
        """The same turns in as many batches, each from the whole conversation."""
        for n in range(n_turns):
            prompts = [r.token_ids[: turns(r)[n][0]] for r in everything if len(turns(r)) > n]
            config = GenerationConfig(args.new, temperature, stop_ids=(tokenizer.end_id,))
            generate(model, prompts, config, pad_id=tokenizer.pad_id, max_batch_tokens=16384)

    seconds = median_seconds(
        {"state kept": batched, "read again": read_again, "one by one": one_by_one}, args.repeats
    )
    started = time.perf_counter()
    measured = roll_out(
        model, tokenizer, episodes, data.train, group_size=args.group, temperature=temperature
    )
    whole = time.perf_counter() - started
    outside = 1 - (measured.generate_seconds + measured.retrieve_seconds) / whole
    hops = sum(len(r.hops) for r in everything) / len(everything)
    documents = sum(len(h.new_documents) for r in everything for h in r.hops) / len(everything)
    print(
        f"torch {torch.__version__}, {args.threads} threads; {len(everything)} rollouts, {hops:.2f} hops and"
    )
    print(
        f"{documents:.1f} documents each, {sum(map(len, map(turns, everything))) / len(everything):.2f} turns"
    )
    for name, value in seconds.items():
        print(f"{name}: {value:.2f} s")
    share = result.tokens_read / result.tokens_reread
    print(f"tokens read: {result.tokens_read} against {result.tokens_reread}, {share:.2f}")
    print(f"time of a step outside model and retriever: {outside:.1%}")
    print(f"one by one takes {seconds['one by one'] / seconds['state kept']:.1f} times as long")
    print(f"ratio: {seconds['state kept'] / seconds['read again']:.2f}")


if __name__ == "__main__":
    main()
