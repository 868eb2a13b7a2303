"""What every labelling pass asks of a Run: when a row was issued, and which range stood around it."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.ingest.steps import OPTIMIZER_KERNEL
from bubblescope.model import Kind, Lane, Run

__all__ = ["AUTOGRAD", "OPTIMIZER_KERNEL", "around", "backward_evidence", "issue_time", "launched", "name_mask"]

Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

AUTOGRAD = "autograd::engine::evaluate_function"


def issue_time(run: Run) -> Int:
    """When the host issued each row: the start of its launch, else its own start."""
    at = run.spans.start_ns.copy()
    launch = run.links.launch
    if len(launch):
        at[launch[:, 1]] = run.spans.start_ns[launch[:, 0]]
    return at


def launched(run: Run) -> Mask:
    """Rows whose issue time is a host time: host rows, rows with a known launch, everything on a CPU rank."""
    known = run.spans.device < 0
    if run.source.timing != "kernels":
        return np.ones(len(run.spans), dtype=np.bool_)
    if len(run.links.launch):
        known[run.links.launch[:, 1]] = True
    return known


def around(start: Int, end: Int, at: Int) -> Int:
    """For each time the last-begun range [start, end) that holds it, -1 when none; `start` ascending.

    Ranges may nest or cross; the innermost of up to eight candidates is found.

    >>> import numpy as np
    >>> around(np.array([0, 2, 10]), np.array([9, 4, 12]), np.array([1, 3, 5, 9, 11])).tolist()
    [0, 1, 0, -1, 2]
    """
    row = np.searchsorted(start, at, side="right") - 1
    found = np.full(len(at), -1, dtype=np.int64)
    for _ in range(8):
        open_ = (found < 0) & (row >= 0)
        if not open_.any():
            break
        hit = open_ & (end[np.maximum(row, 0)] > at)
        found[hit] = row[hit]
        row = np.where(open_ & ~hit, row - 1, row)
    return found


def name_mask(run: Run, rows: Int, wanted: re.Pattern[str] | str) -> Mask:
    """Rows whose name matches: a prefix when `wanted` is text, a search when it is an expression."""
    used = np.unique(run.spans.name[rows])
    table = np.zeros(len(run.names), dtype=np.bool_)
    for i in used.tolist():
        text = run.names[i]
        table[i] = text.startswith(wanted) if isinstance(wanted, str) else wanted.search(text) is not None
    result: Mask = table[run.spans.name[rows]]
    return result


def backward_evidence(run: Run, at: Int, sure: Mask) -> NDArray[np.int8]:
    """Per row -1 when autograd's engine issued it, +1 when a host that runs autograd issued it elsewhere, else 0.

    A GPU kernel is of the backward pass when its launch lies in an engine call on the launching thread; an
    operator of a CPU rank when it is such a call itself.
    """
    spans = run.spans
    sense = np.zeros(len(spans), dtype=np.int8)
    compute = np.flatnonzero((spans.lane == Lane.COMPUTE) & sure)
    if run.source.timing != "kernels":
        backward = name_mask(run, compute, AUTOGRAD)
        for _, mine in intervals.rows_by(spans.rank[compute]):
            if backward[mine].any():
                sense[compute[mine]] = np.where(backward[mine], -1, 1)
        return sense
    engine = np.flatnonzero(spans.where(lane=Lane.HOST, kind=Kind.HOST))
    engine = engine[name_mask(run, engine, AUTOGRAD)]
    thread = np.full(len(spans), -1, dtype=np.int64)
    launch = run.links.launch
    if len(launch) == 0 or len(engine) == 0:
        return sense
    thread[launch[:, 1]] = spans.stream[launch[:, 0]]
    compute_of = intervals.split_by(compute, spans.rank)
    for rank, theirs in intervals.split_by(engine, spans.rank).items():
        mine = compute_of.get(rank, compute[:0])
        sense[mine] = 1
        for tid in np.unique(spans.stream[theirs]).tolist():
            calls = theirs[spans.stream[theirs] == tid]
            calls = calls[np.argsort(spans.start_ns[calls], kind="stable")]
            rows = mine[thread[mine] == tid]
            inside = around(spans.start_ns[calls], spans.end_ns[calls], at[rows]) >= 0
            sense[rows[inside]] = -1
    return sense
