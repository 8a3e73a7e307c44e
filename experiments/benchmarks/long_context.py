"""Peak memory of training on long prompts: whole runs of method=refrag, each in a process of its own.

    python experiments/benchmarks/long_context.py --tokens 6144 --rows plain,checkpointed

A run takes its steps the way every run does (retrieve, read, answer, reward, learn), one question a step, of which
the documents fill the context, and evaluates at its end. Passages of the bundled sample are joined into long
documents. The peak is the whole process's resident memory, Python and its libraries included (Linux only). The last
line is the lowest peak, in GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = {"plain": "false", "checkpointed": "true"}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help=f"out of {', '.join(ROWS)}")
    parser.add_argument("--model", default="hybrid")
    parser.add_argument("--size", default="small")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto")
    parser.add_argument(
        "--overrides", nargs="*", default=[], help="of the configuration, such as method.objective=..."
    )
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)  # measure this one in this process
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.row:
        print(json.dumps(measure(args)))
        return
    peaks = []
    print(f"{args.model} {args.size}, {args.threads} threads")
    print(f"{'row':<13} {'peak GiB':>9} {'tokens/step':>12} {'s/step':>8} {'tok/s':>7} {'loss':>7}")
    for row in args.rows.split(","):
        command = [sys.executable, __file__, "--row", row, *sys.argv[1:]]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        peaks.append(found["peak_gib"])
        print(
            f"{row:<13} {found['peak_gib']:>9.2f} {found['tokens']:>12.0f} {found['seconds']:>8.1f}"
            f" {found['tokens'] / found['seconds']:>7.1f} {found['loss']:>7.3f}"
        )
    print(f"lowest peak: {min(peaks):.2f} GiB")


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run a training and read its summary."""
    from refragkit import compose
    from refragkit.experiment import run_experiment

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_long_documents(data, args.tokens)
        cfg = compose(
            [
                "method=refrag",
                f"model={args.model}",
                f"model.size={args.size}",
                f"model.gradient_checkpointing={ROWS[args.row]}",
                "retriever=bm25",
                f"data.path={data}",
                f"method.max_seq_len={args.tokens}",
                f"method.max_steps={args.steps}",
                "method.global_batch_size=1",
                "method.eval_at_start=false",
                "method.log_every=1",
                f"hardware.precision={args.precision}",
                f"hardware.threads={args.threads}",
                "tracking=none",
                f"paths.outputs={folder}/outputs",
                *args.overrides,
            ]
        )
        summary = run_experiment(cfg, Path(folder, "run"))
    if summary.status != "finished":
        raise SystemExit(summary.error)
    metrics = summary.metrics
    return {
        "peak_gib": summary.peak_rss_bytes / 2**30,
        "tokens": metrics["train/tokens"] / args.steps,
        "seconds": metrics["time/step_seconds"],
        "loss": metrics["train/loss"],
    }


def write_long_documents(folder: Path, tokens: int) -> None:
    """A data folder whose documents are so long that the nine of a question fill the context."""
    from refragkit.data.datamodule import SAMPLE_DIR

    folder.mkdir()
    passages = [json.loads(line) for line in (SAMPLE_DIR / "corpus.jsonl").read_text().splitlines()]
    size = max(
        1, tokens // 400
    )  # passages in a document; one has about 100 tokens, and nine documents are read
    with (folder / "corpus.jsonl").open("w") as file:
        for start in range(0, 40 * size, size):
            part = passages[start : start + size]
            text = " ".join(p["text"] for p in part)
            file.write(json.dumps({"id": part[0]["id"], "title": part[0]["title"], "text": text}) + "\n")
    for name in ("train", "validation"):
        lines = []
        for n in (0, 1):
            passage = passages[(20 * (name == "train") + n) * size]
            lines.append(
                {
                    "id": f"{name}{n}",
                    "question": f"What is {passage['title']} known for?",
                    "answers": [passage["title"]],
                    "supporting_ids": [passage["id"]],
                    "hops": 1,
                }
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
