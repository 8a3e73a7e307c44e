"""Builds that are killed or can't write: never a wrong answer, never a lost finished shard, one clear message."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refragkit.errors import RetrievalError
from refragkit.retrievers.dense import dense
from refragkit.retrievers.encoder import SentenceEncoder, resolve_encoder
from refragkit.retrievers.hybrid import hybrid
from refragkit.types import Document

# One process imports everything; it forks a run of task=index for each kill, so that twenty kills take a minute.
KILLS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import bm25s, faiss, lightning, sentence_transformers, Stemmer
from refragkit.config import compose
from refragkit.data.datamodule import MultiHopQA
from refragkit.experiment import run_experiment

rng = random.Random(7)
words = "river bread tea chess moss harbour orchard island film director city country north yeast stone".split()
root = Path(sys.argv[1])
data = root / "data"
data.mkdir()
with (data / "corpus.jsonl").open("w") as f:
    for i in range(60):
        text = " ".join(rng.choices(words, k=30)) + f" Title {(i * 7) % 60}"
        f.write(json.dumps({"id": f"d{i}", "title": f"Title {i}", "text": text}) + "\\n")
with (data / "questions.jsonl").open("w") as f:
    for i in range(4):
        row = {"id": f"q{i}", "question": "?", "answers": ["x"], "supporting_ids": [f"d{i}"]}
        f.write(json.dumps(row) + "\\n")
runs = iter(range(10 ** 6))

def build(outputs):
    common = ["task=index", "retriever=hybrid", "retriever.shard_size=6", "retriever.batch_size=6", "tracking=none"]
    cfg = compose([*common, f"data.path={data}", f"paths.outputs={outputs}"])
    return run_experiment(cfg, root / "runs" / str(next(runs)))

def content(outputs):
    # Size and checksum of every file of every index, and the names of what else is there.
    folders = [p for p in (outputs / "cache").iterdir() if p.is_dir()]
    files = {}
    for p in folders:
        if (p / "manifest.json").is_file():
            files[p.name] = json.loads((p / "manifest.json").read_text())["files"]
    return {"files": files, "folders": sorted(p.name for p in folders)}

def finished(outputs):
    return {p.name: p.stat().st_ino for p in (outputs / "cache" / "vectors").rglob("*.safetensors")}

assert build(root / "reference").status == "finished"
reference = content(root / "reference")
started = time.perf_counter()
build(root / "timing")
window = time.perf_counter() - started

lost, different, states, kills, attempts = [], 0, set(), 0, 0
outputs = root / "0"
while kills < 20 and attempts < 100:
    attempts += 1
    before = finished(outputs)
    child = os.fork()
    if child == 0:
        try:
            next(r for r in runs if r > 1000 * attempts)  # a run folder that no other child has
            build(outputs)
        finally:
            os._exit(0)
    time.sleep(window * rng.random())
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    after = finished(outputs)
    lost += [name for name, inode in before.items() if after.get(name) != inode]
    if os.WIFSIGNALED(status):
        kills += 1
        states.add(len(after))
    # A run over a copy of what the kill left gives the same index, and encodes no finished shard again.
    copy = root / f"copy-{attempts}"
    shutil.copytree(outputs, copy) if outputs.is_dir() else copy.mkdir()
    left = finished(copy)
    summary = build(copy)
    different += summary.status != "finished" or content(copy) != reference
    done = finished(copy)
    lost += [name for name, inode in left.items() if done.get(name) != inode]
    if not os.WIFSIGNALED(status) or len(after) == 10:
        outputs = root / str(attempts)
print(json.dumps({"different": different, "lost": lost, "kills": kills, "states": sorted(states),
                  "folders": sorted(n.rsplit("-", 1)[0] for n in reference["folders"])}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_twenty_kills_while_building(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    states = result.pop("states")
    assert result == {
        "different": 0,
        "lost": [],
        "kills": 20,
        "folders": ["hybrid", "passage_graph", "vectors"],
    }
    assert len(states) > 3  # kills fell before, within and after the encoding


LIMITED = """
import logging, resource, signal, sys
from pathlib import Path
from refragkit.errors import RetrievalError
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.types import Document

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit fails instead of killing
cache = Path(sys.argv[1])
corpus = [Document(f"d{i}", "", f"word{i} word{i + 1} tea") for i in range(500)]
import bm25s
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
try:
    BM25Retriever().open_index(corpus, cache)
except RetrievalError as error:
    print(error)
print(sorted(p.name for p in cache.iterdir() if p.is_dir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(BM25Retriever().open_index(corpus, cache).search(["word7"], 1)[0][0].doc_id)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_write_that_fails_is_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, folders, found = done.stdout.strip().splitlines()
    assert message.startswith("can't write the index") and "Nothing was left behind" in message
    assert folders == "[]"
    assert found in ("d6", "d7")


SHARD_LIMITED = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from refragkit.errors import RetrievalError
from refragkit.retrievers.vectors import _store

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1]) / "vectors"
_store(folder / "a.safetensors", np.ones((2, 4), dtype=np.float32))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    _store(folder / "b.safetensors", np.ones((2000, 4), dtype=np.float32))
except RetrievalError as error:
    print(error)
print(sorted(p.name for p in folder.iterdir()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_finished_shards_survive_a_write_that_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARD_LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, files = done.stdout.strip().splitlines()
    assert message.startswith("can't store vectors in") and "Finished shards are kept" in message
    assert files == "['a.safetensors']"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of the encoder got."""
    calls: list[int] = []
    encode = SentenceEncoder.encode
    monkeypatch.setattr(
        SentenceEncoder, "encode", lambda self, t, p=None: (calls.append(len(t)), encode(self, t, p))[1]
    )
    return calls


def _indexes(cache: Path, name: str = "dense") -> list[Path]:
    return sorted(p for p in cache.glob(f"{name}-*") if p.is_dir())


def test_a_changed_passage_encodes_its_shard_and_is_found(
    corpus: list[Document], tmp_path: Path, encoded: list[int]
) -> None:
    dense(shard_size=4, cache_dir=tmp_path).open_index(corpus)
    assert encoded == [4, 4, 4]
    changed = [*corpus]
    changed[5] = Document(changed[5].doc_id, "Kenya", "Now this is about submarine volcanoes.")
    opened = dense(shard_size=4, cache_dir=tmp_path).open_index(changed)
    assert encoded == [4, 4, 4, 4]
    assert opened.search(["submarine volcanoes"], 1)[0][0].document == changed[5]
    assert len(_indexes(tmp_path)) == 2


def test_another_encoder_under_the_same_name_is_noticed(corpus: list[Document], tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(resolve_encoder(None), model)
    before = dense(str(model), cache_dir=cache).open_index(corpus).search(["tea"], 12)
    weights = load_file(model / "model.safetensors")
    largest = max(weights, key=lambda name: weights[name].size)
    weights[largest] = np.flip(weights[largest], axis=0).copy()  # the same folder holds another model now
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    opened = dense(str(model), cache_dir=cache).open_index(corpus)
    after = opened.search(["tea"], 12)
    assert after != before
    assert after == dense(str(model)).open_index(corpus).search(["tea"], 12)
    assert len(_indexes(cache)) == 2 and len(list((cache / "vectors").iterdir())) == 2
    # Asked for by name, the old index is refused.
    with pytest.raises(RetrievalError, match="was built with encoder_hash="):
        opened.retriever.load(_other(_indexes(cache), opened.retriever.index_path))


def test_one_changed_byte_of_the_weights_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(4 << 20))

    def fingerprint() -> str:
        return SentenceEncoder(str(model), dtype="float32", cache_dir=cache).fingerprint

    before = fingerprint()
    hashed: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda f, n: (hashed.append(Path(f.name).name), digest(f, n))[1]
    )
    assert fingerprint() == before
    assert hashed == ["config.json"]  # the weights' digest is remembered
    times = weights.stat()
    with weights.open("r+b") as f:
        f.seek((2 << 20) + 12_345)
        f.write(b"\1")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint() != before
    (cache / "encoder_digests.json").write_text("[broken")
    assert fingerprint() == SentenceEncoder(str(model), dtype="float32").fingerprint != before


def _other(folders: list[Path], opened: Path | None) -> Path:
    (other,) = [f for f in folders if f != opened]
    return other


@pytest.mark.parametrize("where", ["index", "shard"])
def test_truncated_vectors_are_made_again_and_nothing_else(
    where: str, corpus: list[Document], tmp_path: Path, encoded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    good = dense(shard_size=4, cache_dir=tmp_path).open_index(corpus).search(["tea"], 12)
    (folder,) = _indexes(tmp_path)
    shards = sorted((tmp_path / "vectors").rglob("*.safetensors"))
    victim = folder / "vectors.safetensors"
    if where == "shard":
        shutil.rmtree(folder)
        victim = shards[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    encoded.clear()
    assert dense(shard_size=4, cache_dir=tmp_path).open_index(corpus).search(["tea"], 12) == good
    assert encoded == ([] if where == "index" else [4])
    assert (
        "building it again" in caplog.text if where == "index" else "encoding that shard again" in caplog.text
    )


def test_a_loaded_index_reads_its_documents_from_its_own_folder(
    corpus: list[Document], tmp_path: Path
) -> None:
    built = hybrid(cache_dir=tmp_path).open_index(corpus).retriever
    assert built.index_path is not None
    loaded = hybrid(cache_dir=tmp_path).retriever
    loaded.load(built.index_path)
    assert not isinstance(loaded.documents, list) and list(loaded.documents) == corpus
    queries = ["tea", "capital of Sweden", "film director"]
    assert loaded.search(queries, 12) == built.search(queries, 12)
    assert loaded.score(["tea"], [["bread", "tea"]]) == built.score(["tea"], [["bread", "tea"]])
    assert loaded.corpus_hash == built.corpus_hash
    table = built.index_path / "documents.safetensors"
    table.write_bytes(table.read_bytes()[:-8])
    with pytest.raises(RetrievalError, match=r"documents.safetensors has .* bytes, expected"):
        hybrid(cache_dir=tmp_path).retriever.load(built.index_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 KiB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("can't mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up(small_disk: Path, corpus: list[Document], encoded: list[int]) -> None:
    documents = [Document(f"{d.doc_id}{i}", d.title, f"{d.text} {i}") for i in range(3) for d in corpus]

    def build() -> list[list[str]]:
        built = hybrid(shard_size=9, cache_dir=small_disk).open_index(documents)
        return [[h.doc_id for h in hits] for hits in built.search(["tea"], 5)]

    def resize(size: str) -> None:
        options = ["-o", f"remount,size={size}", str(small_disk)]
        subprocess.run(["mount", *options], check=True)

    with pytest.raises(RetrievalError, match=r"can't store vectors in .*Finished shards are kept"):
        build()
    kept = {p.name: p.stat().st_ino for p in (small_disk / "vectors").rglob("*") if p.is_file()}
    assert 0 < len(kept) < 4 and all(name.endswith(".safetensors") for name in kept)
    resize("112k")
    with pytest.raises(
        RetrievalError, match=r"can't write the index .*disk is full. Nothing was left behind"
    ):
        build()
    assert not _indexes(small_disk, "hybrid") and not list(small_disk.glob("*.tmp-*"))
    assert sum(encoded) <= 36 + 9  # the shard that did not fit was encoded twice, no other
    resize("8m")
    encoded.clear()
    assert build() == [
        [h.doc_id for h in hits] for hits in hybrid(shard_size=9).open_index(documents).search(["tea"], 5)
    ]
    after = {p.name: p.stat().st_ino for p in (small_disk / "vectors").rglob("*") if p.is_file()}
    assert after.items() >= kept.items() and len(after) == 4
