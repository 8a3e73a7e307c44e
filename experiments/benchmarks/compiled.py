"""A model under torch.compile against itself in eager mode: training steps and decoding.

    python experiments/benchmarks/compiled.py --size small --tokens 512

Compiling takes minutes and isn't counted.
"""

from __future__ import annotations

import copy

import torch
from measure import arguments, median_seconds

from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.build import hybrid
from refragkit.ops.cross_entropy import linear_cross_entropy


def main() -> None:
    args = arguments(__doc__, size="tiny", tokens=512, vocab=4096)
    eager = hybrid(size=args.size, vocab_size=args.vocab).train()
    models = {"eager": eager, "compiled": copy.deepcopy(eager)}
    models["compiled"].compile_blocks()
    ids = torch.randint(0, args.vocab, (4, args.tokens))

    def step(name: str) -> None:
        model = models[name]
        hidden, _ = model.hidden_states(ids)
        loss = linear_cross_entropy(
            hidden[:, :-1].flatten(0, 1), model.head_weight, ids[:, 1:].flatten()
        ).mean()
        model.zero_grad()
        loss.backward()

    def decode(name: str) -> None:
        generate(models[name], ids[:, :32].tolist(), GenerationConfig(max_new_tokens=64), pad_id=0)

    print(
        f"torch {torch.__version__}, {args.threads} threads, {eager.block_pattern}, d_model {eager.d_model}"
    )
    for what, run, tokens in (("training", step, ids.numel()), ("decoding", decode, 4 * 64)):
        seconds = median_seconds({name: lambda n=name, r=run: r(n) for name in models}, args.repeats)
        for name, value in seconds.items():
            print(f"{what}, {name}: {tokens / value:.0f} tokens/s")
        print(f"ratio ({what}): {seconds['eager'] / seconds['compiled']:.2f}")


if __name__ == "__main__":
    main()
