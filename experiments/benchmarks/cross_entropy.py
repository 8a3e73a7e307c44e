"""The chunked cross-entropy over a large vocabulary against F.cross_entropy on full logits, forward and backward.

python experiments/benchmarks/cross_entropy.py --vocab 151936 --tokens 1024
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import arguments, median_seconds, peak_extra_bytes

from refragkit.ops.cross_entropy import linear_cross_entropy, weighted_linear_cross_entropy


def main() -> None:
    args = arguments(__doc__, tokens=1024, vocab=151936, d_model=896)
    hidden = torch.randn(args.tokens, args.d_model, requires_grad=True)
    weight = (torch.randn(args.vocab, args.d_model) * 0.02).requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    targets = torch.randint(0, args.vocab, (args.tokens,))

    weights = torch.rand(args.tokens)

    def weighted() -> torch.Tensor:
        return weighted_linear_cross_entropy(hidden, weight, targets, weights)[0]

    def per_token() -> torch.Tensor:
        return (linear_cross_entropy(hidden, weight, targets) * weights).sum()

    def full() -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
        return (losses * weights).sum()

    def step(loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()

    candidates = {"weighted (training)": weighted, "per token": per_token, "full logits": full}
    seconds = median_seconds({name: lambda f=f: step(f) for name, f in candidates.items()}, args.repeats)
    own = weight.numel() * 4  # the new gradient of the weight, which both must hold beside the old one
    memory = {name: peak_extra_bytes(lambda f=f: step(f)) - own for name, f in candidates.items()}
    print(f"torch {torch.__version__}, {args.threads} threads, vocabulary {args.vocab}")
    for name, value in seconds.items():
        print(f"{name}: {value * 1e3:.0f} ms, peak extra memory {memory[name] / 1e6:.0f} MB")
    print(f"ratio: {seconds['full logits'] / seconds['weighted (training)']:.2f}")


if __name__ == "__main__":
    main()
