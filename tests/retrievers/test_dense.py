"""Dense and hybrid retrieval with the real all-MiniLM-L6-v2."""

from __future__ import annotations

import contextlib
import logging
import socket
import sqlite3
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from refragkit.errors import ConfigError, RetrievalError
from refragkit.retrievers import dense as dense_module
from refragkit.retrievers.base import passage_text
from refragkit.retrievers.dense import DenseRetriever, dense
from refragkit.retrievers.encoder import SentenceEncoder, resolve_encoder
from refragkit.retrievers.hybrid import hybrid
from refragkit.retrievers.vectors import ShardCache, open_matrix, write_matrix
from refragkit.types import Document

QUERIES = ["Who made the film Silent Harbour?", "fermented bread", "board games"]


def test_hits_are_those_of_exact_cosines(corpus: list[Document], cache: Path) -> None:
    retriever = dense(cache_dir=cache).open_index(corpus).retriever
    assert isinstance(retriever, DenseRetriever)
    passages = retriever.encoder.encode_passages([passage_text(d) for d in corpus])
    cosines = retriever.encoder.encode_queries(QUERIES) @ passages.T
    for hits, row in zip(retriever.search(QUERIES, 12), cosines, strict=True):
        assert [h.score for h in hits] == pytest.approx(sorted(row, reverse=True), abs=2e-6)
        assert hits[0].doc_id == corpus[int(row.argmax())].doc_id
    assert [hits[0].doc_id for hits in retriever.search(QUERIES, 1)] == ["film_a", "bread", "chess"]


def test_exact_search_in_blocks_is_faiss_knn(monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    rng = np.random.default_rng(0)
    queries, matrix = (rng.normal(size=(n, 16)).astype(np.float32) for n in (23, 301))
    monkeypatch.setattr(dense_module, "QUERY_BLOCK", 5)
    monkeypatch.setattr(dense_module, "ROW_BLOCK", 64)
    for k in (1, 7, 100, 301):
        rows, scores = dense_module._flat_search(queries, matrix, k)
        expected_scores, expected = faiss.knn(queries, matrix, k, metric=faiss.METRIC_INNER_PRODUCT)
        assert np.array_equal(np.sort(rows), np.sort(expected))
        assert np.allclose(np.sort(scores), np.sort(expected_scores), atol=1e-5)


def test_exact_search_of_wide_rows_is_faiss_knn() -> None:
    import faiss

    rng = np.random.default_rng(0)
    # Whole numbers: many products are equal.
    queries, matrix = (rng.integers(-2, 3, size=(n, 16)).astype(np.float32) for n in (9, 9001))
    matrix[-1] = 10 * queries[0]  # behind the last whole group
    for k in (1, 7, 100, dense_module.GROUPED):
        assert len(matrix) >= dense_module.GROUPED * k
        _, scores = dense_module._flat_search(queries, matrix, k)
        expected, _ = faiss.knn(queries, matrix, k, metric=faiss.METRIC_INNER_PRODUCT)
        assert np.array_equal(np.sort(scores), np.sort(expected))


@pytest.mark.parametrize("factory", ["HNSW8", "IVF2,Flat", "SQ8"])
def test_approximate_indexes_give_exact_scores_and_never_minus_one(
    factory: str, corpus: list[Document], cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flat = dense(cache_dir=cache).open_index(corpus)
    nprobe = 1 if factory.startswith("IVF") else None
    ef_search = 64 if factory.startswith("HNSW") else None
    retriever = dense(factory=factory, nprobe=nprobe, ef_search=ef_search, cache_dir=cache).open_index(corpus)
    exact = [{h.doc_id: h.score for h in hits} for hits in flat.search(QUERIES, 12)]
    for hits, scores in zip(retriever.search(QUERIES, 12), exact, strict=True):
        assert 0 < len(hits) <= 12
        assert {h.doc_id: h.score for h in hits} == pytest.approx(
            {h.doc_id: scores[h.doc_id] for h in hits}, abs=2e-6
        )


def test_impossible_faiss_settings_are_one_message(corpus: list[Document], cache: Path) -> None:
    with pytest.raises(RetrievalError, match=r"factory='IVF4,PQ16' failed on 12 vectors.*use Flat or HNSW32"):
        dense(factory="IVF4,PQ16", cache_dir=cache).open_index(corpus)
    with pytest.raises(RetrievalError, match=r"factory='Nonsense' failed"):
        dense(factory="Nonsense", cache_dir=cache).open_index(corpus)


def test_vectors_are_encoded_once_per_shard_and_encoder(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = SentenceEncoder.encode
    monkeypatch.setattr(
        SentenceEncoder, "encode", lambda s, t, p=None: (calls.append(len(t)), encode(s, t, p))[1]
    )
    texts = [passage_text(d) for d in corpus]
    encoder = SentenceEncoder()
    first = np.concatenate(ShardCache(encoder, texts, 5, tmp_path).encode())
    assert calls == [5, 5, 2]
    again = np.concatenate(ShardCache(encoder, texts, 5, tmp_path).encode())
    assert calls == [5, 5, 2] and np.array_equal(first, again)
    # A grown corpus encodes its new shard, a damaged shard is encoded again, nothing else.
    victim = sorted((tmp_path / "vectors" / encoder.fingerprint).iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-4])
    grown = np.concatenate(ShardCache(encoder, [*texts[:10], "new", *texts[10:]], 5, tmp_path).encode())
    assert len(grown) == 13
    assert len(calls) in (4, 5)


def test_parts_of_a_corpus_are_encoded_apart_and_merged(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> DenseRetriever:
        return DenseRetriever(SentenceEncoder(cache_dir=tmp_path), shard_size=5, cache_dir=tmp_path)

    whole = dense(shard_size=5).open_index(corpus).search(QUERIES, 5)
    for part in (1, 0):
        make().encode_part(corpus, part, 2)
    calls: list[int] = []
    encode = SentenceEncoder.encode
    monkeypatch.setattr(
        SentenceEncoder, "encode", lambda s, t, p=None: (calls.append(len(t)), encode(s, t, p))[1]
    )
    merged = make().open_index(corpus).search(QUERIES, 5)
    assert merged == whole
    assert calls == [len(QUERIES)]  # the queries only
    with pytest.raises(ConfigError, match=r"index.shard=2/2: expected a number from 0 to 1"):
        make().encode_part(corpus, 2, 2)
    with pytest.raises(ConfigError, match=r"needs a cache folder"):
        DenseRetriever(SentenceEncoder()).encode_part(corpus, 0, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"factory": "HNSW0"},
            r"retriever\.factory='HNSW0': expected a number from 4 to 512 after HNSW, got 0",
        ),
        ({"factory": "IVF16_HNSW513,Flat"}, r"from 4 to 512 after HNSW, got 513"),
        ({"factory": "IVF999999999,Flat"}, r"from 1 to 16777216 after IVF, got 999999999"),
        ({"factory": "PQ8x0"}, r"retriever\.factory='PQ8x0': expected numbers of at least 1, got 0"),
        ({"train_sample": 0}, r"retriever\.train_sample must be at least 1, got 0"),
        ({"factory": "HNSW32", "nprobe": 8}, r"nprobe=8 is for IVF .*factory='HNSW32' is none"),
        ({"nprobe": 8}, r"nprobe=8 is for IVF .*factory='Flat' is none"),
        ({"factory": "IVF4,Flat", "ef_search": 8}, r"ef_search=8 is for HNSW .*'IVF4,Flat' is none"),
    ],
)
def test_settings_of_the_index_are_checked_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DenseRetriever(SentenceEncoder(), **settings)


def test_good_settings_of_the_index_are_taken() -> None:
    for settings in ({"factory": "IVF4_HNSW32,PQ10x4fs", "nprobe": 8, "ef_search": 9}, {"factory": "HNSW"}):
        DenseRetriever(SentenceEncoder(), **settings)


def test_what_faiss_can_not_build_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    retriever = DenseRetriever(SentenceEncoder(), "IVF64,Flat")
    retriever._blocks = [np.eye(8, dtype=np.float32)]
    with pytest.raises(RetrievalError, match=r"asks for 64 cells, but there are 8 vectors"):
        retriever._build_faiss()

    def exhausted(*arguments: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(faiss, "index_factory", exhausted)
    retriever.factory = "HNSW32"
    with pytest.raises(RetrievalError, match=r"factory='HNSW32': memory ran out on 8 vectors of dimension 8"):
        retriever._build_faiss()


@pytest.mark.parametrize("fault", ["one bit", "no checksum"])
def test_a_shard_that_fails_its_checksum_is_encoded_again(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = SentenceEncoder(dtype="float32", cache_dir=tmp_path)
    calls: list[int] = []

    def encode(texts: Sequence[str], progress: object = None) -> NDArray[np.float32]:
        calls.append(len(texts))
        return np.array([[len(t), 1.0] for t in texts], dtype=np.float32)

    monkeypatch.setattr(encoder, "encode", encode)
    shards = ShardCache(encoder, ["a", "bb", "ccc", "dddd"], 2, tmp_path)
    good = np.concatenate(shards.encode())
    assert calls == [2, 2] and shards.missing() == []
    victim = shards.file(1)
    assert victim is not None
    if fault == "one bit":
        raw = bytearray(victim.read_bytes())
        raw[-3] ^= 1
        victim.write_bytes(raw)
    else:
        write_matrix(victim, [good[2:]])
    with caplog.at_level(logging.WARNING):
        blocks = shards.encode()
    assert np.array_equal(np.concatenate(blocks), good)
    assert (blocks.encoded, blocks.cached, calls) == (2, 2, [2, 2, 2])
    assert str(victim) in caplog.text and "encoding that shard again" in caplog.text


def test_queries_come_back_bit_by_bit_without_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SentenceEncoder(cache_dir=tmp_path).encode_queries(["one", "a longer second query", "one"])
    assert np.array_equal(first[0], first[2])
    monkeypatch.setattr(SentenceEncoder, "_load", lambda self: pytest.fail("the model was loaded"))
    again = SentenceEncoder(cache_dir=tmp_path).encode_queries(["a longer second query", "one"])
    assert np.array_equal(again, first[1::-1])


def test_a_broken_query_cache_is_reported_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = SentenceEncoder(cache_dir=tmp_path)
    first = encoder.encode_queries(["one"])
    (file,) = (tmp_path / "queries").iterdir()
    file.write_bytes(b"not a database at all" * 100)
    with caplog.at_level(logging.WARNING):
        again = SentenceEncoder(cache_dir=tmp_path).encode_queries(["one"])
    assert np.allclose(first, again, atol=1e-6) and "can't be read" in caplog.text


@pytest.mark.parametrize("fault", ["length", "bytes", "type", "dimension"])
def test_an_altered_row_of_the_query_cache_is_encoded_again(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def encode(self: SentenceEncoder, texts: Sequence[str]) -> NDArray[np.float32]:
        calls.append(len(texts))
        return np.array([[len(t), 1.0] for t in texts], dtype=np.float32)

    calls: list[int] = []
    monkeypatch.setattr(SentenceEncoder, "encode", encode)

    def vectors() -> NDArray[np.float32]:
        return SentenceEncoder(dtype="float32", cache_dir=tmp_path).encode_queries(["one", "three"])

    good = vectors()
    (file,) = (tmp_path / "queries").iterdir()
    longer = np.ones(3, dtype="<f4").tobytes()
    new: dict[str, tuple[object, int | None]] = {
        "length": (b"abc", None),
        "bytes": (np.array([4, 1], dtype="<f4").tobytes(), None),
        "type": ("text", None),
        "dimension": (longer, zlib.crc32(longer, zlib.crc32(b"one"))),
    }
    vector, crc = new[fault]
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        change = "UPDATE checked_vectors SET vector = ?, crc32 = coalesce(?, crc32) WHERE text = 'one'"
        assert db.execute(change, (vector, crc)).rowcount == 1
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(vectors(), good)
    assert calls == [2, 2 if fault == "dimension" else 1] and "encoding again" in caplog.text
    assert np.array_equal(vectors(), good) and len(calls) == 2  # the row was replaced


def test_the_fingerprint_follows_every_setting_that_changes_vectors() -> None:
    base = SentenceEncoder().fingerprint
    assert SentenceEncoder(batch_size=1).fingerprint == base
    others = [
        SentenceEncoder(query_prefix="query: "),
        SentenceEncoder(passage_prefix="passage: "),
        SentenceEncoder(normalize=False),
        SentenceEncoder(max_tokens=16),
        SentenceEncoder(dtype="float16"),  # never what auto stands for
    ]
    assert len({base, *(e.fingerprint for e in others)}) == 6


def test_prefixes_and_lengths_reach_the_model() -> None:
    plain = SentenceEncoder().encode(["query: tea"])
    assert np.allclose(SentenceEncoder(query_prefix="query: ").encode_queries(["tea"]), plain, atol=1e-6)
    short = SentenceEncoder(max_tokens=8)
    long_text = "tea " * 100
    assert np.allclose(short.encode([long_text]), short.encode([long_text + "coffee"]), atol=1e-6)
    assert np.allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-6)


def test_bfloat16_vectors_are_close() -> None:
    texts = ["fermented bread", "board games"]
    a, b = SentenceEncoder(dtype="float32").encode(texts), SentenceEncoder(dtype="bfloat16").encode(texts)
    assert (a * b).sum(axis=1).min() > 0.995


def test_nothing_is_asked_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"network attempt: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert SentenceEncoder().encode(["tea"]).shape == (1, 384)
    with pytest.raises(RetrievalError, match="Three ways"):
        SentenceEncoder("intfloat/e5-base-v2").encode(["tea"])


def test_where_an_encoder_is_looked_for(tmp_path: Path) -> None:
    packaged = resolve_encoder(None)
    assert (packaged / "model.safetensors").is_file()
    assert resolve_encoder("all-MiniLM-L6-v2") == packaged
    assert resolve_encoder(str(packaged)) == packaged
    with pytest.raises(RetrievalError) as error:
        resolve_encoder("intfloat/e5-base-v2")
    message = str(error.value)
    assert (
        "local folder" in message
        and "hf download intfloat/e5-base-v2" in message
        and "refragkit[demo]" in message
    )
    with pytest.raises(RetrievalError, match=r"neither modules.json nor config.json"):
        resolve_encoder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"dtype='int8': expected one of auto, float32"):
        SentenceEncoder(dtype="int8")


def test_a_device_that_is_not_here_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"retriever\.device='banana': expected auto, cpu, cuda, cuda:N or mps"
    ):
        SentenceEncoder(device="banana")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"retriever\.device=cuda: torch sees 0 CUDA GPUs here"):
        SentenceEncoder(device="cuda").encode(["tea"])
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"retriever\.device=mps: there is no Apple GPU"):
        _ = SentenceEncoder(device="mps").fingerprint


def test_a_folder_that_is_no_model_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RetrievalError, match=r"^retriever\.encoder=.* can't be loaded .*model: [^\n]+$"):
        SentenceEncoder(str(tmp_path)).encode(["tea"])


def test_a_truncated_vector_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    blocks = [np.ones((3, 4), dtype=np.float32), np.zeros((2, 4), dtype=np.float32)]
    write_matrix(file, blocks)
    assert np.array_equal(open_matrix(file), np.concatenate(blocks))
    from safetensors.numpy import load_file

    assert np.array_equal(load_file(file)["vectors"], np.concatenate(blocks))
    raw = file.read_bytes()
    for length in (0, 4, 20, len(raw) - 1):
        file.write_bytes(raw[:length])
        with pytest.raises(RetrievalError):
            open_matrix(file)


@pytest.mark.parametrize("fusion", ["score", "rrf"])
def test_hybrid_at_its_ends_is_each_of_its_parts(fusion: str, corpus: list[Document], cache: Path) -> None:
    def ids(alpha: float) -> list[list[str]]:
        built = hybrid(fusion=fusion, alpha=alpha, cache_dir=cache).open_index(corpus)
        return [[h.doc_id for h in hits] for hits in built.search(QUERIES, 3)]

    dense_ids = [
        [h.doc_id for h in hits] for hits in dense(cache_dir=cache).open_index(corpus).search(QUERIES, 3)
    ]
    assert ids(1.0) == dense_ids
    assert [i[0] for i in ids(0.0)] == ["film_a", "bread", "chess"]
    with pytest.raises(ConfigError, match=r"0 <= alpha <= 1"):
        hybrid(alpha=1.5)


@pytest.mark.parametrize("pool", [2, 5, 200])
@pytest.mark.parametrize("fusion", ["score", "rrf"])
def test_hybrid_scores_of_given_documents_are_those_of_its_search(
    fusion: str, pool: int, corpus: list[Document], cache: Path
) -> None:
    retriever = hybrid(fusion=fusion, pool=pool, cache_dir=cache).open_index(corpus).retriever
    found = retriever.search(QUERIES, 2)
    assert all(len({h.doc_id for h in hits}) == 2 for hits in found)
    scores = retriever.score(QUERIES, [[h.doc_id for h in reversed(hits)] for hits in found])
    for hits, values in zip(found, scores, strict=True):
        assert values == pytest.approx([h.score for h in reversed(hits)], abs=2e-6)


def test_nothing_is_imported_before_it_is_needed() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from refragkit.retrievers.hybrid import hybrid; hybrid();"
        "print([m for m in ('torch', 'sentence_transformers', 'faiss', 'transformers', 'bm25s') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
