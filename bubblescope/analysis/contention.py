"""Compute that runs slower while communication runs beside it: a busy-side loss, never idle (ATTRIBUTION.md §2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.algebra.intervals import rows_by
from bubblescope.analysis.windows import Windows
from bubblescope.model import Lane, Run, Spans

Int = NDArray[np.int64]
Float = NDArray[np.float64]

ALONE_NEEDED = 3
"""Launches of a kernel without communication beside it from which on their median counts as its own time."""


def contention(run: Run, windows: Windows) -> Float | None:
    """Per window, ns: time of compute kernels that overlap communication beyond the median of the same kernel (rank
    and name) running alone. Signed, because a median has two sides. None where no kernels were measured, nan for
    windows of ranks whose overlapped kernels never ran alone.

    Example: a kernel takes 10, 10, 10 µs alone and 14 µs beside an all-gather: contention 4 µs.
    """
    spans = run.spans
    if run.source.timing != "kernels":
        return None
    out = np.zeros(len(windows))
    rows = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.device >= 0))
    talk = np.flatnonzero((spans.lane == Lane.COMM) & (spans.device >= 0))
    talk_of = intervals.split_by(talk, spans.rank)
    for rank, own in intervals.split_by(rows, spans.rank).items():
        window = windows.locate(np.full(len(own), rank), spans.start_ns[own])
        beside = _overlapped(spans, own, talk_of.get(rank, talk[:0]))
        excess, known = _excess(spans.name[own], spans.end_ns[own] - spans.start_ns[own], beside)
        inside = (window >= 0) & beside
        np.add.at(out, window[inside & known], excess[inside & known])
        if inside.any() and not (inside & known).any():
            out[windows.of_rank(rank)] = np.nan
    return out


def _overlapped(spans: Spans, rows: Int, talk: Int) -> NDArray[np.bool_]:
    """Whether any of the communication kernels `talk` runs at some time of each row."""
    comm = intervals.union(spans.start_ns[talk], spans.end_ns[talk])
    low = intervals.measure_before(comm, spans.start_ns[rows])
    result: NDArray[np.bool_] = intervals.measure_before(comm, spans.end_ns[rows]) > low
    return result


def _excess(name: NDArray[np.int32], duration: Int, beside: NDArray[np.bool_]) -> tuple[Float, NDArray[np.bool_]]:
    """Duration over the median alone, and whether that median is known."""
    excess = np.zeros(len(name))
    known = np.zeros(len(name), dtype=np.bool_)
    for _, rows in rows_by(name):
        alone = rows[~beside[rows]]
        if len(alone) >= ALONE_NEEDED:
            excess[rows] = duration[rows] - np.median(duration[alone])
            known[rows] = True
    return excess, known
