"""Training steps of a model in bfloat16 against the same model in float32.

    python experiments/benchmarks/bfloat16.py --size 130m --tokens 512

Worth it on a CPU with AVX512-BF16 or AMX; without them bfloat16 is slower.
"""

from __future__ import annotations

import torch
from measure import arguments, median_seconds

from refragkit.models.build import hybrid
from refragkit.ops.cross_entropy import linear_cross_entropy


def main() -> None:
    args = arguments(__doc__, size="130m", tokens=512, vocab=8192)
    models = {
        name: hybrid(size=args.size, vocab_size=args.vocab).to(getattr(torch, name)).train()
        for name in ("float32", "bfloat16")
    }
    ids = torch.randint(0, args.vocab, (1, args.tokens))

    def step(name: str) -> None:
        model = models[name]
        hidden, _ = model.hidden_states(ids)
        loss = linear_cross_entropy(hidden[0, :-1], model.head_weight, ids[0, 1:]).mean()
        model.zero_grad()
        loss.backward()

    seconds = median_seconds({name: lambda name=name: step(name) for name in models}, args.repeats)
    print(f"torch {torch.__version__}, {args.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    for name, value in seconds.items():
        print(f"{name}: {args.tokens / value:.0f} tokens/s")
    print(f"ratio: {seconds['float32'] / seconds['bfloat16']:.2f}")


if __name__ == "__main__":
    main()
