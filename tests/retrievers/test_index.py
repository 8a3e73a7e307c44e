"""The cached index folder: what is loaded, what is built again, and what a fault leaves behind."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
from pathlib import Path

import pytest

from refragkit.errors import RetrievalError
from refragkit.retrievers import index as index_module
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.index import MANIFEST, read_manifest, write_folder
from refragkit.types import Document


def folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir())


def opened(corpus: list[Document], cache: Path, **settings: float) -> BM25Retriever:
    return BM25Retriever(**settings).open_index(corpus, cache)  # type: ignore[arg-type]


def test_the_manifest_says_what_the_index_is(corpus: list[Document], tmp_path: Path) -> None:
    opened(corpus, tmp_path)
    (folder,) = folders(tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert manifest["retriever"] == "bm25" and manifest["count"] == len(corpus)
    assert len(manifest["corpus_hash"]) == 64 and manifest["settings"]["k1"] == 1.5


def test_the_second_opening_builds_nothing(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(corpus, tmp_path).search(["tea"], 3)

    def refuse(self: BM25Retriever, documents: list[Document]) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(BM25Retriever, "index", refuse)
    assert opened(corpus, tmp_path).search(["tea"], 3) == first


def test_another_corpus_or_setting_gets_an_index_of_its_own(corpus: list[Document], tmp_path: Path) -> None:
    opened(corpus, tmp_path)
    opened(corpus, tmp_path, b=0.5)
    changed = [*corpus[:-1], Document(corpus[-1].doc_id, "Sphagnum", "Now about tea.")]
    hits = opened(changed, tmp_path).search(["tea"], 2)[0]
    assert {h.doc_id for h in hits if h.score > 0} == {"tea", corpus[-1].doc_id}
    assert len(folders(tmp_path)) == 3


@pytest.mark.parametrize("fault", ["truncate", "alter", "remove", "manifest", "version"])
def test_a_damaged_index_is_reported_and_built_again(
    fault: str, corpus: list[Document], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = opened(corpus, tmp_path).search(["tea", "capital"], 5)
    (folder,) = folders(tmp_path)
    victim = folder / "bm25s" / "data.csc.index.npy"
    if fault == "truncate":
        victim.write_bytes(victim.read_bytes()[:-8])
    elif fault == "alter":
        raw = bytearray(victim.read_bytes())
        raw[-3] ^= 0x40
        victim.write_bytes(bytes(raw))
    elif fault == "remove":
        victim.unlink()
    elif fault == "manifest":
        (folder / MANIFEST).write_text("{", encoding="utf-8")
    else:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        (folder / MANIFEST).write_text(
            text.replace('"format_version": 2', '"format_version": 99'), encoding="utf-8"
        )
    with pytest.raises(RetrievalError, match="delete the folder to have it built again"):
        BM25Retriever().load(folder)
    with caplog.at_level(logging.WARNING):
        assert opened(corpus, tmp_path).search(["tea", "capital"], 5) == good
    assert "building it again" in caplog.text
    read_manifest(folder)


def test_a_killed_build_leaves_nothing_that_is_taken_for_an_index(
    corpus: list[Document], tmp_path: Path
) -> None:
    good = opened(corpus, tmp_path)
    (folder,) = folders(tmp_path)
    leftover = folder.with_name(f"{folder.name}.tmp-deadbeef")
    folder.rename(leftover)
    (leftover / MANIFEST).unlink()
    assert opened(corpus, tmp_path).search(["tea"], 2) == good.search(["tea"], 2)
    assert folders(tmp_path) == [folder]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("63735 requested and 19424 written")]
)
def test_a_full_disk_is_one_message_and_leaves_nothing(error: OSError, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_bytes(b"x" * 100)
        raise error

    with pytest.raises(RetrievalError, match=r"the disk is full. Nothing was left behind.* paths\.outputs"):
        write_folder(tmp_path / "index", {}, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_can_not_be_written_is_one_message(corpus: list[Document], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(RetrievalError, match=r"can't write the index .*cache.*paths\.outputs"):
        opened(corpus, tmp_path / "cache")


def test_an_index_for_other_settings_is_refused_by_load(corpus: list[Document], tmp_path: Path) -> None:
    retriever = BM25Retriever(k1=1.2)
    retriever.index(corpus)
    retriever.save(tmp_path / "i")
    with pytest.raises(RetrievalError, match=r"built with k1=1.2, this run asks for 1.5"):
        BM25Retriever().load(tmp_path / "i")
    with pytest.raises(RetrievalError, match=r"is not an index: it has no manifest.json"):
        BM25Retriever().load(tmp_path)


def _open_and_report(corpus: list[Document], cache: Path, barrier: object, queue: object) -> None:
    built = []
    build = BM25Retriever.index
    BM25Retriever.index = lambda self, d: (built.append(1), build(self, d))[1]  # type: ignore[method-assign,assignment]
    barrier.wait()  # type: ignore[attr-defined]
    hits = opened(corpus, cache).search(["tea"], 2)
    queue.put((len(built), hits[0][0].doc_id))  # type: ignore[attr-defined]


def test_two_processes_build_one_index_once(corpus: list[Document], tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    arguments = (corpus, tmp_path, barrier, queue)
    processes = [context.Process(target=_open_and_report, args=arguments) for _ in range(2)]
    for p in processes:
        p.start()
    results = [queue.get(timeout=60) for _ in processes]
    for p in processes:
        p.join()
    assert sorted(results) == [(0, "tea"), (1, "tea")]


def test_checksums_above_the_limit_are_skipped(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(corpus, tmp_path)
    (folder,) = folders(tmp_path)
    monkeypatch.setattr(index_module, "CHECKSUM_LIMIT_BYTES", 0)
    victim = folder / "vocabulary.json"
    victim.write_bytes(victim.read_bytes()[:-1] + b"]")
    read_manifest(folder)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(RetrievalError, match=r"has .* bytes, expected"):
        read_manifest(folder)
