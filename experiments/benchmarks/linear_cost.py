"""Whether time and memory per token stay the same at eight times the length, forward and backward.

    python experiments/benchmarks/linear_cost.py --pattern MM

The peer is the model itself at the shorter length.
"""

from __future__ import annotations

import torch
from measure import arguments, median_seconds, peak_extra_bytes

from refragkit.models.build import build_from_config
from refragkit.models.config import ModelConfig


def main() -> None:
    args = arguments(__doc__, pattern="MM", short=1024, long=8192, d_model=384)
    config = ModelConfig(block_pattern=args.pattern, d_model=args.d_model, vocab_size=64, mlp="none")
    model = build_from_config(config).train()

    def step(tokens: int) -> None:
        hidden, _ = model.hidden_states(torch.zeros(1, tokens, dtype=torch.int64))
        model.zero_grad()
        hidden.square().mean().backward()

    lengths = (args.short, args.long)
    seconds = median_seconds({str(n): lambda n=n: step(n) for n in lengths}, args.repeats)
    per_token = {n: seconds[str(n)] / n for n in lengths}
    memory = {n: peak_extra_bytes(lambda n=n: step(n)) / n for n in lengths}
    print(f"torch {torch.__version__}, {args.threads} threads, blocks {args.pattern}")
    for n in lengths:
        print(f"{n} tokens: {per_token[n] * 1e6:.1f} us and {memory[n] / 1024:.1f} KiB a token")
    print(f"memory ratio: {memory[args.long] / memory[args.short]:.2f}")
    print(f"ratio: {per_token[args.long] / per_token[args.short]:.2f}")


if __name__ == "__main__":
    main()
