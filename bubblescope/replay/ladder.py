"""The readiness ladder: one gap, carved by what the rank was waiting for (ATTRIBUTION.md §5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.replay.causes import GapFrame
from bubblescope.replay.program import Node, Program

Int = NDArray[np.int64]
Float = NDArray[np.float64]

RUNGS = ("upstream", "peer_host", "late_recv", "transfer", "own_host")


@dataclass(frozen=True, eq=False)
class Ladder:
    """rungs: shape (g, K, 5), ns, in the order of `RUNGS`; they sum to the gap exactly. culprit: shape (g, K), the
    OP node at the other end that the gap waited for, -1 when it waited for nobody. taken: shape (g, K), the gap
    waited for the peer to take a message (a blocking send), not for an input."""

    rungs: Float
    culprit: Int
    taken: NDArray[np.bool_]


def carve(program: Program, frame: GapFrame, u: Float, v: Float) -> Ladder:
    """Carve gaps [u, v) (shape (g, K), measured) at the times at which their last message became ready.

    Worked example: stage 2 idles [100, 110) before B5. Stage 3 ends B5 at 108.7 (its send is posted at once, the
    receive was posted at 100), and the payload is there at 109: upstream 8.7, transfer 0.3, own host 1.0.
    """
    gaps, k = u.shape
    rungs = np.zeros((gaps, k, len(RUNGS)))
    culprit = np.full((gaps, k), -1, dtype=np.int64)
    taken = np.zeros((gaps, k), dtype=np.bool_)
    ladder = _candidates(program, frame)
    times = [u] * 4
    if len(ladder.gap):
        best = _last_message(ladder, program, gaps)
        has = best >= 0
        column = np.arange(k)[None, :]
        rows = np.maximum(best, 0)
        ready = [np.where(has, c[rows, column], -np.inf) for c in _times(ladder, program)]
        times = []
        floor = u
        for t in ready:
            floor = np.clip(np.maximum(floor, t), u, v)
            times.append(floor)
        culprit = np.where(has, ladder.culprit[rows], -1)
        taken = has & ladder.taken[rows]
    edges = [u, *times, v]
    for i in range(len(RUNGS)):
        rungs[:, :, i] = edges[i + 1] - edges[i]
    return Ladder(rungs, culprit, taken)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Messages that a gap waited for: gap row, the far post, the near post, the wait, the culprit, direction."""

    gap: Int
    far: Int
    near: Int
    wait: Int
    culprit: Int
    taken: NDArray[np.bool_]


def _candidates(program: Program, frame: GapFrame) -> _Candidates:
    m = program.messages
    gap_of = _gap_of_node(program, frame)
    previous = _previous_operation(program)
    # A send kernel beside the chain holds up no operation by itself.
    sends = np.flatnonzero((m.send_wait >= 0) & (program.node[m.send_wait] == Node.WAIT))
    far_op = np.where(m.producer >= 0, m.producer, previous[m.send])
    parts = [
        (gap_of[m.wait], m.send, m.recv, m.wait, far_op, np.zeros(len(m.wait), np.bool_)),
        (
            gap_of[m.send_wait[sends]],
            m.recv[sends],
            m.send[sends],
            m.send_wait[sends],
            previous[m.recv[sends]],
            np.ones(len(sends), np.bool_),
        ),
    ]
    columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
    keep = columns[0] >= 0
    return _Candidates(*(c[keep] for c in columns))


def _gap_of_node(program: Program, frame: GapFrame) -> Int:
    """The gap row in which each chain node lies (of a split gap the last part)."""
    n = len(program.rank)
    starts = np.full(n, -1, dtype=np.int64)
    starts[frame.after] = np.arange(len(frame.after))
    chain = program.node != Node.GROUP
    return np.where(chain, _carry_forward(starts, program.rank), -1)


def _previous_operation(program: Program) -> Int:
    """The last OP node at or before each node on the same rank, -1 when none."""
    own = np.where(program.node == Node.OP, np.arange(len(program.rank)), -1)
    return _carry_forward(own, program.rank)


def _carry_forward(values: Int, rank: Int) -> Int:
    """Each -1 replaced by the last value before it on the same rank."""
    index = np.where(values >= 0, np.arange(len(values)), -1)
    last = np.maximum.accumulate(index)
    good = (last >= 0) & (rank[np.maximum(last, 0)] == rank)
    return np.where(good, values[np.maximum(last, 0)], -1)


def _times(c: _Candidates, program: Program) -> tuple[Float, Float, Float, Float]:
    """A, S, R = max(S, own post), Q of §5 for each candidate, (q, K)."""
    far_end = np.where((c.culprit >= 0)[:, None], program.end[c.culprit], -np.inf)
    far = program.start[c.far]
    return far_end, far, np.maximum(far, program.start[c.near]), program.end[c.wait]


def _last_message(c: _Candidates, program: Program, gaps: int) -> Int:
    """Per gap and step the candidate whose wait ended last (inputs before sends), -1 when there is none."""
    ready = np.maximum(program.start[c.far], program.start[c.near])
    best = np.full((gaps, ready.shape[1]), -1, dtype=np.int64)
    end = program.end[c.wait]
    for k in range(ready.shape[1]):
        order = np.lexsort((~c.taken, ready[:, k], end[:, k], c.gap))
        best[c.gap[order], k] = order
    return best
