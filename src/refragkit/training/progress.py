"""The progress bar of training, drawn with rich where a person watches."""

from __future__ import annotations

from lightning.pytorch.callbacks import RichProgressBar

from refragkit.console import is_terminal


def progress_bar() -> RichProgressBar | None:
    """Lightning's rich bar (steps, time left, loss, reward, tokens/s), or None where output is not a terminal."""
    return RichProgressBar(leave=True) if is_terminal() else None
