"""Two runs compared: what changed per cause, with the noise of the steps beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.stats import Interval, Statistic, bootstrap, bootstrap_difference, row_mean
from bubblescope.model import Notice
from bubblescope.model.units import NS
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.causes import CAUSES
from bubblescope.report import facts, tables

if TYPE_CHECKING:
    from bubblescope.report.build import Report

Float = NDArray[np.float64]
LEVEL = 0.95
FROM_BASES = ("warmup", "cooldown", "schedule_steady", "stage_imbalance", "slow_worker")
"""These come from base times over all steps, so they do not vary from step to step; see `_widened`."""
NOTHING = 1e-9
"""Seconds: a smaller difference is rounding."""


@dataclass(frozen=True)
class Change:
    """One figure before and after; None where a run does not show it. difference: after - before. low, high: of the
    95 % interval of the difference. sure: whether that interval leaves out 0."""

    before: float | None
    after: float | None
    difference: float | None
    low: float | None
    high: float | None
    sure: bool


@dataclass(frozen=True)
class Comparison:
    """Mean seconds per GPU over the steps, of one `unit` of work; `fraction` is a ratio. The unit is a micro-batch
    where the steps of the two runs have different numbers of them (`microbatches`), else a step. step_seconds: of a
    whole step in any case. per_microbatch: the same per micro-batch, None where the unit is a step. stages: idle of
    each stage, then of each its causes. worse_fraction: how much longer a unit takes, of the unit before."""

    step_seconds: Change
    per_microbatch: Change | None
    microbatches: tuple[int, int] | None
    fraction: Change
    idle: Change
    busy: Change
    causes: dict[str, Change]
    stages: dict[int, Change]
    stage_causes: dict[int, dict[str, Change]]
    worse_fraction: float
    notices: tuple[Notice, ...] = ()

    @property
    def unit(self) -> str:
        return "step" if self.per_microbatch is None else "micro-batch"

    @property
    def unit_seconds(self) -> Change:
        return self.step_seconds if self.per_microbatch is None else self.per_microbatch

    def document(self) -> dict[str, Any]:
        """As JSON (see `bubblescope diff --help`)."""
        return {
            "unit": self.unit,
            "step_seconds": asdict(self.step_seconds),
            "step_seconds_per_microbatch": None if self.per_microbatch is None else asdict(self.per_microbatch),
            "worse_fraction": self.worse_fraction,
            "fraction": asdict(self.fraction),
            "idle": asdict(self.idle),
            "busy": asdict(self.busy),
            "causes": {name: asdict(change) for name, change in self.causes.items()},
            "stages": [
                {
                    "stage": None if stage < 0 else stage,
                    "idle": asdict(change),
                    "causes": {name: asdict(c) for name, c in self.stage_causes[stage].items()},
                }
                for stage, change in self.stages.items()
            ],
            "warnings": [{"code": n.code, "message": n.message} for n in self.notices],
        }


@dataclass(frozen=True, eq=False)
class _Steps:
    """Per step, shape (s,) or (s, causes): means over the GPUs of the step. bubble: shape (s, 2), bubble and window in
    ns, None where bubbles are unknown. known: which causes are figures at all."""

    seconds: Float
    idle: Float
    busy: Float
    bubble: Float | None
    causes: Float
    known: Mapping[str, bool]
    stage_idle: dict[int, Float]
    stage_causes: dict[int, Float]


def compare(before: Report, after: Report) -> Comparison:
    """Differences of the means over the steps, with a bootstrap over the steps of each run (Efron 1979).

    Worked example: all steps of BEFORE take 1.0 s, all of AFTER 1.2 s: difference 0.2, interval [0.2, 0.2], sure,
    worse_fraction 0.2. The same run twice: every difference 0, nothing sure. Steps of 8 micro-batches that take 0.4 s,
    then of 16 that take 0.72 s: 50 ms and 45 ms per micro-batch, worse_fraction -0.1.
    """
    counts = _different_microbatches(before, after)
    old, new = _steps(before), _steps(after)
    step = _change(old.seconds, new.seconds)
    notices = tuple(_notices(before, after, old, new, counts))
    if counts is not None:
        old, new = _per(old, counts[0]), _per(new, counts[1])
    stages = sorted(set(old.stage_idle) | set(new.stage_idle))
    return Comparison(
        step_seconds=step,
        per_microbatch=None if counts is None else _change(old.seconds, new.seconds),
        microbatches=counts,
        fraction=_change(old.bubble, new.bubble, _ratio),
        idle=_change(old.idle, new.idle),
        busy=_change(old.busy, new.busy),
        causes=_cause_changes(old, new, old.causes, new.causes),
        stages={s: _change(old.stage_idle.get(s), new.stage_idle.get(s)) for s in stages},
        stage_causes={s: _cause_changes(old, new, old.stage_causes.get(s), new.stage_causes.get(s)) for s in stages},
        worse_fraction=float(new.seconds.mean() / old.seconds.mean() - 1.0),
        notices=notices,
    )


def _steps(report: Report) -> _Steps:
    a = report.attribution
    _, seconds = tables.step_seconds(a)
    main = a.main
    steps, at = np.unique(a.windows.step[main], return_inverse=True)
    causes = (a.per_window(a.gaps.causes) * NS)[main]
    idle, busy = _seconds(a.idle.idle_ns[main]), _seconds(a.idle.busy_ns[main])
    stage = np.array([_stage(a, int(rank)) for rank in a.windows.rank[main]], dtype=np.int64)
    mean = _mean_by(at, len(steps))
    unknown = report.data["bubble"]["fraction"] is None
    rows = {int(s): np.flatnonzero(stage == s) for s in np.unique(stage)}
    return _Steps(
        seconds=seconds,
        idle=mean(idle),
        busy=mean(busy),
        bubble=None if unknown else mean(np.column_stack([a.bubble_ns, a.idle.window_ns])[main]),
        causes=mean(causes),
        known={name: report.data["causes"][name]["sure"] != "unavailable" for name in CAUSES},
        stage_idle={s: _finite(_mean_by(at[r], len(steps))(idle[r])) for s, r in rows.items()},
        stage_causes={s: _finite(_mean_by(at[r], len(steps))(causes[r])) for s, r in rows.items()},
    )


def _different_microbatches(before: Report, after: Report) -> tuple[int, int] | None:
    """Micro-batches of a step in each run, where these differ and each run has one number of them."""
    old, new = (report.data["pipeline"]["microbatches"] for report in (before, after))
    if None in (old, new) or old == new or _mixed(before) or _mixed(after):
        return None
    return old, new


def _mixed(report: Report) -> bool:
    return facts.mixed_microbatches(report.attribution) is not None


def _per(steps: _Steps, count: int) -> _Steps:
    """Each figure that is seconds, per micro-batch."""
    return replace(
        steps,
        seconds=steps.seconds / count,
        idle=steps.idle / count,
        busy=steps.busy / count,
        causes=steps.causes / count,
        stage_idle={s: values / count for s, values in steps.stage_idle.items()},
        stage_causes={s: values / count for s, values in steps.stage_causes.items()},
    )


def _seconds(ns: NDArray[np.int64]) -> Float:
    return np.asarray(ns * NS, dtype=np.float64)


def _stage(a: Attribution, rank: int) -> int:
    found = facts.stage_of(a.run.layout, rank)
    return -1 if found is None else found


def _mean_by(at: NDArray[np.int64], count: int) -> Callable[[Float], Float]:
    """Means of the rows of each step; nan for a step without any."""
    size = np.bincount(at, minlength=count).astype(np.float64)

    def mean(values: Float) -> Float:
        out = np.zeros((count, *values.shape[1:]))
        np.add.at(out, at, values)
        with np.errstate(invalid="ignore", divide="ignore"):
            result: Float = out / size.reshape(-1, *[1] * (values.ndim - 1))
        return result

    return mean


def _finite(values: Float) -> Float:
    keep = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    result: Float = values[keep]
    return result


def _ratio(rows: Float) -> Float:
    """Of (…, s, 2) the sum of the first column over that of the second: a fraction of all steps, as the report's is."""
    total = rows.sum(axis=-2)
    result: Float = total[..., 0] / total[..., 1]
    return result


def _change(before: Float | None, after: Float | None, statistic: Statistic = row_mean) -> Change:
    old = None if before is None or not len(before) else float(statistic(before))
    new = None if after is None or not len(after) else float(statistic(after))
    if old is None or new is None:
        return Change(old, new, None, None, None, False)
    interval = bootstrap_difference(before, after, statistic, level=LEVEL)  # type: ignore[arg-type]
    return Change(old, new, interval.value, interval.low, interval.high, _sure(interval))


def _sure(interval: Interval) -> bool:
    return interval.low > NOTHING or interval.high < -NOTHING


def _cause_changes(old: _Steps, new: _Steps, before: Float | None, after: Float | None) -> dict[str, Change]:
    def column(steps: _Steps, values: Float | None, i: int) -> Float | None:
        return values[:, i] if values is not None and steps.known[CAUSES[i]] else None

    noise = np.array([_relative_noise(steps.busy) for steps in (old, new)])
    changes = {name: _change(column(old, before, i), column(new, after, i)) for i, name in enumerate(CAUSES)}
    return {name: _widened(c, noise) if name in FROM_BASES else c for name, c in changes.items()}


def _relative_noise(busy: Float) -> float:
    """Half the width of the interval of the mean compute time, of that time."""
    found = bootstrap(busy, row_mean, level=LEVEL)
    return (found.high - found.low) / 2 / found.value if found.value > 0 else 0.0


def _widened(change: Change, noise: Float) -> Change:
    """A cause that is made of base times is as uncertain as these: by the relative noise of compute, not less."""
    if change.difference is None or change.low is None or change.high is None:
        return change
    half = float(np.hypot(*(noise * np.array([change.before, change.after]))))
    low, high = min(change.low, change.difference - half), max(change.high, change.difference + half)
    return replace(change, low=low, high=high, sure=_sure(Interval(change.difference, low, high)))


FEW_STEPS = 5


def _notices(before: Report, after: Report, old: _Steps, new: _Steps, counts: tuple[int, int] | None) -> list[Notice]:
    """What makes the two runs hard to compare."""
    out = []
    for name, steps in (("BEFORE", old), ("AFTER", new)):
        if len(steps.seconds) < FEW_STEPS:
            message = f"{name} has {len(steps.seconds)} analysed steps, too few to know its noise"
            out.append(Notice("few-steps", f"{message}: intervals are too narrow"))
    if _mixed(before) or _mixed(after):
        message = "the steps of a run differ in their number of micro-batches: whole steps are compared, of unlike work"
        out.append(Notice("microbatches-differ", message))
    for field in ("stages", "chunks_per_gpu", "microbatches", "schedule", "data_parallel"):
        pair = [report.data["pipeline"][field] for report in (before, after)]
        if pair[0] != pair[1]:
            message = f"{field}: {pair[0]} before, {pair[1]} after"
            if field == "microbatches" and counts is not None:
                message += "; compared per micro-batch, taken to be of the same size"
            out.append(Notice("shape-differs", message))
    for name, report in (("BEFORE", before), ("AFTER", after)):
        if not report.data["replay"]["trusted"]:
            out.append(Notice("attribution-not-trusted", f"the attribution of {name} is not to be trusted"))
    return out
