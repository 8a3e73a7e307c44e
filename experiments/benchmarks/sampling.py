"""Sampling several continuations of one prompt against transformers' generate, Mamba-2, on a CPU.

python experiments/benchmarks/sampling.py --samples 8 --prompt 256 --new 64
"""

from __future__ import annotations

import tempfile

import torch
import transformers
from measure import arguments, median_seconds

from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.checkpoint import load_model


def main() -> None:
    args = arguments(__doc__, samples=8, prompt=256, new=64, layers=6)
    config = transformers.Mamba2Config(
        hidden_size=768,
        num_heads=24,
        head_dim=64,
        state_size=128,
        n_groups=1,
        num_hidden_layers=args.layers,
        vocab_size=1024,
    )
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(folder).eval()
    prompt = torch.randint(4, 1024, (1, args.prompt))
    settings = GenerationConfig(max_new_tokens=args.new, temperature=1.0)

    def run_theirs() -> None:
        with torch.no_grad():
            theirs.generate(
                prompt,
                do_sample=True,
                top_k=0,
                num_return_sequences=args.samples,
                min_new_tokens=args.new,
                max_new_tokens=args.new,
                pad_token_id=0,
            )

    def run_ours() -> None:
        generate(ours, prompt.tolist(), settings, pad_id=0, num_samples=args.samples)

    seconds = median_seconds({"refragkit": run_ours, "transformers": run_theirs}, args.repeats)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads")
    for name, value in seconds.items():
        print(f"{name}: {args.samples * args.new / value:.0f} new tokens/s")
    print(f"ratio: {seconds['transformers'] / seconds['refragkit']:.2f}")


if __name__ == "__main__":
    main()
