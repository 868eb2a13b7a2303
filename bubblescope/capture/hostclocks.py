"""Relates the clocks of a job's hosts, once at the start and once at the end, beside the training.

Over a connection of its own to the job's store, one rank of each host asks rank 0 for the time, some times over. The
answer was given between question and reply, so half of the shortest round trip bounds the error. It runs on a thread
of its own, in the first steps, which analysis leaves out; where there are several hosts, the end of the process group
takes up to `END_S` longer. An interpreter that exits while a thread of it is blocked inside the store would abort. So
the connection is made before the thread starts, when the job has just used its store: torch goes on trying for seconds
where a store has ended. The thread polls, and `stop` ends it before the job's store ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

ROUNDS = 24
START_S = 20.0
CONNECT_S = 3.0
"""So long rank 0 answers after the start; hosts that come later are not measured then."""
END_S = 1.0


@dataclass(frozen=True)
class Reading:
    """One relation of clocks. offset_ns: to add to this host's monotonic time `at_ns` for rank 0's; half_ns: the
    most it can be wrong. reference: rank 0's host key."""

    reference: str
    at_ns: int
    offset_ns: int
    half_ns: int


class HostClocks:
    """One per recording process. `submit` takes each finished line."""

    def __init__(self, rank: int, world: int, host_key: str, submit: Callable[[dict[str, Any]], None]) -> None:
        self._rank = rank
        self._world = world
        self._host_key = host_key
        self._submit = submit
        self._store: Any = None
        self._asks = False
        self._reference = ""
        self._others = 0
        self._ended = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect, and begin the exchange of the start on a thread of its own. Never raises."""
        try:
            address = store_address()
            self._store = None if address is None else connect(address, CONNECT_S)
        except Exception:  # a store that hides, or is gone: then nothing bounds the clocks, and the reader says so
            return
        if self._store is not None:
            self._begin("start", START_S)

    def end(self) -> None:
        """The exchange of the end; returns after `END_S` at the latest, at once on a job of one host."""
        self.stop()
        if self._ended or not (self._asks or self._others):
            return
        self._ended = True
        self._begin("end", END_S).join(END_S + 0.5)
        self.stop()

    def stop(self) -> None:
        """End the thread; what it has not measured by now stays unknown. To be called before the interpreter exits."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2.0)
        self._stopping = threading.Event()

    def _begin(self, phase: str, limit_s: float) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(phase, limit_s), name="bubblescope-clock", daemon=True)
        self._thread = thread
        thread.start()
        return thread

    def _run(self, phase: str, limit_s: float) -> None:
        try:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            link = _Link(self._store, f"bubblescope/clock/{attempt}/{phase}", limit_s, self._stopping)
            asks = self._register(link) if phase == "start" else self._asks
            if self._rank == 0:
                self._answer(link, phase)
            elif asks:
                self._ask(link, phase)
        except Exception:  # timeouts, a store that is gone: the recording is then without this reading
            return

    def _register(self, link: _Link) -> bool:
        """Say which host this is; whether this is the rank that asks for it (rank 0 speaks for its own host)."""
        if self._rank == 0:
            link.set("reference", self._host_key)
        first = link.add(f"host/{self._host_key}") == 1
        if first:
            link.add("hosts")
        link.add("ranks")
        return first

    def _answer(self, link: _Link, phase: str) -> None:
        if phase == "start":
            link.wait_for("ranks", self._world)
            self._others = link.number("hosts") - 1
        if self._others:
            self._tell(phase, Reading(self._host_key, perf_counter_ns(), 0, 0))
        for number in range(1, self._others + 1):
            asking = link.get(f"queue/{number}")
            for i in range(ROUNDS):
                link.get(f"ask/{asking}/{i}")
                link.set(f"answer/{asking}/{i}", str(perf_counter_ns()))

    def _ask(self, link: _Link, phase: str) -> None:
        reference = link.get("reference") if phase == "start" else self._reference
        if reference == self._host_key:
            return
        self._asks, self._reference = True, reference
        link.set(f"queue/{link.add('queue')}", str(self._rank))
        self._tell(phase, best_of([self._round_trip(link, i) for i in range(ROUNDS)], reference))

    def _round_trip(self, link: _Link, i: int) -> tuple[int, int, int]:
        before = perf_counter_ns()
        link.set(f"ask/{self._rank}/{i}", "")
        answer = int(link.get(f"answer/{self._rank}/{i}"))
        return before, answer, perf_counter_ns()

    def _tell(self, phase: str, reading: Reading) -> None:
        self._submit({"kind": "clock", "phase": phase, **vars(reading)})


def best_of(trips: list[tuple[int, int, int]], reference: str) -> Reading:
    """The reading of the shortest round trip (asked, answered by rank 0's clock, back).

    >>> best_of([(0, 1000, 100), (200, 1130, 220)], "a")
    Reading(reference='a', at_ns=210, offset_ns=920, half_ns=11)
    """
    asked, answered, back = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (asked + back) // 2
    return Reading(reference, middle, answered - middle, (back - asked) // 2 + 1)


class _Link:
    """The keys of one exchange, with one deadline for all that is waited for, by polling."""

    def __init__(self, store: Any, prefix: str, limit_s: float, stopping: threading.Event) -> None:
        self._store = store
        self._prefix = prefix
        self._deadline = time.monotonic() + limit_s
        self._stopping = stopping

    def set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def add(self, key: str, amount: int = 1) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", amount))

    def number(self, key: str) -> int:
        return self.add(key, 0)

    def wait_for(self, key: str, number: int) -> None:
        while self.number(key) < number:
            self._pause(0.02)

    def get(self, key: str) -> str:
        """The value, once it is there: looked for without a pause at first, for the sake of short round trips."""
        name = f"{self._prefix}/{key}"
        began = time.monotonic()
        while not self._store.check([name]):
            waited = time.monotonic() - began
            self._pause(0.0 if waited < 0.002 else 0.001 if waited < 0.1 else 0.02)
        return str(self._store.get(name).decode())

    def _pause(self, seconds: float) -> None:
        if self._stopping.is_set() or time.monotonic() > self._deadline:
            raise TimeoutError
        if seconds:
            time.sleep(seconds)


def store_address() -> tuple[str, int] | None:
    """Where the job's TCP store listens; None on jobs of one process and on stores of another kind."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def connect(address: tuple[str, int], limit_s: float) -> Any:
    """A connection of our own: one serves one request at a time, and waiting on the job's would hold up the job.

    Raises OSError at once where nothing listens any more, as after the end of rank 0 in a job of srun or mpirun.
    """
    socket.create_connection(address, limit_s).close()
    dist = sys.modules["torch"].distributed
    return dist.TCPStore(*address, None, False, timedelta(seconds=limit_s), wait_for_workers=False)
