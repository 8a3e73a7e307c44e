"""Ctrl-C and SIGTERM end a training run behind the step that is under way, where all of its state is whole."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("refragkit")

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopRequest:
    """Whether somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the first Ctrl-C or SIGTERM as a request, and a second one as an order.

        Signals belong to a process's main thread; in another one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _NAMES}
        for number in _NAMES:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        log.warning(
            "%s: the run ends with a checkpoint after this step; once more to end it at once, with the last one",
            _NAMES[signal.Signals(number)],
        )
