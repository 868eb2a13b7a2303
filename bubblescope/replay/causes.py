"""Every gap gets its causes: nested replays of the same order, subtracted gap by gap (ATTRIBUTION.md §6).

Each replay gives each gap (before an operation, and after the last one) a length. The difference between two
neighbouring replays is what the removed cause did to that gap; what is left in R6 is intrinsic to the schedule.
The sum over the replays telescopes, so per gap, per GPU and per phase the causes sum exactly to what R0 says, and
what R0 says differently from the measurement is `unexplained`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.analysis.operations import COOLDOWN, SPLIT, STEADY, WARMUP
from bubblescope.model import Kind
from bubblescope.replay.bases import BaseTable
from bubblescope.replay.program import Edge, Node, Program
from bubblescope.replay.scenario import NESTED, Fix, Replayed, replay

Int = NDArray[np.int64]
Float = NDArray[np.float64]

CAUSES = (
    "warmup",
    "cooldown",
    "schedule_steady",
    "stage_imbalance",
    "slow_worker",
    "transient",
    "microbatch_imbalance",
    "p2p_transfer",
    "exposed_collective",
    "optimizer",
    "host_launch",
    "data_loading",
    "unexplained",
)
"""Exclusive and exhaustive, in the order in which every view prints them."""

INTRINSIC_CAUSES = ("warmup", "cooldown", "schedule_steady")
"""What the schedule itself costs: only another schedule or more micro-batches recover it."""

OUTSIDE_PIPELINE = ("exposed_collective", "optimizer", "host_launch", "data_loading")
"""Causes that would idle a GPU without any pipeline; the rest of the idle time is the bubble."""

_INTRINSIC = dict(zip((WARMUP, COOLDOWN, STEADY), INTRINSIC_CAUSES, strict=True))


@dataclass(frozen=True, eq=False)
class GapFrame:
    """The gaps of a program, shape (g,): `before` is the OP node that ends the gap (-1: the window's end), `after`
    the node before it (an OP or the BEGIN). phase: WARMUP, STEADY or COOLDOWN. part: 0 the whole gap; of a gap
    that is split at the end of the last forward of the last stage, 1 the part before and 2 the part after it.
    rank_row: row of `Program.ranks`. last_forward: shape (g,), the OP node of the last forward of the last stage of
    the gap's own pipeline."""

    rank: Int
    after: Int
    before: Int
    phase: Int
    part: Int
    rank_row: Int
    last_forward: Int


@dataclass(frozen=True, eq=False)
class Decomposition:
    """frame: the gaps. causes: shape (g, K, c), ns, signed, in the order of `CAUSES`; `unexplained` without what only
    the measured idle time shows. modelled: shape (g, K), what R0 says; = causes summed. replays: makespan of
    R0, R1a … R6, each (K,), by `Fix` name ("measured" first). ideal: the replay R6."""

    frame: GapFrame
    causes: Float
    modelled: Float
    makespans: dict[str, Float]
    ideal: Replayed


def gap_frame(program: Program, phase_of: Int) -> GapFrame:
    """Gaps of each rank in order. phase_of: shape (n_operations,), `Operations.phase`."""
    keep = np.flatnonzero(np.isin(program.node, (Node.BEGIN, Node.OP)))
    rank = program.rank[keep]
    last = np.append(rank[1:] != rank[:-1], True)
    before = np.append(keep[1:], -1)
    before[last] = -1
    phase = np.full(len(keep), COOLDOWN)
    inner = before >= 0
    phase[inner] = phase_of[program.operation[before[inner], 0]]
    part = np.where(phase == SPLIT, 1, 0)
    order = np.arange(len(keep))
    split = np.flatnonzero(phase == SPLIT)
    order = np.sort(np.append(order, split), kind="stable")
    second = np.append(False, order[1:] == order[:-1])
    part = np.where(second, 2, part[order])
    phase = np.where(part == 1, COOLDOWN, np.where(part == 2, WARMUP, phase[order]))
    rank = rank[order]
    rows = np.searchsorted(program.ranks, rank)
    last_forward = _last_forward_of(program)[rows] if len(split) else np.zeros(len(rows), dtype=np.int64)
    return GapFrame(rank, keep[order], before[order], phase, part, rows, last_forward)


def gap_bounds(program: Program, frame: GapFrame, run: Replayed) -> tuple[Float, Float]:
    """Start and end of every gap in a replay, each (g, K)."""
    u = run.end[frame.after]
    window_end = run.makespan - program.trim[frame.rank_row]
    v = np.where((frame.before >= 0)[:, None], run.start[frame.before], window_end)
    if (frame.part > 0).any():
        low, high = np.minimum(u, v), np.maximum(u, v)
        # §6: where GPipe's gap turns from cooldown into warmup.
        cut = np.clip(run.end[frame.last_forward], low, high)
        u, v = (
            np.where((frame.part == 2)[:, None], cut, u),
            np.where((frame.part == 1)[:, None], cut, v),
        )
    return u, v


def _last_forward_of(program: Program) -> Int:
    """Per row of `Program.ranks`: the last forward node of the last stage among the ranks it exchanges messages with,
    directly or not (its own data-parallel replica)."""
    n = len(program.ranks)
    group = np.arange(n)
    m = program.messages
    ends = np.unique(
        np.column_stack([np.searchsorted(program.ranks, program.rank[x]) for x in (m.send, m.recv)]), axis=0
    )
    while True:
        least = np.minimum(group[ends[:, 0]], group[ends[:, 1]])
        new = group.copy()
        np.minimum.at(new, ends[:, 0], least)
        np.minimum.at(new, ends[:, 1], least)
        if (new == group).all():
            break
        group = new
    forward = np.flatnonzero((program.node == Node.OP) & (program.kind == Kind.FORWARD))
    last = forward[program.stage[forward] == program.stage[forward].max(initial=-1)]
    row = np.searchsorted(program.ranks, program.rank[last])
    found = np.full(n, last[-1] if len(last) else 0)
    found[group[row]] = last
    return found[group]


def decompose(program: Program, bases: BaseTable, phase_of: Int) -> Decomposition:
    """Nested replays R0 … R6 and their differences per gap.

    Worked example (§10), 1F1B p=4 m=8 F=1 B=2, last stage twice as slow, mean over the GPUs: makespan 57 = useful
    30 + intrinsic 11.25 + stage imbalance 15.75.
    """
    frame = gap_frame(program, phase_of)
    causes = np.zeros((len(frame.rank), len(program.steps), len(CAUSES)))
    run = replay(program, bases)
    u, v = gap_bounds(program, frame, run)
    modelled = before = v - u
    makespans = {"measured": run.makespan}
    done: list[Fix] = []
    for fix in NESTED:
        if fix is Fix.AWAITED and not (program.edge == Edge.AWAIT).any():
            continue
        done.append(fix)
        run = replay(program, bases, done)
        u, v = gap_bounds(program, frame, run)
        causes[:, :, CAUSES.index(cause_of(fix, bases))] += before - (v - u)
        before = v - u
        makespans[fix.value] = run.makespan
    for phase, name in _INTRINSIC.items():
        rows = frame.phase == phase
        causes[rows, :, CAUSES.index(name)] += before[rows]
    return Decomposition(frame, causes, modelled, makespans, run)


def cause_of(fix: Fix, bases: BaseTable) -> str:
    """The user-facing name of what a fix removes."""
    if fix is Fix.SPREAD and bases.microbatch_bound:
        return "microbatch_imbalance"
    return fix.value
