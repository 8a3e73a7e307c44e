"""Seeds as pure functions of what they are for, so that nothing depends on how far a generator has run."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from, say, ``(seed, step, rank, "sampling")``: equal parts, equal seed; else independent."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
