"""Relates the clocks of a job's hosts, once at the start and once at the end, beside the training.

Rank 0 listens on a port of its own and leaves its address in the job's store. One rank of each other host asks there
for the time, some times over: the answer was given between question and reply, so half of the shortest round trip
bounds the error.

An interpreter that exits while a thread of ours is inside the store aborts, and a connection more for each rank would
use up what the store may open. So only the training thread goes there, between two steps, over the connection that the
job has, by calls that never wait; and the one key is taken out again. What waits, waits in sockets of Python's own.
Where the launcher says that all ranks are on one host, none of this happens.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

KEY = "bubblescope/clock"
ROUNDS = 24
START_S = 20.0
"""So long the ranks look for each other; hosts that come later are not measured."""
LOOK_S = 0.1
ASK_S = 3.0
END_S = 1.0
"""How long the end of the process group may take longer, where there are several hosts."""
_NOTHING = "?"
_TIME = struct.Struct("!q")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


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
        self._host_key = host_key
        self._submit = submit
        self._next_look = 0.0
        self._looks_until = 0.0 if world < 2 or one_host(world) else time.monotonic() + START_S
        self._answers: _Answers | None = None
        self._published = False
        self._asking: threading.Thread | None = None
        self._asks: _Address | None = None
        self._ended = False

    def look(self) -> None:
        """Between two steps, on the training thread: find rank 0, or be found. Never raises."""
        now = time.monotonic()
        if not self._next_look <= now < self._looks_until:
            return
        self._next_look = now + LOOK_S
        try:
            self._look()
        except Exception:  # a store that hides, or is gone: then nothing bounds the clocks, and the reader says so
            self._looks_until = 0.0

    def _look(self) -> None:
        found = store_of_job()
        if found is None:
            self._looks_until = 0.0
            return
        store, address = found
        if self._rank != 0:
            self._ask_at(store.compare_set(KEY, _NOTHING, _NOTHING).decode(), address[0])
        elif self._answers is None:
            self._answers = _Answers(address)
        elif self._answers.host is not None:
            store.set(KEY, json.dumps([self._host_key, self._answers.host, self._answers.port, self._answers.token]))
            self._published, self._looks_until = True, 0.0

    def _ask_at(self, said: str, store_host: str) -> None:
        if said == _NOTHING:
            return
        self._looks_until = 0.0
        reference, host, port, token = json.loads(said)
        if reference != self._host_key:
            address = _Address(reference, host or store_host, port, token)
            self._asking = threading.Thread(target=self._begin, args=(address,), name="bubblescope-clock", daemon=True)
            self._asking.start()

    def _begin(self, address: _Address) -> None:
        if self._ask("start", address, ASK_S):
            self._asks = address

    def _ask(self, phase: str, address: _Address, limit_s: float) -> bool:
        """Whether this rank was the one of its host to ask, and got its answers."""
        try:
            trips = ask(address, f"{address.token} {phase} {self._host_key}", limit_s)
        except (OSError, ValueError, struct.error):  # out of reach, or too late: the recording is without this reading
            return False
        if trips:
            self._submit({"kind": "clock", "phase": phase, **vars(best_of(trips, address.reference))})
        return bool(trips)

    def end(self) -> None:
        """The readings of the end; returns after about `END_S` at the latest, at once on a job of one host."""
        if self._ended:
            return
        self._ended = True
        if self._asking is not None:
            self._asking.join(END_S)
        if self._asks is not None:
            self._ask("end", self._asks, END_S)
        if self._answers is not None:
            self._answers.wait_for_end(END_S)

    def leave_store(self) -> None:
        """On the training thread: leave nothing in the job's store."""
        self._looks_until = 0.0
        if self._published:
            self._published = False
            with suppress(Exception):  # the store is gone, and the key with it
                found = store_of_job()
                if found is not None:
                    found[0].delete_key(KEY)

    def stop(self) -> None:
        """Close what is open; where another thread than the training one stops, `leave_store` comes before."""
        self.leave_store()
        if self._answers is not None:
            self._answers.close()


def best_of(trips: list[tuple[int, int, int]], reference: str) -> Reading:
    """The reading of the shortest round trip (asked, answered by rank 0's clock, back).

    >>> best_of([(0, 1000, 100), (200, 1130, 220)], "a")
    Reading(reference='a', at_ns=210, offset_ns=920, half_ns=11)
    """
    asked, answered, back = min(trips, key=lambda trip: trip[2] - trip[0])
    middle = (asked + back) // 2
    return Reading(reference, middle, answered - middle, (back - asked) // 2 + 1)


# ---- the exchange


@dataclass(frozen=True)
class _Address:
    """Where rank 0 answers, on the host `reference`, to those who know the token."""

    reference: str
    host: str
    port: int
    token: str


def ask(address: _Address, request: str, limit_s: float) -> list[tuple[int, int, int]]:
    """Round trips (asked, answered, back); none when another rank of this host has asked already.

    Raises OSError, ValueError or struct.error when the answers do not come.
    """
    ends = time.monotonic() + limit_s
    trips = []
    with socket.create_connection((address.host, address.port), limit_s) as connection:
        connection.sendall(f"{request}\n".encode())
        if _receive(connection, 1, ends) != b"1":
            return []
        for _ in range(ROUNDS):
            before = perf_counter_ns()
            connection.sendall(b"?")
            (answered,) = _TIME.unpack(_receive(connection, _TIME.size, ends))
            trips.append((before, answered, perf_counter_ns()))
    return trips


def _receive(connection: socket.socket, count: int, ends: float) -> bytes:
    connection.settimeout(max(ends - time.monotonic(), 0.001))
    return connection.recv(count)


class _Answers:
    """Tells the time to one rank of each host at a time, until closed.

    host: where it is reached, None until that is known; "" on the host of the store. Raises OSError without a port.
    """

    def __init__(self, store_address: tuple[str, int]) -> None:
        self.token = secrets.token_hex(16)
        self.host: str | None = None
        self._store_address = store_address
        self._served: dict[str, set[str]] = {"start": set(), "end": set()}
        if socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._work, name="bubblescope-clock", daemon=True).start()

    def wait_for_end(self, limit_s: float) -> None:
        """Until those who asked at the start have asked again."""
        ends = time.monotonic() + limit_s
        while self._served["start"] - self._served["end"] and time.monotonic() < ends:
            time.sleep(0.002)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, and ends what a forked child has of it
        self._listener.close()

    def _work(self) -> None:
        with suppress(OSError):  # it has been closed, or no way leads to the store
            self.host = own_address(self._store_address)  # may ask a name server
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError, ValueError):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        ends = time.monotonic() + END_S
        connection.settimeout(END_S)
        with connection.makefile("rb", buffering=0) as stream:
            token, phase, host = stream.readline(500).decode().split()
        if not secrets.compare_digest(token, self.token):
            return
        served = self._served[phase]
        connection.sendall(b"0" if host in served else b"1")
        if host not in served:
            for _ in range(ROUNDS):
                if not _receive(connection, 1, ends):
                    return
                connection.sendall(_TIME.pack(perf_counter_ns()))
            served.add(host)


def own_address(peer: tuple[str, int]) -> str:
    """By which address of this host that peer is reached; "" when it is this host. Sends nothing. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return "" if ipaddress.ip_address(own).is_loopback else own


# ---- the job


def one_host(world: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher says that all ranks of the job are on this host.

    >>> one_host(8, {"LOCAL_WORLD_SIZE": "8"}), one_host(16, {"LOCAL_WORLD_SIZE": "8"}), one_host(8, {})
    (True, False, False)
    """
    return str(world) in [environ.get(name) for name in _LOCAL_SIZES]


def store_of_job() -> tuple[Any, tuple[str, int]] | None:
    """The job's TCP store as its ranks see it, and where it listens; None without one."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    store = inner = dist.distributed_c10d._get_default_store()
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return (store, (inner.host, inner.port)) if isinstance(inner, dist.TCPStore) else None
