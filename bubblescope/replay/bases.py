"""What an operation takes when nothing goes wrong: worker, stage and uniform bases (ATTRIBUTION.md §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.intervals import rows_by
from bubblescope.algebra.stats import pearson
from bubblescope.model import PIPELINE_KINDS, Kind
from bubblescope.replay.program import Node, Program

Int = NDArray[np.int64]
Float = NDArray[np.float64]

PEARSON_IS_MICROBATCH = 0.9
"""From this within-worker correlation of forward and backward times on, it is the micro-batches that differ."""


@dataclass(frozen=True, eq=False)
class BaseTable:
    """Shape (t,), one row per (rank, stage, kind), sorted by these, in ns: worker, stage and uniform base.

    microbatch_bound: the micro-batches themselves differ in size, so bases are means and the spread is called
    microbatch imbalance; otherwise bases are medians and the spread is transient.
    pearson: median over workers of the correlation of F and B times; nan when it cannot be computed.
    """

    rank: Int
    stage: Int
    kind: Int
    worker: Float
    by_stage: Float
    uniform: Float
    microbatch_bound: bool
    pearson: float

    def lookup(self, program: Program) -> Int:
        """Row of this table per node of the program, -1 for nodes that are no pipeline operation."""
        height, width = int(max(self.stage.max(initial=0), program.stage.max(initial=0))) + 2, max(Kind) + 2

        def key(rank: Int, stage: Int, kind: Int) -> Int:
            code: Int = (rank * height + stage + 1) * width + kind + 1
            return code

        own = key(self.rank, self.stage, self.kind)  # ascending, as the rows are sorted
        row = np.full(len(program.rank), -1, dtype=np.int64)
        ops = np.flatnonzero(program.node == Node.OP)
        if not len(own):
            return row
        wanted = key(program.rank[ops], program.stage[ops], program.kind[ops])
        place = np.minimum(np.searchsorted(own, wanted), len(own) - 1)
        row[ops] = np.where(own[place] == wanted, place, -1)
        return row


SCALED_KINDS = (*PIPELINE_KINDS, Kind.LOSS)


def find_bases(programs: Sequence[Program]) -> BaseTable:
    """Bases over all steps of all programs.

    worker = median (or mean, see `BaseTable`) over (micro-batch, step); stage = median over the data-parallel
    replicas; uniform = mean over all operations of a kind, so that the work of the job stays what it was. The
    loss belongs to the forward of the stage that computes it: equalised, its time is spread with the forwards.
    """
    samples = [_samples(p) for p in programs]
    rank, stage, kind, microbatch, step, duration = (np.concatenate(c) for c in zip(*samples, strict=True))
    correlation = _within_worker_pearson(rank, stage, kind, microbatch, step, duration)
    bound = bool(correlation >= PEARSON_IS_MICROBATCH)
    key = np.column_stack([rank, stage, kind]).astype(np.int64)
    keys, where = np.unique(key, axis=0, return_inverse=True)
    centre = np.mean if bound else np.median
    groups = rows_by(where.reshape(-1))
    worker = np.array([centre(duration[rows]) for _, rows in groups], dtype=np.float64)
    count = np.array([len(rows) for _, rows in groups], dtype=np.float64)
    by_stage = _stage_base(keys, worker)
    uniform = _uniform(keys[:, 2], by_stage, count)
    return BaseTable(keys[:, 0], keys[:, 1], keys[:, 2], worker, by_stage, uniform, bound, correlation)


def _samples(program: Program) -> tuple[NDArray[np.generic], ...]:
    rows = np.flatnonzero((program.node == Node.OP) & np.isin(program.kind, SCALED_KINDS))
    k = len(program.steps)
    columns = [np.repeat(c[rows], k) for c in (program.rank, program.stage, program.kind, program.microbatch)]
    return (*columns, np.tile(program.steps, len(rows)), program.duration[rows].reshape(-1))


def _stage_base(keys: Int, worker: Float) -> Float:
    """Median over the ranks that run the same (stage, kind): of an even number the lower one of the two in the middle,
    as the mean of a slow GPU and its only replica would be no time of either, and book half of it as imbalance."""
    out = np.empty(len(worker))
    where = np.unique(keys[:, 1:], axis=0, return_inverse=True)[1].reshape(-1)
    for _, rows in rows_by(where):
        out[rows] = np.sort(worker[rows])[(len(rows) - 1) // 2]
    return out


def _uniform(kind: Int, by_stage: Float, count: Float) -> Float:
    out = np.zeros(len(kind))
    for value, rows in rows_by(kind):
        if value != Kind.LOSS:
            extra = kind == Kind.LOSS if value == Kind.FORWARD else np.zeros(len(kind), dtype=np.bool_)
            total = (by_stage[rows] * count[rows]).sum() + (by_stage[extra] * count[extra]).sum()
            out[rows] = total / count[rows].sum()
    return out


def _within_worker_pearson(rank: Int, stage: Int, kind: Int, microbatch: Int, step: Int, duration: Float) -> float:
    """Median over (rank, stage) of Pearson(F, B) over (step, micro-batch), B = B or I + W.

    A worker whose times do not vary counts as 0: one slow operation on one stage is no property of the
    micro-batch, a long micro-batch is long on every stage.
    """
    values = []
    for _, rows in rows_by(rank * (int(stage.max(initial=0)) + 1) + stage):
        unit = step[rows] * (int(microbatch.max(initial=0)) + 2) + microbatch[rows]
        where = np.unique(unit, return_inverse=True)[1].reshape(-1)
        n = int(where.max()) + 1
        forward = np.bincount(where, duration[rows] * (kind[rows] == Kind.FORWARD), n)
        backward_rows = ~np.isin(kind[rows], (Kind.FORWARD, Kind.LOSS))
        backward = np.bincount(where, duration[rows] * backward_rows, n)
        both = (forward > 0) & (backward > 0)
        if both.sum() >= 3:
            value = pearson(forward[both], backward[both])
            values.append(value if np.isfinite(value) else 0.0)
    return float(np.median(values)) if values else float("nan")
