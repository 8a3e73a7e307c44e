from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from refragkit.data.corpus import load_corpus
from refragkit.errors import ConfigError, RetrievalError
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.dense import dense
from refragkit.retrievers.hybrid import hybrid
from refragkit.retrievers.milvus import INSERT_ROWS, MilvusRetriever, filterable, milvus
from refragkit.retrievers.milvus_collection import WORKING_COPIES, Collection, WorkingCopy
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.types import Document, Question

from .conftest import build, require_milvus

pytestmark = pytest.mark.skipif(require_milvus()[0], reason=require_milvus()[1])

SAMPLE = Path(__file__).parents[2] / "src" / "refragkit" / "data" / "samples" / "multihop_qa"
QUERIES = ["director of Silent Harbour", "capital city", "tea", "a film directed by someone from Kenya"]


@pytest.fixture(scope="module")
def passages() -> list[Document]:
    """Some of the sample, with metadata to filter by."""
    found = load_corpus(SAMPLE / "corpus.jsonl")[:50]
    return [
        Document(d.doc_id, d.title, d.text, {"half": "a" if i % 2 else "b", "number": i})
        for i, d in enumerate(found)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Milvus Lite as a server of its own: the protocol of a cluster, not its engine."""
    from milvus_lite.adapter.grpc.server import start_server_in_thread

    running, database, port = start_server_in_thread(str(tmp_path_factory.mktemp("server")))
    yield f"http://127.0.0.1:{port}"
    running.stop(grace=None).wait()
    database.close()


def base(retriever: MultiHopRetriever) -> MilvusRetriever:
    assert isinstance(retriever.retriever, MilvusRetriever)
    return retriever.retriever


def same_ranking(ours: MultiHopRetriever, other: MultiHopRetriever, queries: list[str], k: int) -> None:
    """Equal scores at every rank, and equal documents wherever the scores leave no doubt."""
    for mine, theirs in zip(ours.search(queries, k), other.search(queries, k), strict=True):
        # bm25 fills its list with documents that share no word with the query.
        assert all(h.score == 0 for h in theirs[len(mine) :])
        theirs = theirs[: len(mine)]
        assert [h.score for h in mine] == pytest.approx([h.score for h in theirs], abs=1e-4)
        cut = theirs[-1].score + 2e-4 if theirs else 0.0
        assert {h.doc_id for h in mine if h.score > cut} == {h.doc_id for h in theirs if h.score > cut}


# --- what is found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "other"), [("dense", dense), ("bm25", bm25), ("hybrid", hybrid)], ids=["dense", "bm25", "hybrid"]
)
def test_rankings_and_scores_are_those_of_the_exact_retrievers(
    mode: str, other: type, passages: list[Document], cache: Path
) -> None:
    ours = milvus(mode=mode, cache_dir=cache).open_index(passages)
    exact = other(cache_dir=cache).open_index(passages)
    queries = [d.title for d in passages[::4]] + [f"Who wrote about {d.title}?" for d in passages[5::20]]
    for k in (1, 10, 40):
        same_ranking(ours, exact, queries, k)
    ids = [[passages[j].doc_id for j in (i, i + 1, 3)] for i in range(len(queries))]
    for mine, theirs in zip(base(ours).score(queries, ids), exact.retriever.score(queries, ids), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_rrf_is_hybrids(passages: list[Document], cache: Path) -> None:
    queries = [d.title for d in passages[::7]]
    ours = milvus(fusion="rrf", cache_dir=cache).open_index(passages)
    same_ranking(ours, hybrid(fusion="rrf", cache_dir=cache).open_index(passages), queries, 10)
    found = ours.search(queries, 10)
    scores = base(ours).score(queries, [[h.doc_id for h in hits] for hits in found])
    for hits, values in zip(found, scores, strict=True):
        assert values == pytest.approx([h.score for h in hits], abs=1e-6)


def test_words_are_stemmed_and_a_query_without_a_known_word_finds_nothing(
    corpus: list[Document], tmp_path: Path
) -> None:
    """No encoder: mode bm25 must not ask for one."""
    retriever = milvus(mode="bm25", encoder="nowhere/to-be-found", cache_dir=tmp_path).open_index(corpus)
    found = retriever.search(["leavening", "to be of the", "zzz", "mosses building"], 5)
    assert [[h.doc_id for h in hits] for hits in found] == [["bread"], [], [], ["moss"]]
    assert base(retriever).score(["zzz", "tea"], [["tea", "moss"], ["moss", "tea"]])[0] == [0.0, 0.0]


def test_ties_are_by_id_however_many_there_are(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(60)
    documents = [Document(f"d{i:02}", "", "a green apple") for i in order] + [Document("x", "", "a boat")]
    for index in (milvus(mode="bm25", cache_dir=tmp_path), build("milvus", tmp_path, ["retriever.pool=1"])):
        hits = index.open_index(documents).search(["apple"], 3)[0]
        assert [h.doc_id for h in hits] == ["d00", "d01", "d02"]


def test_one_call_for_a_batch(corpus: list[Document], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = milvus(cache_dir=cache).open_index(corpus)
    client, calls = base(retriever).collection._client, []
    for name in ("search", "get", "query"):
        method = getattr(client, name)
        monkeypatch.setattr(
            client, name, lambda *a, _m=method, _n=name, **k: (calls.append(_n), _m(*a, **k))[1]
        )
    retriever.search(QUERIES, 3)
    assert sorted(calls) == ["get", "get", "search", "search"]


# --- filters ----------------------------------------------------------------------------------------------


def test_a_filter_holds_in_every_mode_and_through_every_hop(
    passages: list[Document], corpus: list[Document], questions: list[Question], cache: Path
) -> None:
    queries = [d.title for d in passages[:20]]
    for mode in ("dense", "bm25", "hybrid"):
        retriever = milvus(mode=mode, filter='half == "a" and number < 40', cache_dir=cache)
        found = retriever.open_index(passages).search(queries, 60)
        numbers = [h.document.metadata["number"] for hits in found for h in hits]
        assert set(numbers) <= set(range(1, 40, 2))
        if mode != "bm25":
            assert all(len(hits) == 20 for hits in found)
    everything = milvus(cache_dir=cache).open_index(corpus).retrieve(questions)
    assert "dir_a" in {d.doc_id for hops in everything for h in hops for d in h.new_documents}
    # The film's passage links to its director's: a link must not bring back what the filter leaves out.
    allowed = milvus(filter='not (doc_id like "dir%") and title != "Sweden"', cache_dir=cache)
    found_ids = {
        d.doc_id
        for hops in allowed.open_index(corpus).retrieve(questions)
        for h in hops
        for d in h.new_documents
    }
    assert "film_a" in found_ids and not found_ids & {"dir_a", "dir_b", "sweden"}


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ('source = = "x"', r"retriever.filter='source = = \"x\"' failed: .*see 'Filtering'"),
        (
            'sauce == "x"',
            r"retriever.filter='sauce == \"x\"' matches none of the 12 documents: check the names",
        ),
    ],
)
def test_a_wrong_filter_is_one_message(
    expression: str, message: str, corpus: list[Document], cache: Path
) -> None:
    with pytest.raises(RetrievalError, match=message):
        milvus(filter=expression, cache_dir=cache).open_index(corpus)


def test_odd_metadata_survives_and_can_be_filtered_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = [
        Document(
            "one", "T", "green apple", {"_position": 7, "doc_id": "other", "$meta": 1, "tags": ["x", "y"]}
        ),
        Document("two", "", "red apple", {"year": 1961, "nested": {"deep": "ü"}, "odd key": None}),
        Document("long", "", "an apple", {"year": 1961, "blob": "é" * 40_000}),
        Document("the", "", "the of and", {"year": 1961}),
        Document("huge", "", "a pear", {"serial": 10**30}),
    ]
    with caplog.at_level(logging.WARNING):
        retriever = milvus(mode="bm25", cache_dir=tmp_path).open_index(documents)
    assert "metadata of 1 documents has more than 65536 bytes" in caplog.text
    hits = retriever.search(["apple"], 9)[0]
    assert {h.doc_id: dict(h.document.metadata) for h in hits} == {
        d.doc_id: dict(d.metadata) for d in documents[:3]
    }
    for expression, expected in [
        ('doc_id == "one"', ["one"]),
        ("year == 1961", ["two"]),
        ('array_contains(tags, "y")', ["one"]),
        ('nested["deep"] == "ü"', ["two"]),
        ("serial > 1", ["huge"]),
    ]:
        found = milvus(mode="bm25", filter=expression, cache_dir=tmp_path).open_index(documents)
        assert [h.doc_id for h in found.search(["apple pear"], 9)[0]] == expected
    assert filterable(Document("a\ud800", "", "")) == {"doc_id": "a?", "title": ""}


# --- the file ---------------------------------------------------------------------------------------------


def test_what_the_index_depends_on_names_it(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = milvus(mode="bm25", cache_dir=tmp_path).open_index(corpus)
    found = first.search(QUERIES, 5)
    fills: list[str] = []
    fill = MilvusRetriever._fill
    monkeypatch.setattr(MilvusRetriever, "_fill", lambda s, n, m, r: (fills.append(n), fill(s, n, m, r))[1])
    again = milvus(mode="bm25", pool=7, alpha=0.1, cache_dir=tmp_path).open_index(corpus)
    assert again.search(QUERIES, 5) == found and not fills
    changed = [*corpus[:-1], Document("moss", "Sphagnum", "Peat is cut and dried for fuel.")]
    assert [
        h.doc_id for h in milvus(mode="bm25", cache_dir=tmp_path).open_index(changed).search(["fuel"], 5)[0]
    ] == ["moss"]
    for settings in ({"b": 0.5}, {"stemmer": "none"}, {"collection": "mine"}):
        milvus(mode="bm25", cache_dir=tmp_path, **settings).open_index(corpus)  # type: ignore[arg-type]
    # The file's name depends on its content only; another name for the collection in it needs no other file.
    assert len(fills) == 3 and len(list(tmp_path.glob("milvus-*[!k]"))) == 5
    assert again.search(QUERIES, 5) == found


def test_parts_of_a_corpus_are_encoded_apart(passages: list[Document], tmp_path: Path) -> None:
    documents = passages[:6]
    for part in (0, 1):
        base(milvus(shard_size=3, cache_dir=tmp_path)).encode_part(documents, part, 2)
    whole = milvus(shard_size=3, cache_dir=tmp_path).open_index(documents)
    assert base(whole).counts == {"encoded": 0, "cached": 6}
    with pytest.raises(ConfigError, match=r"retriever=milvus has no vectors to encode"):
        base(milvus(mode="bm25", cache_dir=tmp_path)).encode_part(documents, 0, 2)


def test_rows_are_streamed(passages: list[Document], cache: Path) -> None:
    retriever = base(milvus(cache_dir=cache))
    retriever._set_documents(
        [Document(f"{i}-{d.doc_id}", d.title, d.text) for i in range(13) for d in passages]
    )
    retriever._share()
    batches = retriever._rows([np.ones((650, 4), dtype=np.float32)])
    first = next(batches)
    assert len(first) == INSERT_ROWS and first[5]["_position"] == 5
    assert [len(b) for b in batches] == [650 - INSERT_ROWS]


_BUILD = """
import os, signal, sys
from pathlib import Path
from refragkit.data.corpus import load_corpus
from refragkit.retrievers import milvus as module
from refragkit.retrievers.milvus_collection import Collection
if sys.argv[3] != "never":
    original = getattr(Collection, sys.argv[3])
    def dying(self, *a, **k):
        result = original(self, *a, **k)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(Collection, sys.argv[3], dying)
module.INSERT_ROWS = 20
uri = sys.argv[4] if len(sys.argv) > 4 else None
retriever = module.milvus(mode="bm25", cache_dir=Path(sys.argv[2]), uri=uri)
retriever.open_index(load_corpus(sys.argv[1])[:50])
print([h.doc_id for h in retriever.search(["football club"], 5)[0]])
"""


def run_build(cache: Path, die_after: str = "never", *uri: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BUILD, str(SAMPLE / "corpus.jsonl"), str(cache), die_after, *uri],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("die_after", ["_load", "copy_to"])
def test_a_build_that_was_killed_is_built_again_and_leaves_nothing(die_after: str, tmp_path: Path) -> None:
    assert run_build(tmp_path, die_after).returncode == -signal.SIGKILL
    assert not [p for p in tmp_path.glob("milvus-*") if (p / "manifest.json").is_file()]
    documents = load_corpus(SAMPLE / "corpus.jsonl")[:50]
    retriever = milvus(mode="bm25", cache_dir=tmp_path).open_index(documents)
    same_ranking(retriever, bm25().open_index(documents), ["football club"], 5)
    # One finished index and the working copy that is open now; nothing of the killed process.
    assert len([p for p in tmp_path.glob("milvus-*") if p.is_dir() and p.name != WORKING_COPIES]) == 1
    assert len([p for p in (tmp_path / WORKING_COPIES).iterdir() if p.is_dir()]) == 1


def test_processes_share_one_file(tmp_path: Path) -> None:
    documents = load_corpus(SAMPLE / "corpus.jsonl")[:50]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILD, str(SAMPLE / "corpus.jsonl"), str(tmp_path), "never"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    retriever = milvus(mode="bm25", cache_dir=tmp_path).open_index(documents)
    expected = str([h.doc_id for h in retriever.search(["football club"], 5)[0]])
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and out.strip() == expected
    # And while this one goes on using it:
    assert run_build(tmp_path).stdout.strip() == expected
    assert str([h.doc_id for h in retriever.search(["football club"], 5)[0]]) == expected
    assert len([p for p in tmp_path.glob("milvus-*") if p.is_dir() and p.name != WORKING_COPIES]) == 1


def test_the_finished_file_is_never_written_to(corpus: list[Document], tmp_path: Path) -> None:
    first = milvus(mode="bm25", cache_dir=tmp_path).open_index(corpus)
    folder = base(first).index_path
    assert folder is not None
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
    # Even if something writes into the collection: it writes into its own copy.
    client = base(first).collection._client
    client.delete(base(first).collection.name, ids=[0, 1])
    client.flush(base(first).collection.name)
    base(first).collection.disconnect()
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()} == before
    hits = milvus(mode="bm25", cache_dir=tmp_path).open_index(corpus).search(["Silent Harbour"], 1)[0]
    assert hits[0].doc_id == "film_a"


def test_a_damaged_file_is_built_again(
    corpus: list[Document], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = milvus(mode="bm25", cache_dir=tmp_path).open_index(corpus)
    folder = base(first).index_path
    assert folder is not None
    base(first).collection.disconnect()
    victim = next(folder.rglob("*.parquet"))
    victim.write_bytes(victim.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        again = milvus(mode="bm25", cache_dir=tmp_path).open_index(corpus)
    assert "building it again" in caplog.text
    assert again.search(["tea"], 1)[0][0].doc_id == "tea"


def test_working_copies_go_with_their_owner(tmp_path: Path) -> None:
    copy = WorkingCopy(tmp_path)
    folder = copy.path.parent
    other = WorkingCopy(tmp_path)  # whoever opens one looks for abandoned ones
    assert folder.is_dir()
    del copy
    assert not folder.exists() and other.path.is_dir()
    other.close()
    assert list((tmp_path / WORKING_COPIES).iterdir()) == []


# --- a server ---------------------------------------------------------------------------------------------


def test_a_server_holds_the_same_collection(
    passages: list[Document],
    server: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "root:very-secret")
    queries = [d.title for d in passages[::6]]
    with caplog.at_level(logging.DEBUG):
        first = milvus(uri=server, token_env="SOME_TOKEN", cache_dir=cache).open_index(passages)
    assert "very-secret" not in caplog.text
    assert "very-secret" not in json.dumps(base(first).manifest())
    same_ranking(first, milvus(cache_dir=cache).open_index(passages), queries, 10)
    # Another machine, whose cache has no passages, finds the collection there and encodes none (the queries are
    # taken along: encoded again in another batch they would differ in their last bits).
    shutil.copytree(cache / "queries", tmp_path / "queries")
    monkeypatch.setattr(MilvusRetriever, "_fill", lambda *a: pytest.fail("filled again"))
    again = milvus(uri=server, cache_dir=tmp_path).open_index(passages)
    assert again.search(queries, 10) == first.search(queries, 10)
    assert not (tmp_path / "vectors").exists()


def test_a_killed_build_on_a_server_leaves_nothing_for_long(server: str, tmp_path: Path) -> None:
    def names() -> set[str]:
        collection = Collection(server)
        collection.connect()
        return set(collection._client.list_collections())

    before = names()
    assert run_build(tmp_path, "_load", server).returncode == -signal.SIGKILL
    (unfinished,) = names() - before
    assert "_building_" in unfinished
    documents = load_corpus(SAMPLE / "corpus.jsonl")[:50]
    retriever = milvus(mode="bm25", uri=server, cache_dir=tmp_path).open_index(documents)
    assert names() - before == {base(retriever).collection.name}
    same_ranking(retriever, bm25().open_index(documents), ["football club"], 5)


def test_collections_that_hold_something_else_are_refused(
    corpus: list[Document], server: str, tmp_path: Path
) -> None:
    connection = Collection(server)
    connection.connect()
    client = connection._client
    client.create_collection("theirs", dimension=4)
    with pytest.raises(
        RetrievalError,
        match=r"collection theirs at http.*another schema \(fields id, vector\).*drop it, or set",
    ):
        milvus(mode="bm25", uri=server, collection="theirs", cache_dir=tmp_path).open_index(corpus)
    assert client.has_collection("theirs")
    milvus(mode="bm25", uri=server, collection="mine", cache_dir=tmp_path).open_index(corpus)
    with pytest.raises(RetrievalError, match=r"collection mine at .* holds another index: .*corpus_hash"):
        milvus(mode="bm25", uri=server, collection="mine", cache_dir=tmp_path).open_index(corpus[:-1])
    client.delete("mine", ids=[3])
    with pytest.raises(
        RetrievalError, match=r"mine at .* has 11 rows, expected 12: something else wrote into it"
    ):
        milvus(mode="bm25", uri=server, collection="mine", cache_dir=tmp_path).open_index(corpus)


def test_a_server_that_cannot_be_reached_is_one_quick_message(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refragkit.retrievers.milvus_collection.CONNECT_SECONDS", 2)
    with socket.socket() as silent:  # accepts, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], 9):
            started = time.monotonic()
            with pytest.raises(
                RetrievalError, match=rf"connecting to http://127.0.0.1:{port} failed: .*check retriever.uri"
            ):
                milvus(mode="bm25", uri=f"http://127.0.0.1:{port}", cache_dir=tmp_path).open_index(corpus)
            assert time.monotonic() - started < 10


def test_a_server_that_goes_away_is_one_message(
    corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from milvus_lite.adapter.grpc.server import start_server_in_thread

    monkeypatch.setattr("refragkit.retrievers.milvus_collection.RETRIES", 2)
    running, database, port = start_server_in_thread(str(tmp_path / "server"))
    retriever = milvus(mode="bm25", uri=f"http://127.0.0.1:{port}", cache_dir=tmp_path).open_index(corpus)
    running.stop(grace=None).wait()
    database.close()
    started = time.monotonic()
    with pytest.raises(
        RetrievalError, match=rf"searching collection refragkit_\w+ at http://127.0.0.1:{port} failed"
    ):
        retriever.search(["tea"], 1)
    assert time.monotonic() - started < 30


# --- settings ---------------------------------------------------------------------------------------------


def test_wrong_settings_are_one_message(corpus: list[Document], cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"retriever.mode='sparse': expected one of dense, bm25, hybrid"):
        milvus(mode="sparse")
    with pytest.raises(ConfigError, match=r"retriever.filter: expected an expression, got an empty one"):
        milvus(filter=" ")
    with pytest.raises(ConfigError, match=r"retriever.uri='milvus:19530': expected null for a file"):
        milvus(uri="milvus:19530")
    with pytest.raises(ConfigError, match=r"retriever.token_env") as error:
        milvus(uri="https://root:hunter2@milvus.example:19530")
    assert "hunter2" not in str(error.value)
    with pytest.raises(RetrievalError, match=r"retriever.index=NONSENSE.* failed"):
        milvus(mode="dense", index="NONSENSE", cache_dir=cache).open_index(corpus)


def test_an_approximate_index_with_parameters(corpus: list[Document], cache: Path) -> None:
    overrides = [
        "retriever.index=HNSW",
        "retriever.index_params={M: 8, efConstruction: 64}",
        "retriever.search_params={ef: 300}",
        "retriever.mode=dense",
    ]
    found = build("milvus", cache, overrides).open_index(corpus).search(QUERIES, 3)
    exact = milvus(mode="dense", cache_dir=cache).open_index(corpus).search(QUERIES, 3)
    assert [hits[0].doc_id for hits in found] == [hits[0].doc_id for hits in exact]


@pytest.mark.parametrize("package", ["pymilvus", "milvus_lite"])
def test_a_missing_package_is_one_message(
    package: str, corpus: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(
        RetrievalError, match=rf"needs {package.replace('_', '-')}: pip install 'refragkit\[milvus\]'"
    ):
        milvus(cache_dir=tmp_path).open_index(corpus)


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys; from refragkit.retrievers.milvus import milvus; milvus();"
        "print([m for m in ('torch', 'pymilvus', 'milvus_lite', 'grpc', 'faiss') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
