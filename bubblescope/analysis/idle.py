"""Busy and idle per GPU and step: exact, local, needs one rank only (ATTRIBUTION.md §2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.algebra.intervals import Set
from bubblescope.analysis.windows import Windows
from bubblescope.model import Lane, Run, Spans

Int = NDArray[np.int64]

COMMUNICATION = (Lane.COMM, Lane.WAIT, Lane.POST)


@dataclass(frozen=True, eq=False)
class DeviceSets:
    """One rank's device time as interval sets; `busy` is C, the others are bare: N \\ C and M \\ (C ∪ N)."""

    busy: Set
    exposed: Set
    copies: Set


def device_sets(spans: Spans) -> DeviceSets:
    """Sets of one rank. Spans that touch no device (device -1) do not count."""
    on_device = spans.device >= 0

    def of(*lanes: Lane) -> Set:
        rows = on_device & np.isin(spans.lane, lanes)
        return intervals.union(spans.start_ns[rows], spans.end_ns[rows])

    busy = of(Lane.COMPUTE)
    exposed = intervals.subtract(of(*COMMUNICATION), busy)
    copies = intervals.subtract(of(Lane.COPY), busy, exposed)
    return DeviceSets(busy, exposed, copies)


@dataclass(frozen=True, eq=False)
class IdleTable:
    """Beside `Windows`, shape (w,), nanoseconds: window = busy + idle, idle = exposed + copies + empty."""

    window_ns: Int
    busy_ns: Int
    exposed_ns: Int
    copies_ns: Int

    @property
    def idle_ns(self) -> Int:
        return self.window_ns - self.busy_ns

    @property
    def empty_ns(self) -> Int:
        return self.window_ns - self.busy_ns - self.exposed_ns - self.copies_ns


def measure(windows: Windows, sets: dict[int, DeviceSets]) -> IdleTable:
    """Lengths of each rank's sets within each of its windows.

    Example: window [0, 100), compute [10, 40) and [50, 70), a receive kernel [40, 55): busy 50, exposed 10,
    empty 40, idle 50.
    """
    out = {name: np.zeros(len(windows), dtype=np.int64) for name in ("busy", "exposed", "copies")}
    for rank, own in sets.items():
        rows = windows.of_rank(rank)
        for name, column in out.items():
            chosen: Set = getattr(own, name)
            low = intervals.measure_before(chosen, windows.start_ns[rows])
            column[rows] = intervals.measure_before(chosen, windows.end_ns[rows]) - low
    return IdleTable(windows.end_ns - windows.start_ns, out["busy"], out["exposed"], out["copies"])


def all_sets(run: Run, ranks: Int) -> dict[int, DeviceSets]:
    """`device_sets` for each of `ranks`."""
    spans = run.spans
    order = np.argsort(spans.rank, kind="stable")
    sorted_rank = spans.rank[order]
    # Of the same type: else every search would first convert the whole column.
    wanted = ranks.astype(sorted_rank.dtype)
    bounds = zip(*(np.searchsorted(sorted_rank, wanted, side).tolist() for side in ("left", "right")), strict=True)
    return {
        int(rank): device_sets(spans.take(intervals.without_gaps(order[low:high].astype(np.int64))))
        for rank, (low, high) in zip(ranks, bounds, strict=True)
    }
