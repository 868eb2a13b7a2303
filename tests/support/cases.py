"""Small reports of known runs, made without any process, for tests of what is built on reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bubblescope.model import Action
from bubblescope.model.layers import LayerTime
from bubblescope.report.build import Report, ReportOptions, build
from tests.support.synthetic import Duration, Job, constant, make_run

MS = 1_000_000


def report(job: Job | None = None, duration: Duration | None = None, options: ReportOptions | None = None) -> Report:
    """1F1B p=4 m=8, F = 10 ms, B = 20 ms, last stage twice as slow, unless said otherwise."""
    chosen = job or Job(steps=6, optimizer=1 * MS)
    return build(make_run(chosen, duration or constant(10 * MS, 20 * MS, {3: 2.0})), options or ReportOptions())


def noisy(scale: dict[int, float], seed: int = 0, spread: float = 0.02) -> Duration:
    """Constant durations with a relative spread, the same for the same seed."""
    random = np.random.default_rng(seed)
    base = constant(10 * MS, 20 * MS, scale)

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        return max(1, round(base(step, replica, rank, action) * (1 + spread * float(random.standard_normal()))))

    return duration


def layers(*per_stage: int) -> tuple[LayerTime, ...]:
    """So many equal layers on each stage, F = 2.5 ms and B = 5 ms each, 1 GiB each."""
    return tuple(
        LayerTime(f"layers.{stage}.{i}", 0.0025, 0.005, stage, bytes=2**30)
        for stage, count in enumerate(per_stage)
        for i in range(count)
    )


def untrusted(made: Report) -> Report:
    data = {**made.data, "replay": {**made.data["replay"], "trusted": False, "error_fraction": 0.2}}
    return replace(made, data=data)
