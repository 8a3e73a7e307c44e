"""The index folder on disk: manifest, atomic writing, checking on load, and one builder at a time.

A folder is either complete or absent: it is written under a temporary name and renamed when all its bytes
are on disk, so that a process killed at any point leaves nothing that could be taken for an index. Every
file's size and checksum is in ``manifest.json``; a folder that does not match what the run asks for is
rebuilt, never used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from refragkit.errors import RetrievalError
from refragkit.types import Document

if TYPE_CHECKING:
    from refragkit.retrievers.base import Retriever

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
DOCUMENTS = "documents.jsonl"
DOCUMENT_TABLE = "documents.safetensors"
#: Checksums of larger files are written but not read on every opening (sizes always are).
CHECKSUM_LIMIT_BYTES = 1 << 30


def file_checksum(path: Path) -> str:
    """CRC-32 of a file, read in blocks, as eight hex digits."""
    value = 0
    with path.open("rb") as f:
        while block := f.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """16 hex digits that name an index: a hash of everything it depends on."""
    wanted = {"format_version": FORMAT_VERSION, **manifest}
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())


def write_folder(path: str | Path, manifest: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Create an index folder atomically.

    Args:
        path: the folder; one that exists is replaced.
        manifest: what the index depends on; format version and file list are added.
        write: puts the index's files into the (temporary) folder that it is given.

    Raises:
        RetrievalError: the disk is full or the folder can't be written.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        files = {
            str(f.relative_to(temporary)): {"bytes": f.stat().st_size, "crc32": file_checksum(f)}
            for f in sorted(temporary.rglob("*"))
            if f.is_file()
        }
        content = {"format_version": FORMAT_VERSION, **manifest, "files": files}
        (temporary / MANIFEST).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        _sync_folder(temporary)
        if path.exists():
            # A directory can't be renamed over another one: the old one steps aside first.
            aside = path.with_name(f"{path.name}.old-{uuid.uuid4().hex[:8]}")
            path.rename(aside)
            temporary.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            temporary.rename(path)
    # faiss and safetensors report a failed write as errors of their own.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # numpy only says how much it wrote.
        full = getattr(error, "errno", None) == errno.ENOSPC or any(
            said in str(error) for said in ("No space left", "requested and")
        )
        what = "the disk is full" if full else str(error)
        raise RetrievalError(
            f"can't write the index {path}: {what}. Nothing was left behind; free space there or set another "
            "paths.outputs"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of an index folder, after checking that all its files are there and whole.

    Raises:
        RetrievalError: no manifest, an unknown format version, or a file that is missing, truncated or
            altered.
    """
    path = Path(path)
    file = path / MANIFEST
    rebuild = "delete the folder to have it built again"
    if not file.is_file():
        raise RetrievalError(f"{path} is not an index: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(f"{file} is broken ({error}); {rebuild}") from error
    if version != FORMAT_VERSION:
        raise RetrievalError(
            f"{file}: format version {version}, this refragkit reads {FORMAT_VERSION}; {rebuild}"
        )
    for name, entry in files.items():
        part = path / name
        if not part.is_file():
            raise RetrievalError(f"index {path}: file {name} is missing; {rebuild}")
        size = part.stat().st_size
        if size != entry["bytes"]:
            raise RetrievalError(
                f"index {path}: {name} has {size} bytes, expected {entry['bytes']}; {rebuild}"
            )
        if size <= CHECKSUM_LIMIT_BYTES and file_checksum(part) != entry["crc32"]:
            raise RetrievalError(f"index {path}: {name} was altered (its checksum differs); {rebuild}")
    return dict(manifest)


def check_manifest(path: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse an index that was built for something else.

    Raises:
        RetrievalError: names the first entry that differs, with both values.
    """
    for key, expected in wanted.items():
        got = manifest.get(key)
        if isinstance(expected, Mapping) and isinstance(got, Mapping):
            for inner in sorted({*expected, *got}):
                if expected.get(inner) != got.get(inner):
                    raise RetrievalError(
                        f"index {path} was built with {inner}={got.get(inner)!r}, this run asks for "
                        f"{expected.get(inner)!r}: index again, or change the setting"
                    )
        elif got != expected:
            raise RetrievalError(
                f"index {path} has {key}={got!r}, this run asks for {expected!r}: index again, or "
                "change the setting"
            )


def _remove_leftovers(folder: Path) -> None:
    """Drop what killed builders left beside the folder; only called under its lock."""
    for leftover in folder.parent.glob(f"{folder.name}.*-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def open_cached(retriever: Retriever, documents: Sequence[Document], cache_dir: str | Path | None) -> None:
    """Load the matching index from the cache, or build it and put it there."""
    if cache_dir is None or not retriever.cached:
        retriever.index(documents)
        retriever.index_path = None
        return
    retriever._set_documents(documents)

    def build(folder: Path) -> None:
        retriever.index(documents)
        retriever.save(folder)

    retriever.index_path = load_or_build(
        Path(cache_dir), retriever.name, retriever.manifest(), retriever.read_files, build
    )


def load_or_build(
    cache_dir: Path,
    name: str,
    wanted: Mapping[str, Any],
    load: Callable[[Path], None],
    build: Callable[[Path], None],
) -> Path:
    """Load the folder in the cache that holds what is wanted, after building it if it is not there or not intact.

    Two processes that ask for the same folder at once build it once: the second waits, and loads.

    Args:
        cache_dir: where the folder is kept; its name is ``name`` and the fingerprint of ``wanted``.
        name: what it holds.
        wanted: the manifest's content.
        load: reads an intact folder; may still refuse it with a RetrievalError.
        build: writes the folder by ``write_folder``.

    Returns:
        The folder.

    Raises:
        RetrievalError: the cache can't be written.
    """
    from filelock import FileLock

    folder = cache_dir / f"{name}-{fingerprint(wanted)}"
    if _load(folder, wanted, load):
        return folder
    lock = FileLock(f"{folder}.lock")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise RetrievalError(
            f"can't write the index {folder}: {error.strerror or error}; free space there, or set a paths.outputs that "
            "can be written"
        ) from error
    try:
        if not _load(folder, wanted, load):  # another process may have built it while we waited
            _remove_leftovers(folder)
            build(folder)
            # From now on memory-mapped, as after any other opening.
            load(folder)
    finally:
        lock.release()
    return folder


def _load(folder: Path, wanted: Mapping[str, Any], load: Callable[[Path], None]) -> bool:
    if not folder.is_dir():
        return False
    try:
        check_manifest(folder, read_manifest(folder), wanted)
        load(folder)
    except RetrievalError as error:
        logger.warning("%s: building it again", error)
        return False
    logger.info("loaded from %s", folder)
    return True
