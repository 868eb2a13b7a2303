"""What was lost so far: sums that only grow, one GPU step counted exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bubblescope.cost.prices import SECONDS_PER_HOUR
from bubblescope.model.units import NS
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.causes import CAUSES
from bubblescope.report.facts import stage_of

Float = NDArray[np.float64]

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Upper edges of the step duration histogram, seconds: from a demo on a laptop to the largest jobs."""


def net(causes: Float) -> Float:
    """Signed causes as amounts that may be added to a counter: shape (w, c) in and out, same sum in each row.

    A negative cause says that the GPU idles less than it would without it. In each row it is taken off the positive
    ones in proportion, so that what is left is 0 or more and still sums to the idle time.

    >>> net(np.array([[6.0, 3.0, -3.0], [1.0, 0.0, 0.0]])).tolist()
    [[4.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    """
    positive = np.maximum(causes, 0.0)
    whole = positive.sum(axis=1, keepdims=True)
    left = np.maximum(causes.sum(axis=1, keepdims=True), 0.0)
    kept: Float = positive * np.divide(left, whole, out=np.zeros_like(whole), where=whole > 0)
    return kept


@dataclass
class GpuTotals:
    """Seconds of one GPU. idle: shape (c,), by cause, sums to window - busy."""

    stage: int | None
    steps: int = 0
    window: float = 0.0
    busy: float = 0.0
    idle: Float = field(default_factory=lambda: np.zeros(len(CAUSES)))


@dataclass
class Totals:
    """Everything counted so far. buckets: steps of at most `BUCKETS` seconds, not cumulated, the last one beyond.

    lost_s: GPU seconds lost to pipeline bubbles, or idle with one stage, and in steps where bubbles could not be told
    from other idle time. first_step: the first that was counted, -1 before any.
    """

    gpus: dict[int, GpuTotals] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    steps: int = 0
    step_seconds: float = 0.0
    lost_s: float = 0.0
    window_s: float = 0.0
    first_step: int = -1

    @property
    def lost_gpu_hours(self) -> float:
        return self.lost_s / SECONDS_PER_HOUR

    def add(self, a: Attribution, after: int, last: int) -> None:
        """Add the steps after `after` up to `last` of every GPU; warm-up steps count nowhere."""
        w = a.windows
        rows = np.flatnonzero((w.step > after) & (w.step <= last) & ~np.isin(w.step, _warmup(a)))
        if not len(rows):
            return
        causes = a.per_window(a.gaps.causes)[rows] * NS
        self._add_gpus(a, rows, net(causes))
        unknown = ~a.replayed[rows] | (a.run.layout.stages == 1)
        lost = np.where(unknown, a.idle.idle_ns[rows], a.bubble_ns[rows]) * NS
        self.lost_s += float(np.maximum(lost, 0.0).sum())
        self.window_s += float(a.idle.window_ns[rows].sum()) * NS
        self._add_steps(a, rows)

    def _add_gpus(self, a: Attribution, rows: NDArray[np.int64], idle: Float) -> None:
        for i, row in enumerate(rows):
            rank = int(a.windows.rank[row])
            gpu = self.gpus.setdefault(rank, GpuTotals(None))
            stage = stage_of(a.run.layout, rank)
            gpu.stage = gpu.stage if stage is None else stage
            gpu.steps += 1
            gpu.window += float(a.idle.window_ns[row]) * NS
            gpu.busy += float(a.idle.busy_ns[row]) * NS
            gpu.idle += idle[i]

    def _add_steps(self, a: Attribution, rows: NDArray[np.int64]) -> None:
        steps, where = np.unique(a.windows.step[rows], return_inverse=True)
        lengths = np.bincount(where, a.idle.window_ns[rows] * NS) / np.bincount(where)
        for seconds in lengths:
            self.buckets[int(np.searchsorted(BUCKETS, seconds))] += 1
        self.steps += len(steps)
        self.step_seconds += float(lengths.sum())
        if self.first_step < 0:
            self.first_step = int(steps[0])


def only_warmup(a: Attribution) -> bool:
    """Whether nothing but warm-up steps was there to be analysed."""
    return bool(np.isin(a.windows.step, _warmup(a)).all())


def _warmup(a: Attribution) -> list[int]:
    return [int(step) for step in a.run.source.details.get("warmup_steps", ())]
