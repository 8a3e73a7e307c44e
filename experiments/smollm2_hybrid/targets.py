"""Distil SmolLM2 into hybrids of 6, 12 and 15 recurrent blocks, several seeds each, and print one table.

    python experiments/smollm2_hybrid/targets.py --data DATA [--only 6M 6R 12M] [--seeds 0 1] [--threads 1]

DATA holds wikitext2/{valid,test}.txt, wikipedia_demo/wiki_demo.txt, multihop_qa/corpus.jsonl, oasst1/ and
llms_from_scratch_instructions/ with conversations.jsonl to train on, and alpaca_demo/conversations.jsonl to measure on.
Runs that have finished are not run again; a run that was killed goes on from the source's cached activations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIX = {"M": [12, 21, 24, 25, 26, 28], "R": [6, 7, 12, 24, 25, 28]}
TWELVE = [2, 4, 5, 6, 7, 9, 12, 21, 24, 25, 26, 28]
FIFTEEN = [2, 4, 5, 6, 7, 9, 10, 12, 13, 21, 24, 25, 26, 27, 28]
# blocks, kind, tokens of text, of stage 1 and of stage 2, and the share of the passages that is read
RUNS = {
    "6M": (SIX["M"], "M", 200_000, 600_000, 80_000, 0.95),
    "6R": (SIX["R"], "R", 300_000, 900_000, 150_000, 0.2),
    "12M": (TWELVE, "M", 200_000, 500_000, 100_000, 0.95),
    "15M": (FIFTEEN, "M", 200_000, 500_000, 100_000, 0.95),
}
# A twentieth, whole titles, is only measured on. All that is left is 72% of the text, a fifth of it 33%.
PASSAGES = "multihop_qa/corpus.jsonl"
TRAIN = (
    "wikitext2/valid.txt",
    "wikipedia_demo/wiki_demo.txt",
    "oasst1/conversations.jsonl",
    "llms_from_scratch_instructions/conversations.jsonl",
)
MEASURE = {"wikitext2": "wikitext2/test.txt", "chat": "alpaca_demo/conversations.jsonl"}


def command(
    name: str, seed: int, data: Path, folder: Path, threads: int | None, recall_share: float
) -> list[str]:
    """One run's command line."""
    layers, to, tokens, align, match, share = RUNS[name]
    trained, measured_passages = passages(data / PASSAGES, folder.parent / f"passages-{share}", share)
    texts = ", ".join(str(file) for file in (trained, *(data / name for name in TRAIN)))
    sets = {"passages": measured_passages} | {key: data / file for key, file in MEASURE.items()}
    measured = ", ".join(f"{key}: {file}" for key, file in sets.items())
    return [
        sys.executable,
        str(ROOT / "run.py"),
        "method=distill",
        "model=transformer",
        "model.init=smollm2",
        "retriever=none",
        f"convert.layers={json.dumps(layers)}",
        f"convert.to={to}",
        f"convert.text=[{texts}]",
        f"convert.evaluation_texts={{{measured}}}",
        "convert.evaluation_tokens=16384",
        f"method.text_tokens={tokens}",
        f"method.align_tokens={align}",
        f"method.match_tokens={match}",
        f"method.recall_share={recall_share}",
        "method.keep_cache=true",
        "method.cache_gib=16",
        f"seed={seed}",
        f"hardware.threads={threads or 'null'}",
        f"hydra.run.dir={folder}",
    ]


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=sorted(RUNS), default=["6M", "6R"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--recall-share", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=None, help="of torch; default: all cores")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "smollm2_hybrid")
    parser.add_argument("--table", action="store_true", help="only print the table of what has finished")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        for seed in options.seeds:
            folder = (options.out / f"{name}-{seed}").absolute()
            summary = folder / "summary.json"
            if not finished(summary) and not options.table:
                if folder.exists():  # of a run that was killed or failed
                    folder.rename(folder.with_name(f"{folder.name}-failed-{int(folder.stat().st_mtime)}"))
                folder.parent.mkdir(parents=True, exist_ok=True)
                line = command(
                    name, seed, options.data.absolute(), folder, options.threads, options.recall_share
                )
                subprocess.run(line, check=True, cwd=ROOT)
            if finished(summary):
                rows.append((name, seed, json.loads(summary.read_text())))
    print(table(rows))


def passages(corpus: Path, folder: Path, share: float) -> tuple[Path, Path]:
    """A share of the corpus to train on and a twentieth to measure on, which have no title in common."""
    parts: tuple[list[str], list[str]] = ([], [])
    for line in corpus.read_text(encoding="utf-8").splitlines(keepends=True):
        rank = zlib.crc32(json.loads(line)["title"].encode()) % 20
        if rank <= round(20 * share):
            parts[rank == 0].append(line)
    files = (folder / "train.jsonl", folder / "measured.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in zip(files, parts, strict=True):
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(file)
    return files


def finished(summary: Path) -> bool:
    """Whether a run has ended well."""
    return summary.is_file() and json.loads(summary.read_text())["status"] == "finished"


def table(rows: list[tuple[str, int, dict[str, Any]]]) -> str:
    """Markdown: perplexity over the source's, induction over the source's, recall of both, cost."""
    lines = [
        "| blocks | seed | wikitext2 | passages | unseen chat | induction | recall (source) | CPU min | min |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, seed, summary in rows:
        found = summary["metrics"]

        def ratio(measure: str, found: dict[str, float] = found) -> str:
            return f"{found[f'convert/converted/{measure}'] / found[f'convert/source/{measure}']:.3f}"

        lines.append(
            f"| {name} | {seed} | {ratio('perplexity/wikitext2')} | {ratio('perplexity/passages')} |"
            f" {ratio('perplexity/chat')} | {ratio('induction_perplexity')} |"
            f" {found['convert/converted/recall']:.3f} ({found['convert/source/recall']:.3f}) |"
            f" {found['convert/cpu_seconds'] / 60:.1f} | {summary['wall_seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
