"""``task=index``: parts that are encoded apart, the build that merges them, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refragkit.data.datamodule import MultiHopQA
from refragkit.errors import ConfigError
from refragkit.experiment import Run
from refragkit.retrievers.encoder import SentenceEncoder
from refragkit.retrievers.hybrid import hybrid
from refragkit.tasks.index import parse_shard
from tests.tasks.conftest import Result

Execute = Callable[..., Result]
ROOT = Path(__file__).parents[2]
WORDS = [
    "river",
    "bread",
    "tea",
    "chess",
    "moss",
    "harbour",
    "orchard",
    "island",
    "film",
    "director",
    "city",
    "country",
    "north",
    "yeast",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty passages that mention each other, and two questions."""
    folder = tmp_path_factory.mktemp("data")
    passages = [
        {
            "id": f"d{i}",
            "title": f"Title {i}",
            "text": f"The {WORDS[i % 14]} of {WORDS[i * 3 % 14]}, see Title {(i * 7) % 20}.",
        }
        for i in range(20)
    ]
    questions = [
        {"id": f"q{i}", "question": f"What of {WORDS[i]}?", "answers": ["x"], "supporting_ids": [f"d{i}"]}
        for i in range(2)
    ]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return folder


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of the encoder got."""
    calls: list[int] = []
    encode = SentenceEncoder.encode
    monkeypatch.setattr(
        SentenceEncoder, "encode", lambda self, t, p=None: (calls.append(len(t)), encode(self, t, p))[1]
    )
    return calls


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a model nor a tokenizer is built by this task."""
    for name in ("model", "tokenizer"):
        monkeypatch.setattr(Run, name, property(lambda self: pytest.fail("built")))


def test_parts_are_encoded_apart_and_merged_without_encoding_again(
    data: Path, execute: Execute, encoded: list[int]
) -> None:
    common = ("task=index", "retriever=hybrid", "retriever.shard_size=3", f"data.path={data}")
    first = execute(*common, "index.shard=0/2")
    assert first.summary["status"] == "finished", first.err
    assert encoded == [3, 3, 3, 2]  # shards 0, 2, 4 and 6
    assert first.summary["metrics"]["index/encoded"] == 11 and "part 0 of 2" in first.out

    refused = execute(*common, "index.merge_only=true")
    assert refused.summary["status"] == "failed"
    assert "3 shards of vectors" in refused.err and "yet: 1, 3, 5." in refused.err.replace("\n", " ")

    execute(*common, "index.shard=1/2")
    assert encoded == [3, 3, 3, 2, 3, 3, 3]
    merged = execute(*common, "index.merge_only=true")
    assert merged.summary["status"] == "finished", merged.err
    assert len(encoded) == 7
    metrics, artifacts = merged.summary["metrics"], merged.summary["artifacts"]
    assert (metrics["index/passages"], metrics["index/cached"], metrics["index/encoded"]) == (20, 20, 0)
    folders = [(merged.folder / artifacts[name]).resolve() for name in ("index", "graph")]
    manifest = json.loads((folders[0] / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["retriever"] == "hybrid" and manifest["count"] == 20
    files = [f for d in folders for f in d.rglob("*") if f.is_file() and f.name != "manifest.json"]
    assert metrics["index/bytes"] == sum(f.stat().st_size for f in files)
    assert metrics["index/bytes_vectors"] > 20 * 384 * 4
    assert folders[0].name in merged.out.replace("\n", "") and "bytes per passage" in merged.out

    # It is the index that a run opens, and the same as one that was built in one piece.
    corpus = MultiHopQA(str(data))
    corpus.prepare()
    assert corpus.corpus is not None
    whole = hybrid(shard_size=3).open_index(corpus.corpus)
    opened = hybrid(shard_size=3, cache_dir=merged.folder.parent / "outputs" / "cache").open_index(
        corpus.corpus
    )
    assert opened.retriever.index_path == folders[0]
    assert opened.search(WORDS, 20) == whole.search(WORDS, 20)


def test_an_index_that_is_there_is_reported_and_not_built_again(
    data: Path, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refragkit.retrievers.bm25 import BM25Retriever

    first = execute("task=index", "retriever=bm25", f"data.path={data}")
    assert first.summary["status"] == "finished", first.err
    monkeypatch.setattr(BM25Retriever, "build", lambda self: pytest.fail("built again"))
    again = execute("task=index", "retriever=bm25", f"data.path={data}")
    assert again.summary["status"] == "finished", again.err
    same = "index/bytes"
    assert again.summary["metrics"][same] == first.summary["metrics"][same]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("retriever=bm25", "index.shard=0/4"), "retriever=bm25 has no vectors to encode"),
        (("retriever=none",), "retriever=none has no index"),
        (("retriever=random",), "retriever=random keeps no index"),
        (("retriever=dense", "index.shard=8/8"), "index.shard=8/8: expected I/N with I from 0 to N-1"),
        (("retriever=dense", "index.shard=0/2", "index.merge_only=true"), "leave index.shard=null"),
        (("retriever=dense", "index.merge_only=1"), "index.merge_only: expected true or false, got 1"),
        (("retriever=dense", "+index.shards=2"), "unknown key 'index.shards'; did you mean 'index.shard'?"),
        (("retriever=bm25", "dry_run=true"), "task=index has no dry run"),
        (("retriever=bm25", "index=0/4"), "index: expected a mapping"),
    ],
)
def test_what_can_not_be_is_one_message(
    data: Path, execute: Execute, overrides: tuple[str, ...], message: str
) -> None:
    try:
        result = execute("task=index", f"data.path={data}", *overrides)
    except ConfigError as error:  # found before the run began
        assert message in str(error)
        return
    assert result.summary["status"] == "failed"
    assert result.err.count("error:") == 1 and message in result.err.replace("\n", " ")


@pytest.mark.parametrize("shard", ["8/8", "a/b", "3", 3, "-1/4", "1/0", "1/4/2", "", "0 / 4", 0.5, "0/-1"])
def test_wrong_shards_are_refused(shard: object) -> None:
    with pytest.raises(ConfigError, match=r"expected I/N with I from 0 to N-1, such as 0/8"):
        parse_shard(shard)
    assert parse_shard("7/8") == (7, 8) and parse_shard(None) is None


@pytest.mark.slow
def test_as_a_sweep_on_the_command_line(data: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        common = ("task=index", "retriever=dense", "retriever.shard_size=3", f"data.path={data}")
        return subprocess.run(
            [sys.executable, str(ROOT / "run.py"), *arguments, *common, f"paths.outputs={tmp_path}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    parts = run("-m", "index.shard=0/4,1/4,2/4,3/4", "tracking=none")
    assert parts.returncode == 0, parts.stderr
    summaries = [json.loads(f.read_text()) for f in sorted(tmp_path.glob("sweeps/*/*/summary.json"))]
    assert [s["metrics"]["index/encoded"] for s in summaries] == [6, 6, 5, 3]
    merged = run(f"hydra.run.dir={tmp_path}/merged")
    assert merged.returncode == 0, merged.stderr
    summary = json.loads((tmp_path / "merged" / "summary.json").read_text())
    assert summary["metrics"]["index/encoded"] == 0 and summary["metrics"]["index/cached"] == 20
    assert (tmp_path / "merged" / summary["artifacts"]["index"] / "manifest.json").is_file()
    assert summary["mlflow_run_id"]
    wrong = run("index.shard=8/8", f"hydra.run.dir={tmp_path}/wrong")
    assert wrong.returncode == 1 and wrong.stderr.count("error:") == 1 and "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_two_runs_at_once_build_one_index(data: Path, tmp_path: Path) -> None:
    common = (
        "task=index",
        "retriever=hybrid",
        "retriever.shard_size=3",
        "tracking=none",
        f"data.path={data}",
    )
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "run.py"),
                *common,
                f"paths.outputs={tmp_path}",
                f"hydra.run.dir={tmp_path}/{i}",
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=300)[1] == "" and process.returncode == 0
    summaries = [json.loads((tmp_path / str(i) / "summary.json").read_text()) for i in range(2)]
    assert sorted(s["metrics"].get("index/encoded", 0) for s in summaries) == [0, 20]
    assert len({s["artifacts"]["index"] for s in summaries}) == 1
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 3
