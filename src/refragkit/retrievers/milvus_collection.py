"""One collection in Milvus: connected to, built whole or not at all, searched and read in batches.

Without a URI it lives in a folder that Milvus Lite, a pure Python engine with Milvus' interface, serves inside this
process. Milvus Lite lets one process at a time open a folder and writes into it, so that a finished folder is never
opened itself: each process opens a working copy, whose large files are hard links to the finished ones.

A collection is filled under a temporary name and gets its own when every row is in: a build that is killed leaves
nothing that could be taken for an index.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from refragkit.errors import ConfigError, RetrievalError

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]

#: The primary key is the document's position in the corpus.
POSITION, VECTOR, WORDS = "_position", "_vector", "_words"
DATABASE = "milvus.db"
WORKING_COPIES = "milvus-open"
MANIFEST_PROPERTY = "refragkit.manifest"
#: The most hits that a Milvus cluster returns for a query.
MAX_HITS = 16_384
CONNECT_SECONDS = 10
#: With Milvus' growing pauses, a call to a cluster that went away gives up after about seven seconds.
RETRIES = 7
#: Queries, hits and rows of one call at most: well below the sizes of messages that Milvus accepts.
QUERIES_PER_CALL, HITS_PER_CALL, ROWS_PER_CALL = 1024, 1_000_000, 4096


def check_uri(uri: str | None) -> None:
    """Refuse what is not the address of a cluster, and passwords that would end up in logs.

    Raises:
        ConfigError: names ``retriever.uri``, never the password.
    """
    if uri is None:
        return
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise ConfigError(
            "retriever.uri holds a user name or password, and configurations are logged: leave them out and put "
            "'user:password' or a token into the environment variable that retriever.token_env names"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"retriever.uri={uri!r}: expected null for a file in the cache, or http(s)://HOST:PORT of a Milvus server"
        )


def require_packages(uri: str | None) -> Any:
    """The module pymilvus, with the logs of client and engine silenced: what they report, they also raise.

    Raises:
        RetrievalError: it is missing, or milvus-lite is where there is no cluster.
    """
    needed = {"pymilvus": "pymilvus"} | ({} if uri else {"milvus_lite": "milvus-lite"})
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RetrievalError(
            f"retriever=milvus needs {' and '.join(missing)}: pip install 'refragkit[milvus]', or choose "
            "retriever=hybrid, which needs neither"
        )
    pymilvus = importlib.import_module("pymilvus")
    for name in ("pymilvus", "pymilvus.milvus_client", "milvus_lite", "grpc._server"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pymilvus


class WorkingCopy:
    """A database folder of this process alone, gone when it is closed or forgotten.

    Attributes:
        path: what Milvus Lite opens.
    """

    def __init__(self, cache_dir: Path | None, source: Path | None = None) -> None:
        """An empty one, or a copy of a finished database folder.

        Args:
            cache_dir: where to put it; None for the system's folder for temporary files.
            source: the finished database folder.

        Raises:
            OSError: the source is not there, or there is no space.
        """
        from filelock import FileLock

        parent = None
        if cache_dir is not None:
            with contextlib.suppress(OSError):  # a shared cache that can only be read
                (cache_dir / WORKING_COPIES).mkdir(parents=True, exist_ok=True)
                _remove_abandoned(cache_dir / WORKING_COPIES)
                parent = cache_dir / WORKING_COPIES
        folder = Path(tempfile.mkdtemp(prefix="refragkit-", dir=parent))
        # Held as long as the process lives: whoever gets it finds an abandoned folder.
        lock = FileLock(f"{folder}.lock", thread_local=False)
        lock.acquire()
        self.path = folder / DATABASE
        self.close = weakref.finalize(self, _discard, folder, lock)
        self.path.mkdir(parents=True)
        if source is not None:
            copy_database(source, self.path)

    def stop(self) -> None:
        """Stop the server; every file is complete then."""
        _stop_server(self.path)


def _stop_server(path: Path) -> None:
    from milvus_lite.server_manager import server_manager_instance

    server_manager_instance.release_server(str(path))


def _discard(folder: Path, lock: Any) -> None:
    with contextlib.suppress(ImportError):
        _stop_server(folder / DATABASE)
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _remove_abandoned(parent: Path) -> None:
    """Drop the working copies of processes that were killed."""
    from filelock import FileLock, Timeout

    for file in parent.glob("*.lock"):
        lock = FileLock(file, timeout=0)
        try:
            with lock:
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)
                file.unlink(missing_ok=True)
        except Timeout:
            continue


def copy_database(source: Path, target: Path) -> None:
    """Copy a closed database folder; Parquet and index files, which are never changed, as hard links where possible.

    Raises:
        OSError: the source is not there, or there is no space.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not there")
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        if not file.is_file() or relative.name == "LOCK" or "wal" in relative.parts:
            continue
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy.suffix in (".parquet", ".idx"):
            try:
                os.link(file, copy)
                continue
            except OSError:  # another file system, or one without links
                pass
        shutil.copyfile(file, copy)


class Collection:
    """A connection and the collection that is used through it.

    Attributes:
        name: set by ``build`` and ``open``.
        count: how many rows it has.
    """

    def __init__(self, uri: str | None = None, token_env: str | None = None) -> None:
        """Nothing is connected yet.

        Args:
            uri: of a cluster; None for a database folder.
            token_env: the environment variable that holds the token of the cluster.

        Raises:
            ConfigError: see `check_uri`.
        """
        check_uri(uri)
        self.uri = uri
        self.token_env = token_env
        self.name = ""
        self.count = 0
        self.working_copy: WorkingCopy | None = None
        self._client: Any = None

    # --- connecting ---------------------------------------------------------------------------------------

    def connect(self, cache_dir: Path | None = None, source: Path | None = None) -> None:
        """Connect to the cluster, or open a working copy of a database folder.

        Args:
            cache_dir: where the working copy is kept.
            source: the folder; None for a new one.

        Raises:
            RetrievalError: a package is missing, the cluster can't be reached, or the folder can't be opened.
        """
        pymilvus = require_packages(self.uri)
        if self.uri is not None:
            if self._client is None:
                token = os.environ.get(self.token_env, "") if self.token_env else ""
                with self._errors(f"connecting to {self.uri}", self._reach_hint()):
                    self._client = pymilvus.MilvusClient(uri=self.uri, token=token, timeout=CONNECT_SECONDS)
            return
        self.disconnect()
        try:
            self.working_copy = WorkingCopy(cache_dir, source)
        except OSError as error:
            raise RetrievalError(f"retriever=milvus: can't open a working copy: {error}") from error
        self._open_working_copy()

    def _open_working_copy(self) -> None:
        assert self.working_copy is not None
        with self._errors(f"opening {self.working_copy.path}"):
            # Milvus Lite hangs up on a client that asks every ten seconds whether it is still there.
            self._client = require_packages(None).MilvusClient(
                str(self.working_copy.path), grpc_options={"grpc.keepalive_time_ms": 2**31 - 1}
            )

    def _reach_hint(self) -> str:
        token = f", and whether {self.token_env} holds its token" if self.token_env else ""
        return (
            f"check retriever.uri and that the server runs there{token} (retriever.uri=null uses a file in the "
            "cache and needs no server)"
        )

    def disconnect(self) -> None:
        """Close the connection, and drop the working copy."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.working_copy is not None:
            self.working_copy.close()
            self.working_copy = None

    def copy_to(self, folder: Path) -> None:
        """Copy the database, complete and closed, into a new folder; the collection stays open.

        Raises:
            OSError: the disk is full.
        """
        assert self.working_copy is not None
        self._client.close()
        self.working_copy.stop()
        folder.mkdir()
        copy_database(self.working_copy.path, folder)
        self._open_working_copy()
        self._load(self.name)

    @contextlib.contextmanager
    def _errors(self, doing: str, hint: str = "") -> Iterator[None]:
        """Turn the client's errors into one message."""
        import grpc
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (MilvusException, grpc.RpcError) as error:
            reason = " ".join((getattr(error, "message", "") or str(error)).split())
            raise RetrievalError(
                f"retriever=milvus: {doing} failed: {reason}{'; ' if hint else ''}{hint}"
            ) from error

    def _doing(self, what: str) -> str:
        return f"{what} collection {self.name}{f' at {self.uri}' if self.uri else ''}"

    # --- building and opening -----------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """Whether there is a collection of that name."""
        with self._errors(f"looking for collection {name}", self._reach_hint()):
            return bool(self._client.has_collection(name, retry_times=RETRIES))

    def open(self, name: str, manifest: Mapping[str, Any], count: int) -> None:
        """Use a finished collection.

        Args:
            name: the collection's.
            manifest: what it must have been built for.
            count: how many rows it must have.

        Raises:
            RetrievalError: it is not there, was not written by refragkit, or holds something else.
        """
        from refragkit.retrievers.index import check_manifest

        where = f"collection {name}{f' at {self.uri}' if self.uri else ''}"
        change = "drop it, or set retriever.collection to another name (null for one of its own)"
        if not self.exists(name):
            raise RetrievalError(f"retriever=milvus: {where} is not there")
        with self._errors(f"opening {where}", self._reach_hint()):
            described = self._client.describe_collection(name, retry_times=RETRIES)
        try:
            found = json.loads(described["properties"][MANIFEST_PROPERTY])
        except (KeyError, TypeError, ValueError):
            fields = ", ".join(f["name"] for f in described["fields"])
            raise RetrievalError(
                f"retriever=milvus: {where} has another schema (fields {fields}) and no record of what it holds: it "
                f"was not written by refragkit; {change}"
            ) from None
        try:
            check_manifest(Path(name), found, manifest)
        except RetrievalError as error:
            raise RetrievalError(
                f"retriever=milvus: {where} holds another index: {error}; or {change}"
            ) from None
        self._load(name)
        rows = self._count_rows(name)
        if rows != count:
            raise RetrievalError(
                f"retriever=milvus: {where} has {rows} rows, expected {count}: something else wrote into it; {change}"
            )
        self.name, self.count = name, count

    def build(
        self,
        name: str,
        manifest: Mapping[str, Any],
        rows: Iterable[list[dict[str, Any]]],
        dimension: int | None,
        words: bool,
        index: str,
        index_params: Mapping[str, Any],
        record: Path | None = None,
    ) -> None:
        """Fill a collection, and give it its name when it is complete.

        Args:
            name: a name that is free.
            manifest: stored with it.
            rows: batches of rows.
            dimension: of the dense vectors; None for a collection without them.
            words: whether there are sparse vectors of words.
            index: the type of the dense vectors' index.
            index_params: its parameters.
            record: a file that names the unfinished collection, so that the next build can drop it.

        Raises:
            RetrievalError: Milvus refuses something, or goes away.
        """
        client, pymilvus = self._client, require_packages(self.uri)
        if record is not None and record.is_file():
            self._drop(record.read_text(encoding="utf-8"))
        temporary = self.name = f"{name}_building_{uuid.uuid4().hex[:8]}"
        if record is not None:
            record.write_text(temporary, encoding="utf-8")
        kind = pymilvus.DataType
        schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
        schema.add_field(POSITION, kind.INT64, is_primary=True)
        indexes = client.prepare_index_params()
        if dimension is not None:
            schema.add_field(VECTOR, kind.FLOAT_VECTOR, dim=dimension)
            indexes.add_index(VECTOR, index_type=index, metric_type="IP", params=dict(index_params))
        if words:
            schema.add_field(WORDS, kind.SPARSE_FLOAT_VECTOR)
            indexes.add_index(WORDS, index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
        properties = {MANIFEST_PROPERTY: json.dumps(manifest, sort_keys=True)}
        count = 0
        try:
            with self._errors(self._doing("creating")):
                client.create_collection(
                    temporary, schema=schema, properties=properties, consistency_level="Strong"
                )
            for batch in rows:
                with self._errors(self._doing("inserting into")):
                    client.insert(temporary, batch, retry_times=RETRIES)
                count += len(batch)
            with self._errors(self._doing("flushing")):
                client.flush(temporary)
            with self._errors(
                self._doing(f"indexing (retriever.index={index}, index_params={dict(index_params)})")
            ):
                client.create_index(temporary, indexes)
            self._load(temporary)
            stored = self._count_rows(temporary)
            if stored != count:
                raise RetrievalError(
                    f"retriever=milvus: {self._doing('filling')} failed: {stored} of {count} rows arrived; run again"
                )
            with self._errors(self._doing("renaming")):
                client.rename_collection(temporary, name)
        except BaseException:
            with contextlib.suppress(Exception):
                self._drop(temporary)
                if record is not None:
                    record.unlink(missing_ok=True)
            raise
        if record is not None:
            record.unlink(missing_ok=True)
        self.name, self.count = name, count
        self._load(name)

    def _drop(self, name: str) -> None:
        if self.exists(name):
            with self._errors(f"dropping collection {name}"):
                self._client.drop_collection(name)

    def _load(self, name: str) -> None:
        with self._errors(f"loading collection {name}", self._reach_hint()):
            self._client.load_collection(name, retry_times=RETRIES)

    def _count_rows(self, name: str) -> int:
        with self._errors(f"counting the rows of collection {name}", self._reach_hint()):
            rows = self._client.query(name, filter="", output_fields=["count(*)"], retry_times=RETRIES)
        return int(rows[0]["count(*)"])

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def max_hits(self) -> int:
        """How many hits a query can have."""
        return self.count if self.uri is None else min(self.count, MAX_HITS)

    def search(
        self,
        field: str,
        queries: Sequence[Any],
        limit: int,
        expression: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> list[tuple[IntArray, NDArray[np.float64]]]:
        """The rows of highest inner product, for many queries in each call.

        Args:
            field: `VECTOR` or `WORDS`.
            queries: vectors.
            limit: hits per query at most.
            expression: a Milvus filter.
            params: of the index.

        Returns:
            Per query, positions and scores, best first.
        """
        found = []
        step = max(1, min(QUERIES_PER_CALL, HITS_PER_CALL // limit))
        for start in range(0, len(queries), step):
            with self._errors(self._doing("searching"), self._reach_hint() if self.uri else ""):
                result = self._client.search(
                    self.name,
                    data=list(queries[start : start + step]),
                    anns_field=field,
                    limit=limit,
                    filter=expression or "",
                    output_fields=[POSITION],
                    search_params={"metric_type": "IP", "params": dict(params or {})},
                    retry_times=RETRIES,
                )
            found += [
                (np.array(hits.ids, dtype=np.int64), np.array(hits.distances, dtype=np.float64))
                for hits in result
            ]
        return found

    def fetch(self, field: str, positions: IntArray) -> dict[int, Any]:
        """The stored vectors of documents; those that have no row (empty ones) are left out."""
        found: dict[int, Any] = {}
        for start in range(0, len(positions), ROWS_PER_CALL):
            ids = positions[start : start + ROWS_PER_CALL].tolist()
            with self._errors(self._doing("reading"), self._reach_hint() if self.uri else ""):
                rows = self._client.get(
                    self.name, ids=ids, output_fields=[POSITION, field], retry_times=RETRIES
                )
            found.update((row[POSITION], row[field]) for row in rows)
        return found

    def check_filter(self, expression: str) -> None:
        """Try a filter.

        Raises:
            RetrievalError: Milvus doesn't understand it, or no document matches.
        """
        hint = "see 'Filtering' in Milvus' documentation for what it understands"
        with self._errors(f"retriever.filter={expression!r}", hint):
            rows = self._client.query(
                self.name, filter=expression, output_fields=[POSITION], limit=1, retry_times=RETRIES
            )
        if not rows:
            raise RetrievalError(
                f"retriever.filter={expression!r} matches none of the {self.count} documents: check the names and "
                "values in it against the documents' metadata"
            )

    def matching(self, expression: str, total: int) -> NDArray[np.bool_]:
        """[total] which documents match a filter."""
        matches = np.zeros(total, dtype=bool)
        for start in range(0, total, ROWS_PER_CALL):
            block = f"({expression}) and {POSITION} >= {start} and {POSITION} < {start + ROWS_PER_CALL}"
            with self._errors(self._doing("filtering"), self._reach_hint() if self.uri else ""):
                rows = self._client.query(
                    self.name, filter=block, output_fields=[POSITION], retry_times=RETRIES
                )
            matches[[row[POSITION] for row in rows]] = True
        return matches
