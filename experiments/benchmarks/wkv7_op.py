"""The chunked RWKV-7 operator against the step-by-step recurrence in PyTorch, forward and backward.

python experiments/benchmarks/wkv7_op.py --tokens 512
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import arguments, median_seconds

from refragkit.ops.wkv7 import wkv7, wkv7_reference


def main() -> None:
    args = arguments(__doc__, tokens=512, heads=12, width=64)
    shape = (1, args.tokens, args.heads, args.width)
    r, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    log_decay = (-0.6065 * torch.rand(shape)).requires_grad_()
    kk = torch.nn.functional.normalize(torch.randn(shape), dim=-1)
    a, b = (-kk).requires_grad_(), (kk * torch.rand(shape)).requires_grad_()

    def step(operator: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        out, _ = operator(r, log_decay, k, v, a, b)
        out.sum().backward()

    seconds = median_seconds(
        {"chunked": lambda: step(wkv7), "recurrence": lambda: step(wkv7_reference)}, args.repeats
    )
    print(f"torch {torch.__version__}, {args.threads} threads")
    for name, value in seconds.items():
        print(f"{name}: {args.tokens / value:.0f} tokens/s")
    print(f"ratio: {seconds['recurrence'] / seconds['chunked']:.2f}")


if __name__ == "__main__":
    main()
