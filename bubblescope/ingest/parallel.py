"""Many files, one function: in this process, in a pool of local ones, or over anything with
`concurrent.futures.Executor`'s interface (a dask cluster).

Local processes hand their result over as a file of columns, which is mapped here: nothing large is pickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from bubblescope.errors import InputError
from bubblescope.ingest import partfile
from bubblescope.ingest.part import Part

T = TypeVar("T")


class Executor(Protocol):
    """The part of `concurrent.futures.Executor` that is used (dask's `Client.get_executor()` has it too)."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...


class Progress(Protocol):
    """Is told, once, how many bytes there are to read, and then of every file that is done."""

    def begin(self, files: int, size: int) -> None: ...

    def done(self, size: int) -> None: ...


_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def watched(progress: Progress | None) -> Iterator[None]:
    """Inside, `over_files` tells `progress` how far it is."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def over_files(
    read: Callable[[str], T], paths: Sequence[str], executor: Executor | None = None, cost: float = 1.0
) -> Iterator[tuple[str, T | InputError]]:
    """`read` of every path, in the order of `paths`. A file that cannot be read gives its InputError instead,
    so that one bad rank never costs the others. `read` must pickle when `executor` is a process pool; whether that
    pays is told by the bytes times their `cost`."""
    sizes = [_size(path) for path in paths]
    progress = _progress.get()
    if progress is not None:
        progress.begin(len(paths), sum(sizes))
    if isinstance(executor, LocalPool) and not executor.worth_it(sizes, cost):
        executor = None
    for path, size, result in zip(paths, sizes, _results(read, paths, executor), strict=True):
        if progress is not None:
            progress.done(size)
        yield path, result


def _results(read: Callable[[str], T], paths: Sequence[str], executor: Executor | None) -> Iterator[T | InputError]:
    if executor is None:
        for path in paths:
            yield _try(read, path)
        return
    if isinstance(executor, LocalPool):
        yield from executor.over(read, paths)
        return
    futures = [executor.submit(_try, read, path) for path in paths]
    for path, future in zip(paths, futures, strict=True):
        with _alive(path):
            result = future.result()
        yield result


@contextlib.contextmanager
def _alive(path: str) -> Iterator[None]:
    try:
        yield
    except BrokenExecutor as error:
        raise InputError(
            "a process that read traces was killed (out of memory?)",
            hint="try fewer at once: --jobs 1",
            where=path,
        ) from error


def _try(read: Callable[[str], T], path: str) -> T | InputError:
    try:
        return read(path)
    except InputError as error:
        return error


def _size(path: str) -> int:
    try:
        return 0 if "://" in path else Path(path).stat().st_size
    except OSError:
        return 0


# --- local processes -----------------------------------------------------------------------------------------


class LocalPool(ProcessPoolExecutor):
    """Processes on this machine that leave nothing behind: they end with this one, however it ends, and so does the
    folder of results. Interrupts are this process's business alone.

    at_least: with fewer bytes to read, or one file, no process is started and all is read here.
    """

    def __init__(self, processes: int, at_least: int = 0) -> None:
        self._at_least = at_least
        self._folder = tempfile.TemporaryDirectory(prefix="bubblescope-")
        super().__init__(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker)

    def worth_it(self, sizes: Sequence[int], cost: float = 1.0) -> bool:
        """Whether starting processes pays for files of these sizes, where a byte costs so much."""
        return len(sizes) > 1 and sum(sizes) * cost >= self._at_least

    def over(self, read: Callable[[str], T], paths: Sequence[str]) -> Iterator[T | InputError]:
        """`read` of every path; a `Part` comes back as a file."""
        futures = [
            self.submit(_to_file, read, path, str(Path(self._folder.name) / f"{number}.part"))
            for number, path in enumerate(paths)
        ]
        for path, future in zip(paths, futures, strict=True):
            with _alive(path):
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


def _to_file(read: Callable[[str], Any], path: str, target: str) -> Any:
    """In a worker: the result, or the name of the file in which it is."""
    result = _try(read, path)
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


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
