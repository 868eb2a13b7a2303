"""The readiness ladder: one gap, carved by what the rank was waiting for (ATTRIBUTION.md §5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.maxplus import deciding_edges
from bubblescope.replay.causes import GapFrame
from bubblescope.replay.program import Edge, Node, Program
from bubblescope.replay.scenario import delays

Int = NDArray[np.int64]
Float = NDArray[np.float64]

RUNGS = ("upstream", "peer_host", "late_recv", "transfer", "own_host")
_UPSTREAM, _PEER_HOST, _, _TRANSFER, _OWN_HOST = range(len(RUNGS))


@dataclass(frozen=True, eq=False)
class Ladder:
    """rungs: shape (g, K, 5), ns, in the order of `RUNGS`; they sum to the gap exactly, and are nan where the next step
    began before this one was closed, with an input from another rank. culprit: shape (g, K), the OP node at the other
    end that the gap waited for, -1 when it waited for nobody. taken: shape (g, K), the gap waited for the peer to take
    a message (a blocking send), not for an input."""

    rungs: Float
    culprit: Int
    taken: NDArray[np.bool_]


def carve(program: Program, frame: GapFrame, u: Float, v: Float) -> Ladder:
    """Carve gaps [u, v) (shape (g, K), measured) by what decided when they ended.

    A gap is followed back from its end: through own launches to the last message, carved at the times at which it
    became ready; or through a collective, or the end of the step, to an operation of the member that came last.

    Worked examples: stage 2 idles [100, 110) before B5. Stage 3 ends B5 at 108.7 (its send is posted at once, the
    receive was posted at 100), and the payload is there at 109: upstream 8.7, transfer 0.3, own host 1.0.
    Stage 3 idles [100, 141) in the norm of the gradients. Stage 0 ends B7 at 138 and joins at 140, and the norm takes
    1: upstream 38, peer host 2, transfer 1. It then idles [142, 150) until stage 0 ends the step: upstream 8.
    """
    rungs = np.empty((*u.shape, len(RUNGS)))
    culprit = np.empty(u.shape, dtype=np.int64)
    taken = np.zeros(u.shape, dtype=np.bool_)
    found = _candidates(program, frame)
    best = _last_message(found, program, len(u))
    # Both parts of a split gap wait for the same message, which lies in the second.
    first = np.flatnonzero(frame.part == 1)
    best[first] = best[first + 1]
    waits = np.append(found.wait, -1)[best]
    delay = delays(program, ())
    for k in range(u.shape[1]):
        bounds = u[:, k], v[:, k]
        rungs[:, k], culprit[:, k], came = _follow(program, frame, *bounds, waits[:, k], delay[:, k], k)
        rows = np.flatnonzero(np.isfinite(came))
        message = best[rows, k]
        low, high = (np.clip(t[rows], *(b[rows] for b in bounds)) for t in (bounds[0], came))
        edges = [low]
        for t in (*_times(found, program, message, k), high):
            edges.append(np.clip(np.maximum(edges[-1], t), low, high))
        rungs[rows, k] += np.column_stack([np.diff(edges, axis=0).T, high - edges[-1]])
        culprit[rows, k] = found.culprit[message]
        taken[rows, k] = found.taken[message]
    rungs[_unseen(program, frame)] = np.nan
    return Ladder(rungs, culprit, taken)


def _follow(
    program: Program, frame: GapFrame, u: Float, v: Float, wait: Int, delay: Float, k: int
) -> tuple[Float, Int, Float]:
    """The way back of each gap of step k: rungs (g, 5) of what was passed, the operation of another rank where it
    ended (-1 none), and when the `wait` node ended, where it ended there (else nan)."""
    end = _ends(program, delay, k)
    decides = deciding_edges(program.graph, end, delay)
    rungs = np.zeros((len(u), len(RUNGS)))
    culprit = np.full(len(u), -1, dtype=np.int64)
    came = np.full(len(u), np.nan)

    def book(gaps: Int, rung: Int | int, low: Float, high: Float) -> None:
        length = np.clip(high, u[gaps], v[gaps]) - np.clip(low, u[gaps], v[gaps])
        rungs[gaps, rung] += np.maximum(length, 0)

    node = _deciders(program, frame, end, k)
    time = end[node]
    inner = frame.before >= 0
    time[inner] = program.start[frame.before[inner], k]
    todo = np.arange(len(u))
    book(todo, _OWN_HOST, time, v)
    stays = ~inner
    while len(todo):
        n, t = node[todo], time[todo]
        own = program.rank[n] == frame.rank[todo]
        met = n == wait[todo]
        halts = met | (stays & np.isin(program.node[n], (Node.BEGIN, Node.OP))) | (decides[n] < 0)
        came[todo[met]] = t[met]
        over = halts & ~met
        book(todo[over], np.where(own, _OWN_HOST, _UPSTREAM)[over], u[todo[over]], t[over])
        other = over & ~own & (program.node[n] == Node.OP)
        culprit[todo[other]] = n[other]
        todo, n, t, own = (x[~halts] for x in (todo, n, t, own))
        edge = decides[n]
        source = program.src[edge]
        ready = np.minimum(end[source] + delay[edge], t)
        book(todo, _TRANSFER, ready, t)
        launched = program.edge[edge] == Edge.CHAIN
        time[todo] = np.minimum(end[source], ready)
        book(todo, np.where(launched, np.where(own, _OWN_HOST, _PEER_HOST), _TRANSFER), time[todo], ready)
        node[todo] = source
        stays = np.ones(len(todo), dtype=np.bool_)
    return rungs, culprit, came


def _ends(program: Program, delay: Float, k: int) -> Float:
    """The measured ends of all nodes in step k; a group ends when its last member has come."""
    end = program.end[:, k].copy()
    joins = np.flatnonzero(program.node[program.dst] == Node.GROUP)
    group = program.dst[joins]
    end[group] = -np.inf
    np.maximum.at(end, group, end[program.src[joins]] + delay[joins])
    return end


def _deciders(program: Program, frame: GapFrame, end: Float, k: int) -> Int:
    """What decided the end of each gap: its operation, or at the end of the step what closed that, on the own rank if
    it did, or if its next step began before it was closed."""
    closing = program.closing[np.lexsort((end[program.closing], program.rank[program.closing]))]
    own = closing[np.searchsorted(program.rank[closing], program.ranks, "right") - 1]
    last = closing[end[closing].argmax()]
    own = np.where((end[own] >= end[last]) | (program.trim[:, k] > 0), own, last)
    return np.where(frame.before >= 0, frame.before, own[frame.rank_row])


def _unseen(program: Program, frame: GapFrame) -> NDArray[np.bool_]:
    """The gaps, (g, K), at the end of a step that end with the next one's input, which is not part of this program."""
    ops = np.flatnonzero(program.node == Node.OP)
    first = ops[np.unique(program.rank[ops], return_index=True)[1]]
    fed = np.isin(program.ranks, program.rank[first[np.isin(first, program.messages.consumer)]])
    late: NDArray[np.bool_] = (program.trim > 0) & fed[:, None]
    return late[frame.rank_row] & (frame.before < 0)[:, None]


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


def _times(c: _Candidates, program: Program, rows: Int, k: int) -> tuple[Float, Float, Float]:
    """A, S and R = max(S, own post) of §5 for the given candidates in step k."""
    culprit, far = c.culprit[rows], program.start[c.far[rows], k]
    far_end = np.where(culprit >= 0, program.end[culprit, k], -np.inf)
    return far_end, far, np.maximum(far, program.start[c.near[rows], k])


def _last_message(c: _Candidates, program: Program, gaps: int) -> Int:
    """Per gap and step the candidate whose wait ended last (inputs before sends), -1 when there is none."""
    ready = np.maximum(program.start[c.far], program.start[c.near])
    best = np.full((gaps, ready.shape[1]), -1, dtype=np.int64)
    end = program.end[c.wait]
    for k in range(ready.shape[1]):
        order = np.lexsort((~c.taken, ready[:, k], end[:, k], c.gap))
        best[c.gap[order], k] = order
    return best
