"""Mamba-2 training steps against transformers' Mamba2ForCausalLM on a CPU.

    python experiments/benchmarks/mamba2_training.py --tokens 512 --dtype float32

Both models have the same weights; a step is forward, loss and backward. The limit is the time of the projections'
matrix products alone.
"""

from __future__ import annotations

import tempfile

import torch
import transformers
from measure import arguments, median_seconds, peak_extra_bytes

from refragkit.models.checkpoint import load_model


def main() -> None:
    args = arguments(__doc__, tokens=512, layers=6, dtype="float32")
    dtype = getattr(torch, args.dtype)
    config = transformers.Mamba2Config(
        hidden_size=768,
        num_heads=24,
        head_dim=64,
        state_size=128,
        n_groups=1,
        num_hidden_layers=args.layers,
        vocab_size=1024,
    )
    theirs = transformers.Mamba2ForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(folder, dtype=dtype).train()
    theirs = theirs.to(dtype).train()
    ids = torch.randint(0, 1024, (1, args.tokens))

    def step(model: torch.nn.Module) -> None:
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:])
        model.zero_grad()
        loss.backward()

    shapes = [module.weight.shape for module in ours.modules() if isinstance(module, torch.nn.Linear)]
    operands = [(torch.randn(args.tokens, i, dtype=dtype), torch.randn(o, i, dtype=dtype)) for o, i in shapes]

    def projections() -> None:
        for x, weight in operands:
            y = x @ weight.T
            _ = y @ weight, y.T @ x  # gradients of the input and of the weight

    seconds = median_seconds(
        {"refragkit": lambda: step(ours), "transformers": lambda: step(theirs), "projections": projections},
        args.repeats,
    )
    memory = {
        name: peak_extra_bytes(lambda m=m: step(m))
        for name, m in (("refragkit", ours), ("transformers", theirs))
    }
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads, {args.dtype}"
    )
    for name, value in seconds.items():
        extra = f", peak extra memory {memory[name] / 2**20:.0f} MiB" if name in memory else " (the limit)"
        print(f"{name}: {args.tokens / value:.0f} tokens/s{extra}")
    print(f"ratio: {seconds['transformers'] / seconds['refragkit']:.2f}")


if __name__ == "__main__":
    main()
