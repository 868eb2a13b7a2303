"""Ending a window early: Ctrl-C, SIGTERM and SIGHUP detach at once and keep what was recorded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bubblescope.errors import AttachError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Early:
    """Whether, and by which signal, the user wants the window to end now. What waits looks at it."""

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def says(self) -> str:
        return "" if self.signal is None else f"ended early by {self.signal.name}"

    @property
    def exit_status(self) -> int:
        """As a shell reports a process that this signal ended; 0 when nobody ended it."""
        return 0 if self.signal is None else 128 + self.signal


class EndedEarly(AttachError):
    """Nothing usable was recorded before the user ended it. pending: the job will still write what was begun."""

    def __init__(self, early: Early, what: str, hint: str = "", *, pending: bool = False) -> None:
        super().__init__(f"{early.says}: {what}", hint=hint)
        self.exit_code = early.exit_status
        self.pending = pending


@contextmanager
def ends_early() -> Iterator[Early]:
    """The first signal is noted, for the block to end in good order; a second one interrupts it.

    A signal that was ignored (nohup) stays so.
    """
    early = Early()

    def note(number: int, _frame: FrameType | None) -> None:
        if early.signal == number == signal.SIGHUP:
            return  # a terminal that closes sends several: its own, its shell's
        if early:
            raise KeyboardInterrupt
        early.signal = signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield early
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, note) for number in heard}
    try:
        yield early
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
