"""What to change, best first: each row predicted by a replay, never promised when the replay is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bubblescope.cost import prices
from bubblescope.errors import ScheduleError, UsageError
from bubblescope.model import Notice
from bubblescope.replay import whatif
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.savings import Saving
from bubblescope.replay.schedules import FAMILIES, make, peak_activations
from bubblescope.replay.whatif import PipelineModel
from bubblescope.report import tables
from bubblescope.report.facts import Shape

WORTH_TELLING = 0.005
"""Actions that save less than this share of the step are left out."""


@dataclass(frozen=True)
class Advice:
    rows: list[dict[str, Any]]
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class _Idea:
    action: str
    kind: str
    step_seconds: float
    saved_seconds: float
    detail: dict[str, Any]
    assumptions: tuple[str, ...]
    memory_note: str | None = None


def suggest(a: Attribution, shape: Shape, found: dict[str, Saving], cost: dict[str, Any], *, trusted: bool) -> Advice:
    """Ideas that save at least `WORTH_TELLING` of the step, ranked by what they save."""
    if not a.programs or a.bases is None:
        return Advice([])
    if not trusted:
        why = "the replay does not reproduce the measurement well enough, so no saving is predicted"
        return Advice([], (Notice("no-advice", why),))
    measured = float(np.mean(tables.step_seconds(a)[1]))
    model = whatif.calibrate(a.programs, a.bases, shape.orders, measured)
    ideas = [*_from_causes(a, found, measured, shape)]
    if model is not None:
        ideas += [*_more_microbatches(model, shape), *_other_schedules(model, shape)]
    ideas = [i for i in ideas if i.saved_seconds >= WORTH_TELLING * measured]
    ideas.sort(key=lambda i: -i.saved_seconds)
    notices = () if ideas else (_nothing_to_gain(measured),)
    return Advice([_row(i, cost) for i in ideas], notices)


def _nothing_to_gain(measured: float) -> Notice:
    return Notice(
        "bubble-not-the-limit",
        f"no change to the pipeline is predicted to save more than {WORTH_TELLING:.1%} of the {measured:.3g} s step: "
        "the bubble is not what holds this run back",
    )


def _row(idea: _Idea, cost: dict[str, Any]) -> dict[str, Any]:
    hours = prices.gpu_hours(idea.saved_seconds, steps=cost["total_steps"], gpus=cost["gpus"])
    return {
        "action": idea.action,
        "kind": idea.kind,
        "detail": idea.detail,
        "step_seconds": idea.step_seconds,
        "saved_seconds": idea.saved_seconds,
        "saved_gpu_hours": hours,
        "saved_money": prices.money(hours, cost["price_per_gpu_hour"]),
        "memory_note": idea.memory_note,
        "assumptions": list(idea.assumptions),
    }


def _from_causes(a: Attribution, found: dict[str, Saving], measured: float, shape: Shape) -> Iterator[_Idea]:
    """Actions that remove one cause; the saving is its first-in value."""
    same = "everything else stays as measured"
    for cause, make_idea in _FIXES.items():
        saving = found.get(cause)
        if saving is not None and saving.first_in > 0:
            action, kind, detail, assumptions = make_idea(a)
            yield _Idea(action, kind, measured - saving.first_in, saving.first_in, detail, (*assumptions, same))


def _fix_stage(a: Attribution) -> tuple[str, str, dict[str, Any], tuple[str, ...]]:
    table = tables.stage_balance(a)
    work = np.nan_to_num(table[["F_s", "B_s", "I_s", "W_s", "loss_s"]].to_numpy(dtype=np.float64)).sum(axis=1)
    worst = int(work.argmax())
    slow = int(table["stage"].iloc[worst])
    ratio = float(work[worst] / np.delete(work, worst).mean()) if len(work) > 1 else 1.0
    return (
        f"Move layers off stage {slow}: it takes {ratio:.2f}× the mean of the other stages",
        "partition",
        {"slowest_stage": slow, "slowdown": ratio, "seconds_per_microbatch": work.tolist(), "bound": "continuous"},
        ("work can be split evenly over the stages; whole layers may not allow all of it",),
    )


def _fix_worker(a: Attribution) -> tuple[str, str, dict[str, Any], tuple[str, ...]]:
    b = a.bases
    assert b is not None
    ranks = np.unique(b.rank)
    over = [float(((b.worker - b.by_stage)[b.rank == r]).sum() / b.by_stage[b.rank == r].sum()) for r in ranks]
    worst = int(np.argmax(over))
    return (
        f"Replace or inspect the node of rank {int(ranks[worst])}: it computes {over[worst]:.0%} slower than its "
        "replicas",
        "node",
        {"rank": int(ranks[worst]), "slowdown": 1 + over[worst]},
        ("every slow worker reaches the median of its stage",),
    )


def _fix_data(a: Attribution) -> tuple[str, str, dict[str, Any], tuple[str, ...]]:
    return (
        "Load data ahead: more workers or prefetching, so that no stage waits for its input",
        "input",
        {},
        ("loading can be hidden behind compute completely",),
    )


def _fix_p2p(a: Attribution) -> tuple[str, str, dict[str, Any], tuple[str, ...]]:
    return (
        "Speed up or overlap the transfers between stages",
        "communication",
        {},
        ("transfers and blocking sends cost nothing: a bound, not a forecast",),
    )


_FIXES = {
    "stage_imbalance": _fix_stage,
    "slow_worker": _fix_worker,
    "data_loading": _fix_data,
    "p2p_transfer": _fix_p2p,
}


def _more_microbatches(model: PipelineModel, shape: Shape) -> Iterator[_Idea]:
    """Twice and four times the micro-batches of the same size, counted per unit of work."""
    for factor in (2, 4):
        wanted = model.microbatches * factor
        try:
            schedule = whatif.same_order(model, shape.schedule or "", wanted)
            step = whatif.predict(model, schedule)
        except (ScheduleError, UsageError):
            continue
        yield _Idea(
            f"Run {wanted} micro-batches per step instead of {model.microbatches}, at the same size",
            "microbatches",
            step,
            model.measured - step / factor,
            {"microbatches": wanted, "step_seconds_per_same_work": step / factor},
            (
                f"the global batch grows {factor}-fold; the saving is per {model.microbatches} micro-batches",
                "what is outside the pipeline (optimizer, host, data) costs the same per step",
            ),
            _memory(model, peak_activations(schedule.orders)),
        )


def _other_schedules(model: PipelineModel, shape: Shape) -> Iterator[_Idea]:
    for name in FAMILIES:
        if name == shape.schedule:
            continue
        try:
            schedule = make(name, model.stages, model.microbatches)
            step = whatif.predict(model, schedule)
        except (ScheduleError, UsageError):
            continue
        assumptions = ["transfers cost what they cost now, also where there are more of them"]
        if schedule.virtual_stages != model.virtual_stages:
            assumptions.append(f"the layers can be cut into {schedule.virtual_stages} equal parts")
        if not model.split_known and _splits(schedule.orders):
            assumptions.append("I and W take half of B each (they were not measured apart)")
        yield _Idea(
            f"Use the {name} schedule" + (f" with {schedule.chunks} chunks per GPU" if schedule.chunks > 1 else ""),
            "schedule",
            step,
            model.measured - step,
            {"schedule": name, "chunks": schedule.chunks},
            tuple(assumptions),
            _memory(model, peak_activations(schedule.orders), schedule.chunks),
        )


def _splits(orders: dict[int, list[Any]]) -> bool:
    return any(a.kind.name == "BACKWARD_WEIGHT" for order in orders.values() for a in order)


def _memory(model: PipelineModel, peaks: list[int], chunks: int | None = None) -> str:
    """Peak activations against now, in micro-batches of one whole GPU's layers."""
    now = max(peak_activations({r: list(o) for r, o in model.orders.items()})) / model.chunks
    then = max(peaks) / (chunks or model.chunks)
    if abs(then - now) < 1e-9:
        return f"peak activations stay at {now:.3g} micro-batches"
    return f"peak activations change from {now:.3g} to {then:.3g} micro-batches on the fullest GPU"
