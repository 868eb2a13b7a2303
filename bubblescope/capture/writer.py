"""One rank's file: whole lines, appended by one thread, never at the cost of the training."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

try:
    import msgspec
except ImportError:  # a training image may have only the standard library
    msgspec = None  # type: ignore[assignment]


SCHEMA_VERSION = 1
QUEUE_LINES = 64
"""Lines kept while the file system is slow; beyond that, steps are dropped and counted."""


def _encode(obj: Any) -> bytes:
    return json.dumps(obj, separators=(",", ":")).encode() if msgspec is None else msgspec.json.encode(obj)


Line = Callable[[], dict[str, Any]]


class RankWriter:
    """Writes ``rank-00003.jsonl`` in `folder`, on a thread of its own.

    submit never blocks and never raises. When the disk is full or the folder cannot be written, `warn` is called
    once, lines are dropped and counted, and each later line tries again. A line is one write to a file opened for
    append; one that was cut short is taken back, which leaves room for shorter ones (the end line, which says what was
    lost); where that is not possible the next one starts on a new line, so only the cut line is lost.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.path: Path | None = None
        self.lost_lines = 0
        self._warn = warn
        self._header: Line | None = None
        self._rank = 0
        self._fd = -1
        self._torn = False
        self._warned = False
        # SimpleQueue is C throughout; a Condition is Python, and the training would run it in each step.
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._dead = False
        self._thread: threading.Thread | None = None

    def start(self, rank: int, header: Line) -> None:
        """Name the file and start the thread; the header is the first line it writes."""
        self._rank, self._header = rank, header
        self._thread = threading.Thread(target=self._work, name="bubblescope-writer", daemon=True)
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread is not None

    def submit(self, line: Line) -> bool:
        """Queue one line (built on the writer's thread); False when it was dropped because the queue is full."""
        if self._dead or self._lines.qsize() >= QUEUE_LINES:
            self.lost_lines += 1
            return False
        self._lines.put(line)
        return True

    def close(self, wait_s: float = 5.0) -> None:
        """Write what is queued, then stop; gives up after `wait_s` on a file system that hangs."""
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                self._complain(f"{self.folder} did not take the last lines within {wait_s:g} s")

    def abandon(self) -> None:
        """In a forked child: this writer belongs to the parent. Touches no lock: the fork may have left it held."""
        self._dead = True
        self._thread = None

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            self._put(line)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, line: Line) -> None:
        try:
            if self._fd < 0:
                self._open()
            if self._header is not None:
                self._write(self._header())
                self._header = None
            self._write(line())
        except OSError as error:
            self.lost_lines += 1
            self._complain(f"cannot write the recording in {self.folder}: {error}")
        except Exception as error:  # a value that cannot be encoded is our bug, and must not end the thread
            self.lost_lines += 1
            self._complain(f"a line of the recording was lost: {type(error).__name__}: {error}")

    def _complain(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(message)

    def _write(self, obj: dict[str, Any]) -> None:
        data = (b"\n" if self._torn else b"") + _encode(obj) + b"\n"
        written = 0
        while written < len(data):
            try:
                written += os.write(self._fd, data[written:])
            except OSError:
                self._take_back(written)
                raise
        self._torn = False

    def _take_back(self, written: int) -> None:
        try:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
        except OSError:
            self._torn = True

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self._names():
            path = self.folder / name
            try:
                # O_EXCL: a file that is there belongs to another process, of this run or an earlier one.
                self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                continue
            self.path = path
            return

    def _names(self) -> list[str]:
        stem = f"rank-{self._rank:05d}"
        pid = os.getpid()
        return [f"{stem}.jsonl", f"{stem}.{pid}.jsonl", *(f"{stem}.{pid}-{i}.jsonl" for i in range(2, 10_000))]


def write_job_file(folder: Path, rank: int, content: dict[str, Any]) -> None:
    """``job.json``: what a person or script wants to know first. Whole or not at all: written beside, renamed.

    The first rank to come writes it, and rank 0 in any case. Raises OSError.
    """
    target = folder / "job.json"
    if rank != 0 and target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".job.json.{os.getpid()}.tmp"
    try:
        beside.write_bytes(_encode(content) + b"\n")
        beside.replace(target)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
