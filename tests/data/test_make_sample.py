"""The script that made the bundled sample, run on a layout small enough to check by eye."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "experiments" / "make_sample" / "make_sample.py"


def test_it_keeps_splits_and_gold_apart_and_repeats_byte_for_byte(tmp_path: Path) -> None:
    passages = [{"id": f"p{n}", "title": f"T{n}", "text": f"Text {n}.", "extra": 1} for n in range(60)]
    questions = [
        {
            "id": f"hotpotqa_{n}",
            "question": "Who?",
            "answers": ["Ada"],
            "supporting_ids": [f"p{n}", f"p{(n + 1) % 20}"],
            "hops": 2,
            "candidate_ids": [f"p{(n + k) % 60}" for k in (0, 1, 20, 40)] + [f"p{(n + 1) % 20}"] * (n == 19),
            "dataset": "hotpotqa",
            "type": "bridge",
            "source_split": "dev" if n % 5 == 0 else "train",
            "decomposition": [],
        }
        for n in range(20)
    ]
    # A dev question of its own passages: the others share one with a training question.
    questions[0]["supporting_ids"] = ["p50", "p51"]
    questions[0]["candidate_ids"] = ["p50", "p51", "p52"]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    outputs = []
    for name in ("a", "b"):
        command = [sys.executable, str(SCRIPT), "--source", str(tmp_path), "--output", str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True)
        outputs.append({f.name: f.read_bytes() for f in sorted((tmp_path / name).iterdir())})
        # The order of the source doesn't matter.
        (tmp_path / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in reversed(questions)))
    assert outputs[0] == outputs[1]
    train, validation, corpus = (
        [json.loads(line) for line in outputs[0][f"{n}.jsonl"].splitlines()]
        for n in ("train", "validation", "corpus")
    )
    assert [q["id"] for q in validation] == ["hotpotqa_0"] and len(train) == 16
    ids = {d["id"] for d in corpus}
    assert all(set(d) == {"id", "title", "text"} for d in corpus)
    for q in train + validation:
        assert set(q["supporting_ids"]) <= set(q["candidate_ids"]) <= ids
        assert "source_split" not in q
