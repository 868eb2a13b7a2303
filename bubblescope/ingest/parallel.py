"""Many files, one function: in this process, in a pool of local ones (`pool`), or over anything with
`concurrent.futures.Executor`'s interface (a dask cluster)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from bubblescope.errors import InputError

T = TypeVar("T")


class Executor(Protocol):
    """The part of `concurrent.futures.Executor` that is used (dask's `Client.get_executor()` has it too)."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...


@runtime_checkable
class Spread(Protocol):
    """An executor that knows more of files (`pool.LocalPool`)."""

    def worth_it(self, sizes: Sequence[int]) -> bool: ...

    def over(self, read: Callable[[str], T], paths: Sequence[str]) -> Iterator[T | InputError]: ...


class Progress(Protocol):
    """Is told, once, how many bytes there are to read, and then, from any thread, of those that are done: file by file,
    or as they are read where this process reads."""

    def begin(self, files: int, size: int) -> None: ...

    def done(self, size: int) -> None: ...


_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)
_advance: ContextVar[Callable[[int], None] | None] = ContextVar("advance", default=None)


@contextlib.contextmanager
def watched(progress: Progress | None) -> Iterator[None]:
    """Inside, `over_files` tells `progress` how far it is."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def advance(size: int) -> None:
    """So many more bytes of the file that `over_files` reads in this process are done."""
    told = _advance.get()
    if told is not None:
        told(size)


@contextlib.contextmanager
def _advancing(progress: Progress, size: int) -> Iterator[None]:
    """Inside, `advance` tells `progress`; in the end `size` bytes are told, neither more nor less."""
    left = size

    def told(done: int) -> None:
        nonlocal left
        done = min(done, left)
        left -= done
        if done:
            progress.done(done)

    token = _advance.set(told)
    try:
        yield
    finally:
        _advance.reset(token)
    told(left)


def over_files(
    read: Callable[[str], T], paths: Sequence[str], executor: Executor | None = None
) -> Iterator[tuple[str, T | InputError]]:
    """`read` of every path, in the order of `paths`. A file that cannot be read gives its InputError instead,
    so that one bad rank never costs the others. `read` must pickle when `executor` is a process pool."""
    sizes = [_size(path) for path in paths]
    progress = _progress.get()
    if progress is not None:
        progress.begin(len(paths), sum(sizes))
    if isinstance(executor, Spread) and not executor.worth_it(sizes):
        executor = None
    results = _results(read, paths, executor)
    for path, size in zip(paths, sizes, strict=True):
        with contextlib.nullcontext() if progress is None else _advancing(progress, size):
            result = next(results)
        yield path, result


def _results(read: Callable[[str], T], paths: Sequence[str], executor: Executor | None) -> Iterator[T | InputError]:
    if executor is None:
        for path in paths:
            yield attempt(read, path)
        return
    if isinstance(executor, Spread):
        yield from executor.over(read, paths)
        return
    futures = [executor.submit(attempt, read, path) for path in paths]
    for path, future in zip(paths, futures, strict=True):
        with alive(path):
            result = future.result()
        yield result


@contextlib.contextmanager
def alive(path: str) -> Iterator[None]:
    """Inside, a process that ended is an InputError."""
    from concurrent.futures import BrokenExecutor

    try:
        yield
    except BrokenExecutor as error:
        raise InputError(
            "a process that read traces was killed (out of memory?)",
            hint="try fewer at once: --jobs 1",
            where=path,
        ) from error


def attempt(read: Callable[[str], T], path: str) -> T | InputError:
    """The file, or why it cannot be read."""
    try:
        return read(path)
    except InputError as error:
        return error


def _size(path: str) -> int:
    try:
        return 0 if "://" in path else Path(path).stat().st_size
    except OSError:
        return 0


def cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
