"""Processes on this machine that read files. They hand results over as files of columns, which are mapped here: nothing
large is pickled. Apart from `parallel`, because most readings need none of what this imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bubblescope.errors import InputError
from bubblescope.ingest import partfile
from bubblescope.ingest.parallel import alive, attempt
from bubblescope.ingest.part import Part

T = TypeVar("T")
_PREFIX = "bubblescope-results-"
_DAY_S = 86_400


class LocalPool(ProcessPoolExecutor):
    """Processes on this machine that leave nothing behind: they end with this one, however it ends, and so does the
    folder of results. Interrupts are this process's business alone.

    at_least: with fewer bytes to read, or one file, no process is started and all is read here.
    """

    def __init__(self, processes: int, at_least: int = 0) -> None:
        self._at_least = at_least
        _remove_leftovers()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        super().__init__(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker)

    def worth_it(self, sizes: Sequence[int]) -> bool:
        """Whether starting processes pays for files of these sizes."""
        return len(sizes) > 1 and sum(sizes) >= self._at_least

    def over(self, read: Callable[[str], T], paths: Sequence[str]) -> Iterator[T | InputError]:
        """`read` of every path; a `Part` comes back as a file."""
        with _uninterrupted():
            futures = [
                self.submit(_to_file, read, path, str(Path(self._folder.name) / f"{number}.part"))
                for number, path in enumerate(paths)
            ]
        for path, future in zip(paths, futures, strict=True):
            with alive(path):
                result = future.result()
            yield _from_file(result, path) if isinstance(result, Path) else result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        processes = list((getattr(self, "_processes", None) or {}).values())
        try:
            if kind is None:
                return super().__exit__(kind, error, trace)
            self.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(5)
            return None
        finally:
            self._folder.cleanup()


def _remove_leftovers() -> None:
    """Folders of results of processes that were killed: nothing was written to them for a day."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _DAY_S:
                shutil.rmtree(folder, ignore_errors=True)


def _to_file(read: Callable[[str], Any], path: str, target: str) -> Any:
    """In a worker: the result, or the name of the file in which it is."""
    result = attempt(read, path)
    if not isinstance(result, Part):
        return result
    partfile.write(result, Path(target))
    return Path(target)


def _from_file(result: Path, path: str) -> Any:
    part = partfile.read(result)
    result.unlink(missing_ok=True)
    if part is None:
        raise InputError("the result of reading it was lost (disk full?)", hint="make room in TMPDIR", where=path)
    return part


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, an interrupt waits. Processes that are started here never get one, not even before `_begin_worker`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
