"""From one recorded real run, what other runs will take; then those runs, for real."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bubblescope.ingest.recording import read
from bubblescope.model.layers import LayerTime
from bubblescope.replay import whatif
from bubblescope.replay.repartition import repartition
from bubblescope.replay.schedules import make
from bubblescope.replay.whatif import PipelineModel
from bubblescope.report import facts, tables
from bubblescope.report.build import Report, ReportOptions, build
from tests.support.sleeping import SleepRun, run_pipelines

LAYERS_PER_UNIT = 4
"""A stage of factor 1 stands for so many equal layers, one of factor 2 for twice as many."""


@dataclass(frozen=True)
class Outcome:
    """Seconds per step. limit: the largest allowed |predicted / measured - 1|."""

    key: str
    change: str
    predicted: float
    measured: float
    limit: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def kept(self) -> bool:
        return abs(self.error) <= self.limit


def base_run(forward_s: float = 0.020, backward_s: float = 0.040, steps: int = 6) -> SleepRun:
    """1F1B, p=4 m=8, last stage twice as slow."""
    return SleepRun("1F1B", 4, 8, forward_s, backward_s, scale={3: 2.0}, steps=steps)


def changed_runs(base: SleepRun) -> dict[str, SleepRun]:
    """The same work, changed: a twice the micro-batches, b whole layers moved, c and d other schedules.

    The base's 4, 4, 4 and 8 layers become 5 on each stage (b). With two chunks per GPU each stage's layers are cut
    in two, so virtual stages 6 and 7 of 8 are the slow ones (c, d).
    """
    half = replace(base, forward_s=base.forward_s / 2, backward_s=base.backward_s / 2, scale={6: 2.0, 7: 2.0})
    grown = 5 / 4
    return {
        "a": replace(base, microbatches=2 * base.microbatches),
        "b": replace(base, forward_s=base.forward_s * grown, backward_s=base.backward_s * grown, scale={}),
        "c": replace(half, schedule="Interleaved1F1B"),
        "d": replace(half, schedule="ZBVZeroBubble"),
    }


CHANGES = {
    "a": ("twice the micro-batches (16)", 0.05),
    "b": ("layers moved: 4, 4, 4, 8 → 5, 5, 5, 5", 0.05),
    "c": ("Interleaved1F1B, 2 chunks per GPU", 0.08),
    "d": ("ZBVZeroBubble", 0.08),
}


def run_all(folder: Path, base: SleepRun, keys: str = "abcd") -> dict[str, Report]:
    """Run the base and the chosen changes in real processes, recorded; their reports by key ("base", "a", …)."""
    runs = {"base": base, **{key: run for key, run in changed_runs(base).items() if key in keys}}
    return quiet_reports(folder, runs)


TRIES = 3
QUIET = 0.015


def quiet_reports(folder: Path, runs: dict[str, SleepRun]) -> dict[str, Report]:
    """Run and analyse each; a run in which other work on this machine cost more than `QUIET` of the step (its
    transients) is run again, and its least disturbed try counts. Sleeping takes longer on a busy machine, never
    shorter, so this favours no prediction."""
    found: dict[str, Report] = {}
    for attempt in range(TRIES):
        left = {key: run for key, run in runs.items() if key not in found or disturbed(found[key]) > QUIET}
        if not left:
            break
        with prompt_wakeups():
            paths = {key: folder / f"{key}-{attempt}" for key in left}
            run_pipelines([replace(run, out=str(paths[key])) for key, run in left.items()], timeout_s=500)
        for key, path in paths.items():
            made = build(read(path), ReportOptions())
            if key not in found or disturbed(made) < disturbed(found[key]):
                found[key] = made
    return {key: found[key] for key in runs}


def disturbed(report: Report) -> float:
    """Share of the step that single operations cost by taking longer than usual."""
    transient = report.data["causes"]["transient"]["first_in"]
    return abs(float(transient or 0.0)) / typical_step(report)


def outcomes(reports: dict[str, Report]) -> list[Outcome]:
    """Predictions from reports["base"] alone beside what the other reports measured (median step)."""
    model = model_of(reports["base"])
    predicted = predictions(model)
    return [
        Outcome(key, change, predicted[key], typical_step(reports[key]), limit)
        for key, (change, limit) in CHANGES.items()
        if key in reports
    ]


def predictions(model: PipelineModel) -> dict[str, float]:
    p, m = model.stages, model.microbatches
    cut = repartition(model, layers(model))
    assert cut.partition.layers == (5, 5, 5, 5)
    return {
        "a": whatif.predict(model, whatif.same_order(model, "1F1B", 2 * m)),
        "b": whatif.predict(cut.model, make("1F1B", p, m)),
        "c": whatif.predict(model, make("Interleaved1F1B", p, m, 2)),
        "d": whatif.predict(model, make("ZBVZeroBubble", p, m)),
    }


def layers(model: PipelineModel) -> list[LayerTime]:
    """The layers that the sleeping stages stand for: 4, 4, 4 and 8 equal ones."""
    return [LayerTime(f"layers.{i}", 1.0, 2.0) for i in range(LAYERS_PER_UNIT * (model.stages + 1))]


def model_of(report: Report) -> PipelineModel:
    a = report.attribution
    assert a.bases is not None
    measured = typical_step(report)
    orders = facts.pipeline_shape(a).orders
    model = whatif.calibrate(a.programs, a.bases, orders, measured, a.run.layout)
    assert model is not None
    return model


def typical_step(report: Report) -> float:
    return float(np.median(tables.step_seconds(report.attribution)[1]))


@contextlib.contextmanager
def prompt_wakeups() -> Iterator[None]:
    """Sleeping stages must wake on time: where we may, ahead of whatever else this machine does."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
