"""Several processes that encode: the same vectors as one, and no process that outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from refragkit.errors import ConfigError
from refragkit.retrievers.encoder import SentenceEncoder
from refragkit.retrievers.vectors import ShardCache

TEXTS = [f"text number {i} " + "tea and bread " * (i % 23) for i in range(60)]


def test_settings_that_can_not_be() -> None:
    with pytest.raises(ConfigError, match=r"retriever.processes=0: expected an integer of at least 1"):
        SentenceEncoder(processes=0)
    with pytest.raises(ConfigError, match=r"processes=2: expected .* and 1 with backend=onnx"):
        SentenceEncoder(processes=2, backend="onnx")
    assert SentenceEncoder(processes=2).fingerprint == SentenceEncoder().fingerprint


@pytest.mark.slow
def test_vectors_and_cache_do_not_depend_on_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ShardCache(SentenceEncoder(batch_size=8), TEXTS, 25, tmp_path / "one").encode()
    encoder = SentenceEncoder(batch_size=8, processes=2)
    two = ShardCache(encoder, TEXTS, 25, tmp_path / "two").encode()
    assert two.encoded == 60
    assert np.abs(np.concatenate(one) - np.concatenate(two)).max() <= 1e-6
    names = [sorted(p.name for p in (tmp_path / n).rglob("*.safetensors")) for n in ("one", "two")]
    assert names[0] == names[1] and len(names[0]) == 3
    # Afterwards it encodes by itself, and what is in the cache starts no process.
    assert np.abs(encoder.encode_passages(TEXTS[:8]) - one[0][:8]).max() <= 1e-2
    monkeypatch.setattr("refragkit.retrievers.encoder_pool.worker_pool", lambda *a: pytest.fail("started"))
    assert ShardCache(SentenceEncoder(processes=2), TEXTS, 25, tmp_path / "one").encode().cached == 60


KILLED = """
import signal, sys
from pathlib import Path
from refragkit.errors import RetrievalError
from refragkit.retrievers.encoder import SentenceEncoder
from refragkit.retrievers.vectors import ShardCache

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    encoder = SentenceEncoder(batch_size=4, processes=2)
    encode = encoder.encode_passages

    def announced(texts, progress=None):
        print(*(p.pid for p in encoder._pool["processes"]), flush=True)
        return encode(texts, progress)

    encoder.encode_passages = announced
    texts = [f"text number {i} " + "tea and bread " * (i % 23) for i in range(4000)]
    try:
        ShardCache(encoder, texts, 400, Path(sys.argv[1])).encode()
    except RetrievalError as error:
        print(error, flush=True)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] not in (
            "Z",
            "X",
        )
    except OSError:
        return False


def _wait_for(condition: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("victim", ["parent", "interrupted parent", "worker"])
def test_no_worker_outlives_the_run(victim: str, tmp_path: Path) -> None:
    script = tmp_path / "encode.py"
    script.write_text(KILLED, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        _end_one(process, victim, tmp_path / "cache")
    finally:
        process.kill()
        process.communicate()


def _end_one(process: subprocess.Popen[str], victim: str, cache: Path) -> None:
    assert process.stdout is not None
    workers: list[int] = []
    shards: list[Path] = []
    while not shards:  # the second shard is on its way
        workers = [int(pid) for pid in process.stdout.readline().split()]
        shards = sorted(cache.rglob("*.safetensors"))
    assert len(workers) == 2 and all(map(_alive, workers))
    if victim == "worker":
        os.kill(workers[0], signal.SIGKILL)
        rest = process.communicate(timeout=120)[0]
        message = rest.strip().splitlines()[-1]
        assert message.startswith("1 of 2 encoding processes ended (exit code [-9])")
        assert "fewer retriever.processes" in message and process.returncode == 0
    else:
        process.send_signal(signal.SIGKILL if victim == "parent" else signal.SIGINT)
        process.communicate(timeout=60)
    assert _wait_for(lambda: not any(map(_alive, workers)), 20)
    assert all(file.is_file() for file in shards)


def test_a_pool_is_only_for_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refragkit.retrievers.encoder_pool.worker_pool", lambda *a: pytest.fail("started"))
    assert SentenceEncoder(processes=2).encode_queries(["tea"]).shape == (1, 384)
