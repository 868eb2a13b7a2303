"""Many files, one function: in this process, or over anything with `concurrent.futures.Executor`'s interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from bubblescope.errors import InputError

T = TypeVar("T")


class Executor(Protocol):
    """The part of `concurrent.futures.Executor` that is used (dask's `Client.get_executor()` has it too)."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any: ...


def over_files(
    read: Callable[[str], T], paths: Sequence[str], executor: Executor | None = None
) -> Iterator[tuple[str, T | InputError]]:
    """`read` of every path, in the order of `paths`. A file that cannot be read gives its InputError instead,
    so that one bad rank never costs the others. `read` must pickle when `executor` is a process pool."""
    if executor is None:
        for path in paths:
            yield path, _try(read, path)
        return
    futures = [executor.submit(_try, read, path) for path in paths]
    for path, future in zip(paths, futures, strict=True):
        yield path, future.result()


def _try(read: Callable[[str], T], path: str) -> T | InputError:
    try:
        return read(path)
    except InputError as error:
        return error
