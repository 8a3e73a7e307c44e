"""refragkit: fine-tuning of recurrent and hybrid language models with multi-hop retrieval and rewards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refragkit.config import compose
    from refragkit.models.build import build_model
    from refragkit.models.checkpoint import load_model, save_model

__version__ = "0.1.0"
__all__ = ["__version__", "build_model", "compose", "load_model", "save_model"]

# Resolved on first use: importing torch or hydra here would make `import refragkit` take seconds.
_LAZY = {
    "compose": "refragkit.config",
    "build_model": "refragkit.models.build",
    "load_model": "refragkit.models.checkpoint",
    "save_model": "refragkit.models.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'refragkit' has no attribute {name!r}")
