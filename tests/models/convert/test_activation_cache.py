"""The cache of a teacher's activations: its contents, its limits, and what a kill leaves behind."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.build import transformer
from refragkit.models.convert.activation_cache import cache_bytes, cache_key, cached_activations
from refragkit.models.convert.activations import mixer_activations
from refragkit.models.hybrid import HybridLM

VOCAB, T, LAYERS = 97, 24, [1, 2]
PLENTY = 2**30


def model(seed: int = 1) -> HybridLM:
    made = transformer(
        n_layers=3, vocab_size=VOCAB, d_model=48, n_heads=3, n_kv_heads=1, head_dim=16, d_ff=96, seed=seed
    )
    assert isinstance(made, HybridLM)
    return made.eval()


@pytest.fixture(scope="module")
def teacher() -> HybridLM:
    return model()


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(0, VOCAB, (40, T), generator=torch.Generator().manual_seed(0))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/shard-*.safetensors"))


def test_holds_what_the_mixers_read_and_put_out(teacher: HybridLM, windows: Tensor, tmp_path: Path) -> None:
    seen: list[None] = []
    with cached_activations(
        teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY, advance=lambda: seen.append(None)
    ) as cache:
        assert (cache.layers, cache.windows, cache.window_tokens) == ((1, 2), 40, T)
        assert len(seen) == 40 and len(shards(tmp_path)) == 3
        size = sum(file.stat().st_size for file in shards(tmp_path))
        assert (
            cache_bytes(teacher, LAYERS, windows.numel())
            <= size
            < 1.05 * cache_bytes(teacher, LAYERS, windows.numel())
        )
        rows = [39, 0, 16, 39]
        exact = mixer_activations(teacher, LAYERS, windows[rows])
        everything = mixer_activations(teacher, LAYERS, windows)
        for layer in LAYERS:
            for got, wanted in zip(cache.read(layer, rows), exact[layer], strict=True):
                assert got.dtype == torch.bfloat16
                torch.testing.assert_close(got.float(), wanted, rtol=0.01, atol=1e-4)
            variance = everything[layer][1].flatten(0, 1).double().var(0, correction=0).mean()
            assert cache.variance[layer] == pytest.approx(float(variance), rel=0.01)
    assert not shards(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_reads_from_the_file_and_not_from_memory(teacher: HybridLM, windows: Tensor, tmp_path: Path) -> None:
    with cached_activations(teacher, [1], windows, tmp_path, max_bytes=PLENTY) as cache:
        before = cache.read(1, [0])[0]
        raw = bytearray(shards(tmp_path)[0].read_bytes())
        at = raw.find(before.view(torch.uint8).numpy().tobytes())
        with shards(tmp_path)[0].open("r+b") as file:
            file.seek(at)
            file.write(b"\0\0")
        assert float(cache.read(1, [0])[0].flatten()[0]) == 0 != float(before.flatten()[0])


def test_a_killed_run_goes_on_where_it_was(teacher: HybridLM, windows: Tensor, tmp_path: Path) -> None:
    def killed_after(steps: int) -> None:
        count = 0

        def advance() -> None:
            nonlocal count
            count += 1
            if count > steps:
                raise KeyboardInterrupt

        with (
            pytest.raises(KeyboardInterrupt),
            cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY, advance=advance),
        ):
            raise AssertionError("it should not have got here")

    killed_after(20)
    (first,) = shards(tmp_path)
    stamp, content = first.stat().st_mtime_ns, first.read_bytes()
    # What a kill in the middle of writing leaves, and a file that was cut off
    torn = first.with_name(f".{first.name}.999.tmp")
    torn.write_bytes(content[:100])
    (first.parent / "shard-00001.safetensors").write_bytes(content[: len(content) // 2])
    with cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY, keep=True) as cache:
        resumed = [cache.read(layer, range(40)) for layer in LAYERS]
    assert first.stat().st_mtime_ns == stamp and not torn.exists()
    with cached_activations(teacher, LAYERS, windows, tmp_path / "new", max_bytes=PLENTY) as cache:
        for (x, y), layer in zip(resumed, LAYERS, strict=True):
            whole = cache.read(layer, range(40))
            assert torch.equal(x, whole[0]) and torch.equal(y, whole[1])


def test_shards_that_were_damaged_or_swapped_are_written_again(
    teacher: HybridLM, windows: Tensor, tmp_path: Path
) -> None:
    with cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY, keep=True) as cache:
        expected = [cache.read(layer, range(40)) for layer in LAYERS]
    first, second, _ = shards(tmp_path)
    content = first.read_bytes()
    for damaged in (content[:-200] + bytes(100) + content[-100:], second.read_bytes()):
        first.write_bytes(damaged)
        with cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY, keep=True) as cache:
            found = [cache.read(layer, range(40)) for layer in LAYERS]
        assert first.read_bytes() == content
        assert all(
            torch.equal(a, b)
            for pair in zip(expected, found, strict=True)
            for a, b in zip(*pair, strict=True)
        )


def test_an_error_inside_keeps_it_and_keep_keeps_it(
    teacher: HybridLM, windows: Tensor, tmp_path: Path
) -> None:
    with (
        pytest.raises(RuntimeError, match="inside"),
        cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY),
    ):
        raise RuntimeError("inside")
    stamps = [file.stat().st_mtime_ns for file in shards(tmp_path)]
    assert len(stamps) == 3
    with cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY, keep=True):
        pass
    assert [file.stat().st_mtime_ns for file in shards(tmp_path)] == stamps


def test_another_teacher_other_blocks_or_text_have_a_cache_of_their_own(
    teacher: HybridLM, windows: Tensor
) -> None:
    other_text = windows.clone()
    other_text[3, 5] = (other_text[3, 5] + 1) % VOCAB
    keys = [
        cache_key(teacher, LAYERS, windows),
        cache_key(model(seed=2), LAYERS, windows),
        cache_key(teacher, [1], windows),
        cache_key(teacher, LAYERS, other_text),
        cache_key(teacher, LAYERS, windows.view(20, -1)),
    ]
    assert len(set(keys)) == 5
    assert cache_key(model(), LAYERS, windows.clone()) == keys[0]


def test_too_little_room_is_one_error_that_says_how_much_fits(
    teacher: HybridLM, windows: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = cache_bytes(teacher, LAYERS, 10 * T) + 5
    message = rf"{40 * T:,} tokens in 2 blocks take [\d,]+ bytes.*limit, {limit:,}: {10 * T:,} tokens fit"
    with (
        pytest.raises(ConfigError, match=message),
        cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=limit),
    ):
        pass
    with cached_activations(teacher, LAYERS, windows[:10], tmp_path, max_bytes=limit) as cache:
        assert cache.windows == 10
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 5, limit))
    with (
        pytest.raises(ConfigError, match=rf"free at {re.escape(str(tmp_path))}.*: {10 * T:,} tokens fit"),
        cached_activations(teacher, LAYERS, windows, tmp_path, max_bytes=PLENTY),
    ):
        pass
