"""LoRA on the 1.5b hybrid with an int8 base: peak memory and tokens/s, beside PEFT on a Qwen2 of the same size.

    python experiments/benchmarks/int8_lora.py --rows int8,peft-bf16,peft-float32

Random weights, one sequence a step, every token supervised. Each row is a process of its own, so that its peak is its
own: all resident memory of the process, Python and its libraries included (Linux only). Rows of ours are int8, bf16 and
float32; PEFT's adapt the same projections of the same blocks. `ratio` is tokens/s against PEFT in bfloat16, or against
the last of PEFT's rows that ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROWS = ("int8", "bf16", "float32", "peft-bf16", "peft-float32")
_TARGETS = ["q", "k", "v", "o", "gate", "up", "down"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="int8,peft-bf16,peft-float32", help=f"out of {', '.join(ROWS)}")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--sequence-tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="measured; one before them is not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="of ours and of PEFT's")
    parser.add_argument("--precision", default="bf16-mixed", help="of ours: bf16-mixed or 32-true")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)  # measure this one in this process
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.row:
        print(json.dumps(measure(args)))
        return
    rows = args.rows.split(",")
    unknown = sorted(set(rows) - set(ROWS))
    if unknown:
        raise SystemExit(f"--rows: {', '.join(unknown)} is not one of {', '.join(ROWS)}")
    print(f"torch {torch.__version__}, {args.threads} threads, {args.size}, {args.sequence_tokens} tokens")
    print(
        f"{'row':<13} {'built GiB':>9} {'peak GiB':>9} {'tok/s':>7} {'CPU s/step':>10} {'trainable':>10} {'loss':>7}"
    )
    found = {}
    for row in rows:
        command = [sys.executable, __file__, *sys.argv[1:], "--row", row]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[row] = result = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{row:<13} {result['built_gib']:>9.2f} {result['peak_gib']:>9.2f} {result['tokens_per_second']:>7.1f} "
            f"{result['cpu_seconds']:>10.2f} {result['trainable']:>10,} {result['loss']:>7.3f}",
            flush=True,
        )
    peers = [row for row in ("peft-float32", "peft-bf16") if row in found]
    if peers and "int8" in found:
        print(f"ratio: {found['int8']['tokens_per_second'] / found[peers[-1]]['tokens_per_second']:.2f}")


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Build a row's model and time its steps."""
    torch.set_num_threads(args.threads)
    prepare = peft_step if args.row.startswith("peft") else our_step
    step, trainable = prepare(args)
    built = peak_gib()
    loss = step()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(args.steps):
        loss = step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "built_gib": built,
        "peak_gib": peak_gib(),
        "tokens_per_second": args.steps * args.sequence_tokens / wall,
        "cpu_seconds": cpu / args.steps,
        "trainable": trainable,
        "loss": loss,
    }


def our_step(args: argparse.Namespace) -> tuple[Callable[[], float], int]:
    from refragkit.adapters.lora import LoRA
    from refragkit.models.build import build_model
    from refragkit.ops.cross_entropy import weighted_linear_cross_entropy
    from refragkit.training.optim import LearningRates, build_adamw, clip_gradients

    node = {
        "_target_": "refragkit.models.build.rwkv_qwen",
        "size": args.size,
        "gradient_checkpointing": args.gradient_checkpointing,
    }
    model = build_model(node, quantize=None if args.row == "float32" else args.row).train()
    report = LoRA(args.rank, 2 * args.rank, targets=_TARGETS, blocks="T").apply(model)
    optimiser = build_adamw(model, LearningRates.uniform(2e-5))
    ids = tokens(model.vocab_size, args.sequence_tokens)
    weights = torch.full((args.sequence_tokens,), 1 / args.sequence_tokens)

    def step() -> float:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision != "32-true", cache_enabled=False):
            hidden, _ = model.hidden_states(ids[:, :-1])
            loss, _ = weighted_linear_cross_entropy(
                hidden[0], model.head_weight, ids[0, 1:], weights, model.head_scale
            )
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimiser.step()
        return float(loss.detach())

    return step, report.trainable_parameters


def peft_step(args: argparse.Namespace) -> tuple[Callable[[], float], int]:
    """The same projections of the same blocks of a Qwen2 with the same dimensions."""
    import peft
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from refragkit.models.build import DEFAULT_VOCAB_SIZE
    from refragkit.models.config import SIZES, ModelConfig

    sizes = {key: value for key, value in SIZES["rwkv-qwen"][args.size].items() if value is not None}
    ours = ModelConfig(**{"vocab_size": DEFAULT_VOCAB_SIZE, **sizes})
    config = Qwen2Config(
        vocab_size=ours.vocab_size,
        hidden_size=ours.d_model,
        intermediate_size=ours.d_ff,
        num_hidden_layers=ours.n_layers,
        num_attention_heads=ours.n_heads,
        num_key_value_heads=ours.n_kv_heads,
        tie_word_embeddings=ours.tie_embeddings,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if args.row == "peft-bf16" else torch.float32)
    model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    lora = peft.LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=[f"{name}_proj" for name in _TARGETS],
        layers_to_transform=[index for index, kind in enumerate(ours.block_pattern) if kind == "T"],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, lora).train()
    if args.gradient_checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-5)
    ids = tokens(ours.vocab_size, args.sequence_tokens)

    def step() -> float:
        optimiser.zero_grad()
        loss = adapted(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        return float(loss.detach())

    return step, sum(parameter.numel() for parameter in trained)


def tokens(vocab_size: int, count: int) -> torch.Tensor:
    """Token ids ``[1, count + 1]``."""
    return torch.randint(0, vocab_size, (1, count + 1), generator=torch.Generator().manual_seed(0))


def peak_gib() -> float:
    """Peak resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 2**20


if __name__ == "__main__":
    main()
