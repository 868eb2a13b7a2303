"""Where times come from: the host's clock on CPU ranks, pooled events of the compute stream on CUDA ranks."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

from bubblescope.capture.steps import Event, StepBuffer

ANCHOR_EVERY_NS = 4_000_000_000
"""elapsed_time is float32 milliseconds: up to 4 s from its anchor it is exact to a quarter of a microsecond."""

POOL_EVENTS = 16_384
"""Grown to this many on demand; three steps of 100 operations use about 1,500, with delayed weight gradients ten
times as many."""

LATE_STEPS = 2
"""A step is resolved when this many newer ones were closed: by then the device has long passed it."""


class Timer(Protocol):
    """A source of time marks for rows that stand on the device's timeline."""

    device_type: str
    device_index: int

    def mark(self) -> Any:
        """Now, on the device's timeline; None when it cannot be taken (counted in `dropped`)."""

    def hold_stream(self, held: bool) -> None:
        """Whether marks are taken on the stream that is current now, also where another one is current later."""

    def close(self, buffer: StepBuffer) -> list[StepBuffer]:
        """Take a finished step; return those steps, oldest first, whose times are plain integers by now."""

    def drain(self, wait_s: float) -> list[StepBuffer]:
        """At the end: the remaining steps, waiting at most that long by polling."""

    def dropped(self) -> dict[str, int]:
        """{reason: marks or rows lost} since the last call."""


class HostTimer:
    """CPU ranks: the CPU is the device, a mark is `perf_counter_ns`."""

    device_type = "cpu"
    device_index = 0
    mark = staticmethod(perf_counter_ns)

    def hold_stream(self, held: bool) -> None:
        """The CPU has none."""

    def close(self, buffer: StepBuffer) -> list[StepBuffer]:
        return [buffer]

    def drain(self, wait_s: float) -> list[StepBuffer]:
        return []

    def dropped(self) -> dict[str, int]:
        return {}


class Mark:
    """An event that was recorded on the compute stream, the host time of recording, and its anchor."""

    __slots__ = ("anchor", "event", "host_ns", "since_origin_ns")

    def __init__(self, event: Any, host_ns: int, anchor: Mark | None) -> None:
        self.event = event
        self.host_ns = host_ns
        self.anchor = anchor
        self.since_origin_ns: int | None = None


class CudaTimer:
    """CUDA ranks: timing events from a pool, on the compute stream only; never synchronises.

    Times come out as origin + device time since the first event, where origin is the host time at which the first
    event was recorded. The device runs an event no earlier than the host records it, and no later than the host
    sees it done; the rows carry both host times, and the reader fits offset and drift from them.

    make_event, capturing, current_stream, clock are parameters so that tests can run where there is no GPU.
    """

    device_type = "cuda"

    def __init__(
        self,
        make_event: Callable[[], Any],
        capturing: Callable[[], bool],
        device_index: int = 0,
        pool_events: int = POOL_EVENTS,
        clock: Callable[[], int] = perf_counter_ns,
        current_stream: Callable[[], Any] = lambda: None,
    ) -> None:
        self.device_index = device_index
        self._current_stream = current_stream
        self._stream: Any = None
        self._make = make_event
        self._capturing = capturing
        self._clock = clock
        self._limit = pool_events
        self._made = 0
        # Events in reserve from the start: making one in the middle of a step costs more than taking one.
        self._free: deque[Any] = deque()
        self._grow(min(256, pool_events))
        self._anchor: Mark | None = None
        self._anchors: deque[Mark] = deque()
        self._origin_ns = 0
        self._waiting: deque[StepBuffer] = deque()
        self._lost: dict[str, int] = {}

    def _grow(self, count: int) -> None:
        for _ in range(count):
            self._free.append(self._make())
            self._made += 1

    def _lose(self, reason: str) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + 1

    def mark(self) -> Mark | None:
        if self._capturing():  # in a graph capture the record would become part of the user's graph
            self._lose("graph-capture")
            return None
        try:
            event = self._free.popleft()
        except IndexError:
            if self._made >= self._limit:
                self._lose("event-pool-empty")
                return None
            self._made += 1
            event = self._make()
        now = self._clock()
        anchor = self._anchor
        event.record(self._stream)  # None: the current one
        made = Mark(event, now, anchor)
        if anchor is None or now - anchor.host_ns > ANCHOR_EVERY_NS:
            self._anchor = made
            self._anchors.append(made)
            if anchor is None:
                self._origin_ns = now
                made.since_origin_ns = 0
        return made

    def hold_stream(self, held: bool) -> None:
        self._stream = self._current_stream() if held else None

    def close(self, buffer: StepBuffer) -> list[StepBuffer]:
        self._waiting.append(buffer)
        return self._ready(LATE_STEPS)

    def drain(self, wait_s: float) -> list[StepBuffer]:
        ready = self._ready(0)
        until = time.monotonic() + wait_s
        while self._waiting and time.monotonic() < until:
            time.sleep(0.002)
            ready += self._ready(0)
        for buffer in self._waiting:
            self._lost["not-finished-at-end"] = self._lost.get("not-finished-at-end", 0) + len(buffer.events)
        self._waiting.clear()
        return ready

    def dropped(self) -> dict[str, int]:
        lost, self._lost = self._lost, {}
        return lost

    def _ready(self, late: int) -> list[StepBuffer]:
        ready = []
        while len(self._waiting) > late:
            marks = _marks(self._waiting[0].events)
            if not all(mark.event.query() for mark in reversed(marks)):
                break
            buffer = self._waiting.popleft()
            buffer.extra["seen_ns"] = self._clock()
            self._settle(buffer, marks)
            ready.append(buffer)
        return ready

    def _settle(self, buffer: StepBuffer, marks: list[Mark]) -> None:
        for mark in marks:
            self._since_origin(mark)
        buffer.events = [self._plain(event) for event in buffer.events]
        kept = {id(mark) for mark in self._anchors}
        self._free.extend(mark.event for mark in marks if id(mark) not in kept)
        # An anchor is needed until every mark that counts from it is placed, the next anchor among them.
        newest = marks[-1].anchor if marks else None
        while newest is not None and len(self._anchors) > 1 and self._anchors[0].host_ns < newest.host_ns:
            self._free.append(self._anchors.popleft().event)

    def _since_origin(self, mark: Mark) -> int:
        """Device time since the first event. Anchors form a chain, so that no reading spans more than seconds."""
        if mark.since_origin_ns is None:
            assert mark.anchor is not None
            base = self._since_origin(mark.anchor)
            mark.since_origin_ns = base + round(mark.anchor.event.elapsed_time(mark.event) * 1e6)
        return mark.since_origin_ns

    def _plain(self, event: Event) -> Event:
        lane, start, end, _, host_end_ns, offset, labels = event
        if not isinstance(start, Mark):
            return event
        return (
            lane,
            self._origin_ns + self._since_origin(start),
            self._origin_ns + self._since_origin(end),
            start.host_ns,
            host_end_ns if host_end_ns >= 0 else end.host_ns,
            offset,
            labels,
        )


def _marks(events: list[Event]) -> list[Mark]:
    """Each mark once, in the order it was recorded."""
    found = {id(m): m for event in events for m in event[1:3] if isinstance(m, Mark)}
    return sorted(found.values(), key=lambda mark: mark.host_ns)


def cuda_timer(device_index: int) -> CudaTimer:
    """The timer of one CUDA device. Imports torch, which the job has imported already."""
    import torch

    def make() -> Any:
        return torch.cuda.Event(enable_timing=True)

    capturing = torch.cuda.is_current_stream_capturing
    return CudaTimer(make, capturing, device_index, current_stream=torch.cuda.current_stream)


def events_may_serialise() -> bool:
    """Whether timing events may make communication wait for compute in this process (pytorch#143890)."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
