"""Questions about documents that were read before: from kept states, in memory and on disk, against reading again.

python experiments/benchmarks/state_cache.py --sets 4 --questions 4

Real passages of the bundled sample in front, as with rag.order=documents_first, and real questions behind them; the
weights are random. The hash of the weights, once in a process, is timed apart.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from measure import arguments, median_seconds

from refragkit import build_model, compose
from refragkit.data.conversation import conversation_from_hops, prepare_prompt
from refragkit.data.datamodule import MultiHopQA
from refragkit.generation.state_cache import StateCache, weights_key
from refragkit.generation.state_files import StateFiles
from refragkit.methods.answers import PREFILL_TOKENS, generate_answers
from refragkit.types import Hit, Hop

ROOM = 4 << 30


def main() -> None:
    args = arguments(__doc__, sets=4, questions=4, documents=9, width=256, pattern="TMTM", new=12)
    data = MultiHopQA(max_train_questions=args.questions, vocab_size=1024, cache_dir="outputs/cache")
    data.prepare()
    tokenizer = data.build_tokenizer("outputs/cache")
    cfg = compose(["model=hybrid", f"model.block_pattern={args.pattern}", f"model.d_model={args.width}",
                   f"model.d_ff={3 * args.width}", "model.n_heads=4", "model.n_kv_heads=2",
                   f"model.head_dim={args.width // 4}"])  # fmt: skip
    model = build_model(cfg.model, vocab_size=tokenizer.vocab_size, seed=0).eval()
    corpus = list(data.corpus or [])
    prompts = []
    for n in range(args.sets):
        hits = tuple(Hit(document, 1.0) for document in corpus[n * args.documents : (n + 1) * args.documents])
        for question in data.train:
            asked = conversation_from_hops(
                question.question, [Hop(1, "", hits, hits)], order="documents_first"
            )
            prompts.append(prepare_prompt(asked, tokenizer, 6144, args.new))
    ids = [prompt.input_ids for prompt in prompts]

    def answer(cache: StateCache | None) -> list[list[int]]:
        state = None
        if cache is not None:
            state = cache.starter(model, tokenizer, prompts, PREFILL_TOKENS)(range(len(prompts)))
        return [a.token_ids for a in generate_answers(model, tokenizer, ids, args.new, state=state)]

    warm = StateCache(ROOM, tokenizer.fingerprint)
    started = time.perf_counter()
    weights_key(model)
    hashing = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as name:
        files = StateFiles(Path(name), ROOM).open()
        known = StateCache(ROOM, tokenizer.fingerprint, files)
        wanted = answer(None)
        if not wanted == answer(warm) == answer(known):
            raise SystemExit("the answers differ")

        def cold(stored: StateFiles | None) -> StateCache:
            cache = StateCache(ROOM, tokenizer.fingerprint, stored)
            cache._weights = warm._weights  # hashed already
            return cache

        seconds = median_seconds(
            {
                "read again": lambda: answer(None),
                "read once, kept for the first time": lambda: answer(cold(None)),
                "kept in memory": lambda: answer(warm),
                "kept on disk": lambda: answer(cold(files)),
            },
            args.repeats,
        )
    first = StateCache(ROOM, tokenizer.fingerprint)
    answer(first)
    read_first = first.counts.prompt_tokens - first.counts.tokens_not_read
    not_read = first.counts.tokens_not_read
    answer(first)
    read_second = first.counts.prompt_tokens - first.counts.tokens_not_read - read_first
    tokens = sum(map(len, ids))
    print(
        f"torch {torch.__version__}, {args.threads} threads; {len(ids)} prompts of {tokens / len(ids):.0f} tokens,"
    )
    print(f"{args.questions} about each of {args.sets} sets of {args.documents} documents")
    for name, value in seconds.items():
        print(f"{name}: {value:.2f} s, {value / seconds['read again']:.2f}")
    print(
        f"prompt tokens read: {tokens} again, {read_first} the first time ({not_read} not), {read_second} then"
    )
    print(f"kept: {first.nbytes / 2**20:.1f} MiB; hash of the weights: {hashing:.2f} s")
    print(f"ratio: {seconds['kept in memory'] / seconds['read again']:.2f}")


if __name__ == "__main__":
    main()
