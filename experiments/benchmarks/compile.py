"""A model under torch.compile against itself in eager mode: training steps and decoding.

    python experiments/benchmarks/compile.py --size 130m --pattern MTMM

Compiling takes minutes; it is printed, and not counted in the ratios.
"""

from __future__ import annotations

import copy
import time

import torch
from measure import arguments, median_seconds

from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.build import hybrid
from refragkit.ops.cross_entropy import linear_cross_entropy

PROMPT_TOKENS, NEW_TOKENS = 32, 64


def main() -> None:
    args = arguments(__doc__, size="130m", pattern="", tokens=512, vocab=8192, samples=8)
    eager = hybrid(size=args.size, block_pattern=args.pattern or None, vocab_size=args.vocab).train()
    models = {"eager": eager, "compiled": copy.deepcopy(eager)}
    models["compiled"].compile_blocks()
    ids = torch.randint(0, args.vocab, (1, args.tokens))
    prompts = torch.randint(0, args.vocab, (args.samples, PROMPT_TOKENS)).tolist()
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0)

    def step(name: str) -> None:
        model = models[name]
        hidden, _ = model.hidden_states(ids)
        loss = linear_cross_entropy(hidden[0, :-1], model.head_weight, ids[0, 1:]).mean()
        model.zero_grad()
        loss.backward()

    def decode(name: str) -> None:
        generate(models[name], prompts, greedy, pad_id=0)

    print(
        f"torch {torch.__version__}, {args.threads} threads, {eager.block_pattern}, d_model {eager.d_model}"
    )
    tokens = {"training": args.tokens, "decoding": args.samples * NEW_TOKENS}
    for what, run in (("training", step), ("decoding", decode)):
        start = time.perf_counter()
        run("compiled")
        print(f"{what}, compiling: {time.perf_counter() - start:.0f} s")
        seconds = median_seconds({name: lambda n=name, r=run: r(n) for name in models}, args.repeats)
        for name, value in seconds.items():
            print(f"{what}, {name}: {tokens[what] / value:.0f} tokens/s")
        print(f"ratio ({what}): {seconds['eager'] / seconds['compiled']:.2f}", flush=True)


if __name__ == "__main__":
    main()
