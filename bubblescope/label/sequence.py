"""Which forward a backward belongs to, by autograd's sequence numbers.

An operator of the forward pass notes the number that the next node of the graph gets; the engine call that runs the
backward of that node notes it again (``Sequence number`` in a Kineto trace). The counter is the forward thread's own
and only grows, so a number belongs to the last forward that had begun when it was given out. A profiler's flow arrows
from forward to backward (``fwdbwd``) are drawn from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bubblescope.algebra import intervals
from bubblescope.label.evidence import Int, around
from bubblescope.model import Kind, Lane, Run

_CLEAR = 2 / 3
"""The least part of a backward's numbers that one forward must hold."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Per row of the spans: the sequence number of the operator that issued it and that operator's thread, else -1."""

    number: Int
    thread: Int

    @classmethod
    def of(cls, run: Run, at: Int) -> Numbers:
        """at: when the host issued each row. On a CPU rank the operators are the rows themselves."""
        spans = run.spans
        if run.source.timing != "kernels":
            return cls(spans.seq, spans.stream.astype(np.int64))
        number, thread = (np.full(len(spans), -1, dtype=np.int64) for _ in range(2))
        operators = np.flatnonzero(spans.where(lane=Lane.HOST, kind=Kind.HOST) & (spans.seq >= 0))
        launch = run.links.launch
        launches_of = {rank: launch[rows] for rank, rows in intervals.rows_by(spans.rank[launch[:, 0]])}
        for rank, picked in intervals.rows_by(spans.rank[operators]):
            launches = launches_of.get(rank, launch[:0])
            on_thread = {t: launches[rows] for t, rows in intervals.rows_by(spans.stream[launches[:, 0]])}
            for t, some in intervals.rows_by(spans.stream[operators[picked]]):
                calls = operators[picked][some]
                calls = calls[np.argsort(spans.start_ns[calls], kind="stable")]
                rows = on_thread.get(t, launch[:0])[:, 1]
                found = around(spans.start_ns[calls], spans.end_ns[calls], at[rows])
                rows, found = rows[found >= 0], found[found >= 0]
                number[rows], thread[rows] = spans.seq[calls[found]], t
        return cls(number, thread)


def pair(numbers: Numbers, forwards: list[Int], backwards: list[Int]) -> list[int] | None:
    """For each backward (its rows) the place of its forward among `forwards`, which are in the order they ran.

    None unless all of it is clear: forwards on one thread with growing numbers, of each backward two thirds of the
    numbers in one forward, and no forward taken twice.

    >>> import numpy as np
    >>> four = Numbers(np.array([10, 13, 14, 11]), np.array([1, 1, 2, 2]))
    >>> pair(four, [np.array([0]), np.array([1])], [np.array([2]), np.array([3])])
    [1, 0]
    """
    begins = _begins(numbers, forwards)
    if begins is None or len(forwards) != len(backwards):
        return None
    out = [most(np.searchsorted(begins, _known(numbers, rows), side="right") - 1) for rows in backwards]
    return out if sorted(out) == list(range(len(out))) else None


def forward_of(numbers: Numbers, forwards: list[Int], rows: Int) -> Int:
    """For each of `rows`, issued by backwards, the place of its forward among `forwards`, which are in the order they
    ran; -1 where it is not known.

    >>> import numpy as np
    >>> four = Numbers(np.array([10, 13, 14, -1]), np.array([1, 1, 2, 2]))
    >>> forward_of(four, [np.array([0]), np.array([1])], np.array([2, 3])).tolist()
    [1, -1]
    """
    begins = _begins(numbers, forwards)
    if begins is None:
        return np.full(len(rows), -1, dtype=np.int64)
    number = numbers.number[rows]
    result: Int = np.where(number >= 0, np.searchsorted(begins, number, side="right") - 1, -1)
    return result


def most(places: Int) -> int:
    """The place that holds a clear majority, else -1."""
    values, counts = np.unique(places, return_counts=True)
    if len(values) == 0 or counts.max() < _CLEAR * len(places):
        return -1
    return int(values[np.argmax(counts)])


def _begins(numbers: Numbers, forwards: list[Int]) -> Int | None:
    """The first number of each forward; None unless they are on one thread and grow."""
    seen = [rows[numbers.number[rows] >= 0] for rows in forwards]
    if not seen or not all(len(rows) for rows in seen):
        return None
    if len(np.unique(numbers.thread[np.concatenate(seen)])) > 1:
        return None
    begins = np.array([numbers.number[rows].min() for rows in seen])
    ends = np.array([numbers.number[rows].max() for rows in seen])
    # The last operator of a forward may have made no node: its number is the next forward's first.
    growing = not np.any(begins[1:] <= begins[:-1]) and not np.any(ends[:-1] > begins[1:])
    return begins if growing else None


def _known(numbers: Numbers, rows: Int) -> Int:
    found = numbers.number[rows]
    result: Int = found[found >= 0]
    return result
