"""States on disk: what a new process finds, damage, bounds, and processes side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit.errors import ConfigError
from refragkit.generation.state_cache import StateCache, open_state_cache
from refragkit.generation.state_files import StateFiles
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid
from refragkit.models.state import ModelState
from refragkit.retrievers.state_cache import StateCacheSettings
from tests.generation.kept_states import DOCUMENTS, ENDS, PROMPTS, ROOM, VOCAB, begin, check


def _model(seed: int = 1) -> SequenceModel:
    model: SequenceModel = hybrid(
        size="tiny", vocab_size=VOCAB, block_pattern="TMRT", wkv_head_dim=32, tie_embeddings=False, seed=seed
    )
    return model.eval()


@pytest.fixture(scope="module")
def model() -> SequenceModel:
    return _model()


def _cache(folder: Path, max_bytes: int = ROOM) -> StateCache:
    """What a new process would have: nothing in memory."""
    return StateCache(ROOM, "tokenizer", StateFiles(folder, max_bytes).open())


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_new_process_reads_nothing_again(model: SequenceModel, tmp_path: Path) -> None:
    first = begin(_cache(tmp_path / "a" / "b"), model)
    assert len(_files(tmp_path / "a" / "b")) == 3
    cache = _cache(tmp_path / "a" / "b")
    second = begin(cache, model)
    assert cache.counts.hits == 4 and cache.counts.tokens_not_read == 40 + 57 + 40 + 33
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))
    assert torch.equal(first.lengths, second.lengths)
    assert [type(block) for block in first] == [type(block) for block in second]
    check(model, second)
    # What was found is in memory now
    for file in _files(tmp_path / "a" / "b"):
        file.unlink()
    begin(cache, model)
    assert cache.counts.hits == 8
    # Another model finds nothing of this one's
    other = _cache(tmp_path / "a" / "b")
    begin(other, _model(seed=2))
    assert other.counts.hits == 1  # beside each other


def test_precisions_keep_their_types(tmp_path: Path) -> None:
    model = _model().to(torch.bfloat16)
    first = begin(_cache(tmp_path), model)
    second = begin(_cache(tmp_path), model)
    assert {tensor.dtype for tensor in second.tensors()} == {torch.bfloat16, torch.float32, torch.int64}
    for a, b in zip(first.tensors(), second.tensors(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _one_bit(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def _other_shape(data: bytes) -> bytes:
    return data.replace(b'"shape":[1,4,32,32]', b'"shape":[4,1,32,32]')


@pytest.mark.parametrize(
    "damage", [_cut, _one_bit, _other_shape, lambda data: b"", lambda data: b"no tensors"]
)
def test_a_damaged_file_is_read_again_and_replaced(
    damage: Any, model: SequenceModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(_cache(tmp_path), model, PROMPTS[:1], ENDS[:1])
    (file,) = _files(tmp_path)
    good = file.read_bytes()
    bad = damage(good)
    assert bad != good
    file.write_bytes(bad)
    cache = _cache(tmp_path)
    state = begin(cache, model, PROMPTS[:1], ENDS[:1])
    assert cache.counts.hits == 0
    (warning,) = [r.message for r in caplog.records if "damaged" in r.message]
    assert str(file) in warning
    check(model, state, PROMPTS[:1])
    again = _cache(tmp_path)
    begin(again, model, PROMPTS[:1], ENDS[:1])
    assert again.counts.hits == 1


def test_a_file_under_another_name_is_refused(model: SequenceModel, tmp_path: Path) -> None:
    begin(_cache(tmp_path), model)
    by_tokens = {int(file.name.split("-")[0]): file for file in _files(tmp_path)}
    content = by_tokens[57].read_bytes()
    by_tokens[40].write_bytes(content)
    cache = _cache(tmp_path)
    check(model, begin(cache, model))
    assert by_tokens[40].read_bytes() != content


def test_bounded_in_bytes(model: SequenceModel, tmp_path: Path) -> None:
    begin(_cache(tmp_path), model)
    sizes = {int(file.name.split("-")[0]): file.stat().st_size for file in _files(tmp_path)}
    assert sorted(sizes) == [33, 40, 57]
    for file in _files(tmp_path):
        file.unlink()
    limit = sizes[40] + sizes[57]
    for n, i in enumerate((0, 1, 0, 3)):  # documents of 40, 57, 40 and 33 tokens
        begin(_cache(tmp_path, limit), model, [PROMPTS[i]], [ENDS[i]])
        file = next(file for file in _files(tmp_path) if file.name.startswith(f"{ENDS[i][0]}-"))
        os.utime(file, (n, n))  # file systems don't tell the time that well
        assert sum(file.stat().st_size for file in _files(tmp_path)) <= limit
    assert [int(file.name.split("-")[0]) for file in _files(tmp_path)] == [33, 40]
    # A state that fits into nothing drives out nothing
    begin(_cache(tmp_path, sizes[33]), model, [PROMPTS[1]], [ENDS[1]])
    assert [int(file.name.split("-")[0]) for file in _files(tmp_path)] == [33, 40]


def test_what_a_killed_process_left_is_removed(model: SequenceModel, tmp_path: Path) -> None:
    left = tmp_path / f".40-{'0' * 64}.safetensors.123.tmp"
    left.write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    begin(_cache(tmp_path), model)
    assert not left.exists() and (tmp_path / "notes.txt").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"retriever\.state_cache\.path: .*file"):
        StateFiles(tmp_path / "file", 1).open()


def test_no_room_on_the_disk_is_a_warning(
    model: SequenceModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = _cache(tmp_path)
    (tmp_path / ".lock").mkdir()  # nobody can lock it
    check(model, begin(cache, model))
    assert [r.message for r in caplog.records if "no more states are kept" in r.message] != []
    assert len([r for r in caplog.records if "no more states" in r.message]) == 1
    assert _files(tmp_path) == []


def test_a_folder_that_vanishes_is_a_miss(model: SequenceModel, tmp_path: Path) -> None:
    cache = _cache(tmp_path / "states")
    begin(cache, model)
    names = cache.files.names() if cache.files else {}
    key, tokens = next(iter(names.items()))
    for file in (tmp_path / "states").iterdir():
        file.unlink()
    assert cache.files is not None and cache.files.read(key, tokens, torch.device("cpu")) is None
    (tmp_path / "states").rmdir()
    assert cache.files.names() == {}


_PROCESS = """
import sys
from pathlib import Path
from tests.generation.kept_states import begin, check, ids
from tests.generation.test_state_files import _cache, _model
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
model = _model()
for n in range(24):
    prompts = [ids(100 + (n + i) % 8, 40) + [3] for i in range(2)]
    state = begin(_cache(folder, limit), model, prompts, [[40]] * 2)
    check(model, state, prompts)
    found = sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.exists())
    assert found <= limit, (found, limit)
"""


def test_processes_share_a_folder(model: SequenceModel, tmp_path: Path) -> None:
    """Two write and drive each other's states out at the same time; both stay right, and the bound holds."""
    begin(_cache(tmp_path), model, PROMPTS[:1], ENDS[:1])
    (file,) = _files(tmp_path)
    limit = 4 * file.stat().st_size
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path), str(limit)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in running:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "damaged" not in err
    assert sum(file.stat().st_size for file in _files(tmp_path)) <= limit
    assert not list(tmp_path.glob(".*.tmp"))


def test_opened_as_configured(tmp_path: Path) -> None:
    from refragkit.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(["a b c"] * 3, 300)
    cache = open_state_cache(StateCacheSettings(1000, str(tmp_path / "states")), tokenizer)
    assert cache.files is not None and (tmp_path / "states").is_dir()
    assert (cache.max_bytes, cache.files.max_bytes) == (1000, 1000)
    assert cache.tokenizer_fingerprint == tokenizer.fingerprint
    cache = open_state_cache(StateCacheSettings(1000, str(tmp_path / "states"), 5000), tokenizer)
    assert cache.files is not None and cache.files.max_bytes == 5000
    assert open_state_cache(StateCacheSettings(1000), tokenizer).files is None


def test_only_known_states_are_read(model: SequenceModel, tmp_path: Path) -> None:
    files = StateFiles(tmp_path, ROOM).open()
    state = model(torch.tensor([DOCUMENTS[0]]), return_state=True).state
    files.write("0" * 64, 40, state)
    read = files.read("0" * 64, 40, torch.device("cpu"))
    assert isinstance(read, ModelState) and read.lengths.tolist() == [40]
    (file,) = _files(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"Mamba2State", b"Mamba3State"))
    assert files.read("0" * 64, 40, torch.device("cpu")) is None
