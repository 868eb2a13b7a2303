"""The profiler's arrows from forward to backward, as sequence numbers where the operators have none.

torch draws an arrow (``fwdbwd``) from the operator that made a node of autograd's graph to the operator that runs the
node's backward, by sequence numbers that old versions do not write themselves. What is read of a number is its order:
on the thread of the forward pass it grows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bubblescope.ingest.events import AUTOGRAD, Cat, Events, Int
from bubblescope.model import Names

CATEGORIES = ("fwdbwd", "forward_backward")
"""Of the flow events (``ph`` s and f) that are such an arrow's ends."""
_SLACK_NS = 250
"""The time of an arrow is read as a float64: since 1970, it is exact to half of this."""


def numbered(events: Events, names: Names, arrows: Int) -> Events:
    """`events` where both operators of each arrow have its number in `sequence`, and no others.

    arrows: as in `Scan`. Numbers grow with the start of the forward operator on its thread. The backward operator is
    the call of autograd's engine around the arrow's end, where that was recorded.

    >>> none = np.full(4, -1)
    >>> start, end, name, thread = np.array([[0, 10, 90, 91], [8, 18, 99, 98], [0, 0, 1, 0], [1, 1, 2, 2]])
    >>> events = Events(none + 1 + Cat.CPU_OP, start, end, name, none, thread, none, none, none, none, none)
    >>> numbered(events, Names.of(["", AUTOGRAD]), np.array([[7, 1, 1, 10], [7, 0, 2, 91]])).sequence.tolist()
    [-1, 0, 0, -1]
    """
    begins, ends = arrows[arrows[:, 1] == 1], arrows[arrows[:, 1] == 0]
    _, at, to = np.intersect1d(begins[:, 0], ends[:, 0], return_indices=True)
    operators = np.flatnonzero(events.cat == Cat.CPU_OP)
    engine = np.array([text.startswith(AUTOGRAD) for text in names.texts], dtype=np.bool_)
    calls = operators[engine[events.name[operators]]]
    forward = _around(events, operators, begins[at])
    backward = _around(events, calls, ends[to])
    backward = np.where(backward >= 0, backward, _around(events, operators, ends[to]))
    known = (forward >= 0) & (backward >= 0)
    forward, backward = forward[known], backward[known]
    order = np.lexsort((forward, events.start_ns[forward], events.tid[forward]))
    forward, backward = forward[order], backward[order]
    number = np.cumsum(np.diff(forward, prepend=forward[:1]) != 0)
    sequence = np.full(len(events), -1, dtype=np.int64)
    sequence[backward] = number
    sequence[forward] = number
    return replace(events, sequence=sequence)


def _around(events: Events, rows: Int, ends: Int) -> Int:
    """For each end of an arrow the last begun of `rows` on its thread that runs at its time; -1 where none does."""
    found = np.full(len(ends), -1, dtype=np.int64)
    for thread in np.unique(ends[:, 2]).tolist():
        mine = rows[events.tid[rows] == thread]
        if not len(mine):
            continue
        mine = mine[np.lexsort((-events.end_ns[mine], events.start_ns[mine]))]
        at = np.flatnonzero(ends[:, 2] == thread)
        when = ends[at, 3]
        place = np.searchsorted(events.start_ns[mine], when + _SLACK_NS, side="right") - 1
        row = mine[np.maximum(place, 0)]
        runs = (place >= 0) & (events.end_ns[row] >= when)
        found[at[runs]] = row[runs]
    return found
