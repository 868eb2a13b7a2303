"""Workers of a running dask cluster that read files. Nothing here waits forever in silence: a cluster without a worker,
or without a scheduler, is said."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

from bubblescope.errors import InputError
from bubblescope.ingest import discover
from bubblescope.ingest.parallel import attempt

T = TypeVar("T")
TELL_AFTER_S = 5.0
END_AFTER_S = 60.0
"""Without a worker it is said, and then given up, after so many seconds."""


class DaskPool:
    """Files are read by the workers of `client` (a `distributed.Client`), which must see them under the same paths.

    tell: is given what the user should know while this waits.
    """

    def __init__(self, client: Any, tell: Callable[[str], None]) -> None:
        self._client = client
        self._tell = tell
        self._address = client.scheduler.address

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._client.submit(fn, *args, **kwargs, pure=False)

    def worth_it(self, sizes: Sequence[int]) -> bool:
        """Always: the user asked for the cluster."""
        return True

    def over(self, read: Callable[[str], T], paths: Sequence[str]) -> Iterator[T | InputError]:
        """`read` of every path, each by a worker. Raises InputError when the cluster is lost."""
        from distributed import KilledWorker
        from distributed.comm import CommClosedError

        futures = [self.submit(_on_worker, read, _everywhere(path)) for path in paths]
        for path, future in zip(paths, futures, strict=True):
            try:
                result = self._result(future)
            except KilledWorker:
                result = InputError(
                    "the dask workers that read this file were killed, one after the other (out of memory?)",
                    hint="give the workers more memory, or fewer threads",
                    where=path,
                )
            except (CancelledError, CommClosedError) as error:
                raise InputError(
                    f"the dask scheduler at {self._address} was lost while files were read",
                    hint="see its log, and start again when it runs",
                    where=path,
                ) from error
            yield result

    def _result(self, future: Any) -> Any:
        """What the worker gives. Raises InputError when there is no worker for too long."""
        told, alone_since = False, time.monotonic()
        while True:
            try:
                return future.result(timeout=TELL_AFTER_S)
            except TimeoutError:
                if future.done():
                    return future.result()
            if self._has_workers():
                told, alone_since = False, time.monotonic()
                continue
            if time.monotonic() - alone_since > END_AFTER_S:
                raise InputError(
                    f"no worker has been connected to the dask scheduler at {self._address} for {END_AFTER_S:.0f} s",
                    hint=f"start some: dask worker {self._address}",
                )
            if not told:
                self._tell(f"no worker is connected to the dask scheduler at {self._address}; waiting for one")
                told = True

    def _has_workers(self) -> bool:
        try:
            return bool(self._client.nthreads(callback_timeout=TELL_AFTER_S))
        except (OSError, TimeoutError):
            return True  # the scheduler does not answer: the client finds out, and cancels all, if it is gone


def _everywhere(path: str) -> str:
    """The path as it means the same in another folder."""
    return path if discover.is_url(path) else str(Path(path).absolute())


def _on_worker(read: Callable[[str], T], path: str) -> T | InputError:
    """In a worker: the result, or why there is none."""
    if not discover.is_url(path) and not Path(path).exists():
        return InputError(
            f"the dask worker on {platform.node()} does not see this file",
            hint="put the files where every worker has them under the same path",
            where=path,
        )
    return attempt(read, path)
