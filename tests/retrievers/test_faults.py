"""Builds that are killed or can't write: never a wrong answer, never a lost finished shard, one clear message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# One process loads the encoder; it forks a builder for each kill, so that twenty kills take seconds.
KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from refragkit.retrievers import encoder as encoder_module
from refragkit.retrievers.hybrid import hybrid
from refragkit.types import Document

rng = random.Random(7)
words = "river bread tea chess moss harbour orchard island film director city country north yeast stone".split()
texts = [" ".join(rng.choices(words, k=30)) + f" Title {(i * 7) % 60}" for i in range(60)]
corpus = [Document(f"d{i}", f"Title {i}", text) for i, text in enumerate(texts)]
cache = Path(sys.argv[1])

def open_and_search(folder):
    retriever = hybrid(shard_size=6, batch_size=6, cache_dir=folder).open_index(corpus)
    return [[h.doc_id for h in hits] for hits in retriever.search(["tea and bread", "a film director"], 5)]

reference = open_and_search(cache / "reference")
# The first opening loaded the model: from here on a build takes a fraction of that time.
started = time.perf_counter()
open_and_search(cache / "timing")
window = time.perf_counter() - started

def finished(folder):
    return {p.name: p.stat().st_ino for p in (folder / "vectors").rglob("*.safetensors")}

lost, different, folders, kills, attempts = [], 0, set(), 0, 0
folder = cache / "0"
while kills < 20 and attempts < 100:
    attempts += 1
    before = finished(folder)
    child = os.fork()
    if child == 0:
        try:
            open_and_search(folder)
        finally:
            os._exit(0)
    time.sleep(window * rng.random())
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    after = finished(folder)
    lost += [name for name, inode in before.items() if after.get(name) != inode]
    kills += os.WIFSIGNALED(status)
    if not os.WIFSIGNALED(status) or kills % 5 == 0:
        # Look at what is there now, and start over in a new folder.
        different += open_and_search(folder) != reference
        folders |= {p.name.rsplit("-", 1)[0] for p in folder.iterdir() if p.is_dir()}
        folder = cache / str(attempts)
print(json.dumps({"different": different, "lost": lost, "kills": kills, "folders": sorted(folders)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_twenty_kills_while_building(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)], capture_output=True, text=True, check=True, timeout=240
    )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result == {
        "different": 0,
        "lost": [],
        "kills": 20,
        "folders": ["hybrid", "passage_graph", "queries", "vectors"],
    }


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
