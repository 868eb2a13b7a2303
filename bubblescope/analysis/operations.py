"""Operations: the units a pipeline schedule is made of, from recorded spans or from labelled kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.analysis.windows import Windows
from bubblescope.model import BACKWARD_KINDS, PIPELINE_KINDS, Kind, Lane, Run

Int = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Operations:
    """Shape (n,), sorted by window (so by rank, then step), then start; those of one window never overlap.

    window: row of `Windows`. kind, stage, chunk, microbatch: as in `Spans`. start_ns, end_ns: from the first to
    the last kernel of the operation, cut where the next one begins.
    phase: 0 warmup, 1 steady, 2 cooldown, of the gap *before* the operation; 3 = that gap is split (GPipe).
    """

    window: Int
    kind: Int
    stage: Int
    chunk: Int
    microbatch: Int
    start_ns: Int
    end_ns: Int
    phase: Int

    def __len__(self) -> int:
        return len(self.window)

    @property
    def opens(self) -> NDArray[np.bool_]:
        """Whether the operation is the first of its window."""
        return np.append(True, self.window[1:] != self.window[:-1])[: len(self)]


WARMUP, STEADY, COOLDOWN, SPLIT = 0, 1, 2, 3
PHASES = ("warmup", "steady", "cooldown")


def find_operations(run: Run, windows: Windows) -> Operations:
    """Group the COMPUTE spans inside windows into operations.

    Spans that share (window, kind, stage, microbatch) with a known microbatch are one operation; spans without
    one (optimizer, unlabelled kernels) are one operation as long as nothing else comes in between.
    """
    spans = run.spans
    rows = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.device >= 0) & (spans.end_ns > spans.start_ns))
    window = windows.locate(spans.rank[rows].astype(np.int64), spans.start_ns[rows])
    rows, window = rows[window >= 0], window[window >= 0]
    order = np.lexsort((spans.end_ns[rows], spans.start_ns[rows], window))
    rows, window = rows[order], window[order]
    key = np.column_stack([window, spans.kind[rows], spans.stage[rows], spans.microbatch[rows]]).astype(np.int64)
    group = _group(key, spans.microbatch[rows] >= 0)
    first = np.unique(group, return_index=True)[1]
    start, end = _extent(group, spans.start_ns[rows], spans.end_ns[rows])
    back = np.lexsort((start, window[first]))
    first, start, end = first[back], start[back], end[back]
    w = window[first]
    start, end = _untangle(windows.rank[w], start, end)
    src = rows[first]
    kind = spans.kind[src].astype(np.int64)
    return Operations(
        w,
        kind,
        spans.stage[src].astype(np.int64),
        spans.chunk[src].astype(np.int64),
        spans.microbatch[src].astype(np.int64),
        start,
        end,
        _phases(w, kind),
    )


def _group(key: Int, known: NDArray[np.bool_]) -> Int:
    """Group number per row: equal keys where the microbatch is known, runs of equal keys elsewhere."""
    if not len(key):
        return np.empty(0, dtype=np.int64)
    opens = np.append(True, (key[1:] != key[:-1]).any(axis=1))
    heads, run_number = np.flatnonzero(opens), np.cumsum(opens) - 1
    tag = np.column_stack([key[heads], np.where(known[heads], 0, np.arange(len(heads)) + 1)])
    order = np.lexsort(tag.T[::-1])
    differs = np.append(False, (tag[order[1:]] != tag[order[:-1]]).any(axis=1))
    number = np.empty(len(heads), dtype=np.int64)
    number[order] = np.cumsum(differs)
    result: Int = number[run_number]
    return result


def _extent(group: Int, start: Int, end: Int) -> tuple[Int, Int]:
    n = int(group.max()) + 1 if len(group) else 0
    low = np.full(n, np.iinfo(np.int64).max)
    high = np.full(n, np.iinfo(np.int64).min)
    np.minimum.at(low, group, start)
    np.maximum.at(high, group, end)
    return low, high


def _untangle(rank: Int, start: Int, end: Int) -> tuple[Int, Int]:
    """Operations of one rank may overlap (streams, threads): the later one begins where the earlier ended."""
    new_start, new_end = start.copy(), end.copy()
    for r in np.unique(rank):
        rows = slice(int(np.searchsorted(rank, r, "left")), int(np.searchsorted(rank, r, "right")))
        reach = np.maximum.accumulate(end[rows])
        new_start[rows][1:] = np.maximum(start[rows][1:], reach[:-1])
        new_end[rows] = np.maximum(end[rows], new_start[rows])
    return new_start, new_end


def _phases(window: Int, kind: Int) -> Int:
    """Phase of the gap before each operation (ATTRIBUTION.md §6), by its place among the window's operations."""
    n = len(window)
    index = np.arange(n)
    count = int(window.max()) + 1 if n else 0
    first_backward = np.full(count, n)
    last_forward = np.full(count, -1)
    backward = np.isin(kind, BACKWARD_KINDS)
    np.minimum.at(first_backward, window[backward], index[backward])
    forward = kind == Kind.FORWARD
    np.maximum.at(last_forward, window[forward], index[forward])
    b, f = first_backward[window], last_forward[window]
    phase = np.where(index <= b, WARMUP, np.where(index > f, COOLDOWN, STEADY))
    between = (f < b) & (index > f) & (index <= b) & (b < n)
    return np.where(between, SPLIT, phase).astype(np.int64)


def is_pipeline(kind: Int) -> NDArray[np.bool_]:
    return np.isin(kind, PIPELINE_KINDS)
