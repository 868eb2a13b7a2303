"""Changes to a run, each predicted by a replay: what `advice` and `bubblescope whatif` choose from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.errors import InputError, ScheduleError, UsageError
from bubblescope.model.layers import LayerTime
from bubblescope.model.notice import counted
from bubblescope.replay import whatif
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.repartition import Repartition, coverage, measured_layers, repartition, unexplained
from bubblescope.replay.savings import savings
from bubblescope.replay.schedules import FAMILIES, Schedule, make, peak_activations
from bubblescope.replay.whatif import PipelineModel
from bubblescope.report import tables
from bubblescope.report.facts import Shape

WORTH_SAYING = 0.01
"""Share of the step below which two predictions count as one."""
EVEN = "work can be split evenly over the stages"
ONE_REPLICA = "stage {} is slow because of its layers, not its GPU: with one replica the two look the same"


@dataclass(frozen=True)
class Idea:
    """One change. step_seconds: predicted. saved_seconds: per step of the work that a step does now."""

    action: str
    kind: str
    step_seconds: float
    saved_seconds: float
    detail: dict[str, Any]
    assumptions: tuple[str, ...]
    memory_note: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A change that was asked for and cannot be predicted."""

    action: str
    why: str


@dataclass(frozen=True, eq=False)
class Basis:
    """What predictions start from. measured: mean seconds of the steps that the shape holds in; step_share: how many of
    the analysed ones these are. first_in: seconds that fixing one cause alone saves, by cause. model: None when the
    measured order cannot be replayed on its own. layers: of the whole model, None when nobody timed them, or not enough
    of each stage. covered: the share of each virtual stage that recorded layers take, None without any."""

    attribution: Attribution
    shape: Shape
    measured: float
    step_share: float
    first_in: Mapping[str, float]
    model: PipelineModel | None
    layers: Sequence[LayerTime] | None = None
    memory_limit: float | None = None
    covered: NDArray[np.float64] | None = None
    found: list[Refusal] = field(default_factory=list)


def basis(
    a: Attribution,
    shape: Shape,
    first_in: Mapping[str, float],
    layers: Sequence[LayerTime] | None = None,
    memory_limit: float | None = None,
) -> Basis:
    """first_in: over all steps; found anew where the shape holds in some of them only. layers: from a file; else those
    that the recording timed."""
    assert a.bases is not None
    number, seconds = tables.step_seconds(a)
    holds = shape.holds_in(number)
    measured = float(np.mean(seconds[holds]))
    programs = [p for p in a.programs if shape.holds_in(p.steps).all()]
    if shape.steps is not None:
        first_in = {cause: saving.first_in for cause, saving in savings(programs, a.bases).items()}
    model = whatif.calibrate(programs, a.bases, shape.orders, measured, a.run.layout)
    covered = None
    seen = a.run.source.details.get("layer_times")
    if layers is None and model is not None and seen:
        layers, covered = measured_layers(model, seen), coverage(model, seen)
    return Basis(a, shape, measured, float(np.mean(holds)), first_in, model, layers, memory_limit, covered)


# --- one cause removed ------------------------------------------------------------------------------------------

SAME = "everything else stays as measured"


def replace_node(b: Basis) -> Iterator[Idea]:
    """The slowest replica of a stage reaches the median of the stage."""
    saved = b.first_in.get("slow_worker", 0.0)
    slowdown = tables.slowdowns(b.attribution)
    worst = max(slowdown, key=lambda rank: slowdown[rank], default=-1)
    if saved <= 0 or slowdown.get(worst, 0.0) < tables.UNEVEN:
        return
    yield Idea(
        f"Replace or inspect the node of rank {worst}: it takes {slowdown[worst]:.2f}× the other replicas of its stage",
        "node",
        b.measured - saved,
        saved,
        {"rank": worst, "slowdown": slowdown[worst]},
        ("every slow worker reaches the median of its stage", SAME),
    )


def fix_input(b: Basis) -> Iterator[Idea]:
    saved = b.first_in.get("data_loading", 0.0)
    if saved > 0:
        yield Idea(
            "Load data ahead: more workers or prefetching, so that no stage waits for its input",
            "input",
            b.measured - saved,
            saved,
            {},
            ("loading can be hidden behind compute completely", SAME),
        )


def faster_transfers(b: Basis) -> Iterator[Idea]:
    saved = b.first_in.get("p2p_transfer", 0.0)
    if saved > 0:
        yield Idea(
            "Speed up or overlap the transfers between stages",
            "communication",
            b.measured - saved,
            saved,
            {},
            ("transfers and blocking sends cost nothing: a bound, not a forecast", SAME),
        )


# --- the partition ----------------------------------------------------------------------------------------------


def rebalance(b: Basis) -> Iterator[Idea]:
    """The best cut of whole layers where their times are known, else the continuous bound. Where no cut is possible,
    this is noted in `found`."""
    saved = b.first_in.get("stage_imbalance", 0.0)
    uneven = _unevenness(b.attribution)
    if uneven is None:
        return
    slow, ratio, work = uneven
    detail = {"slowest_stage": slow, "slowdown": ratio, "seconds_per_microbatch": work}
    assumptions = _one_replica(b, slow)
    try:
        cut = best_cut(b)
    except InputError as error:
        b.found.append(Refusal("Move layers between stages", str(error)))
        return
    if cut is None:
        if saved > 0 and ratio >= tables.UNEVEN:
            yield Idea(
                f"Move layers off stage {slow}: it takes {ratio:.2f}× the mean of the other stages",
                "partition",
                b.measured - saved,
                saved,
                {**detail, "bound": "continuous"},
                (EVEN, needs_layers(b), *assumptions, SAME),
            )
        return
    assert b.model is not None
    step = whatif.makespan(cut.model, b.model.orders) + b.model.fixed
    best = cut.partition
    yield Idea(
        f"Give the {'virtual ' if b.model.chunks > 1 else ''}stages {', '.join(map(str, best.layers))} layers: now "
        f"stage {slow} takes {ratio:.2f}× the mean of "
        "the others",
        "partition",
        step,
        b.measured - step,
        {**detail, "bound": "integer", **cut_detail(cut), "continuous_step_seconds": b.measured - saved},
        (*cut_assumptions(b, cut), *assumptions, SAME),
        _cut_memory(cut),
    )


def _one_replica(b: Basis, slow: int) -> tuple[str, ...]:
    return (ONE_REPLICA.format(slow),) if b.attribution.replicas < 2 else ()


def best_cut(b: Basis, virtual_stages: int | None = None) -> Repartition | None:
    """None when layers are not known. Raises InputError when no cut fits."""
    if b.model is None or not b.layers:
        return None
    return repartition(b.model, b.layers, b.memory_limit, virtual_stages)


def needs_layers(b: Basis) -> str:
    """What a bound takes for granted as long as no whole cut can be given, and why none can."""
    why = "needs per-layer times: record with layer timers or give --layer-times"
    if b.covered is not None and (stage := unexplained(b.covered)) is not None:
        why = (
            f"cannot be told: the layers that were timed take only {b.covered[stage]:.0%} of stage {stage}'s time; "
            "give --layer-times"
        )
    return f"whole layers allow as good a cut (the best whole cut {why})"


def cut_detail(cut: Repartition) -> dict[str, Any]:
    best = cut.partition
    return {
        "layers": list(best.layers),
        "cuts": list(best.cuts),
        "stage_seconds": list(best.stage_times),
        "slowest_seconds": best.slowest,
        "bound_seconds": best.bound,
        "memory_bytes": None if best.memory is None else [float(x) for x in best.memory],
    }


def cut_assumptions(b: Basis, cut: Repartition) -> tuple[str, ...]:
    said = ["a layer takes the same time on every stage; embedding and head stay where they are"]
    if b.covered is not None:
        first, last = b.covered[0], b.covered[-1]
        said.append(
            f"the layers that were timed take {first:.0%} of the first and {last:.0%} of the last stage's time; the "
            "rest stays there"
        )
    if abs(cut.scale - 1) > 0.05:
        said.append(f"the layers' times, which add up to {1 / cut.scale:.0%} of the measured work, are scaled to it")
    return tuple(said)


def _cut_memory(cut: Repartition) -> str:
    if cut.partition.memory is None:
        return "moved layers take their weights and activations with them; no memory limit was checked"
    return f"the fullest stage needs {max(cut.partition.memory) / 2**30:.3g} GiB for its layers, within the limit"


def _unevenness(a: Attribution) -> tuple[int, float, list[float]] | None:
    """The slowest stage (GPU of the pipeline, all its chunks together), how often it takes the mean of the others, and
    seconds per micro-batch of each."""
    table = tables.stage_balance(a)
    slowest = tables.slowest_stage(table)
    return None if slowest is None else (*slowest, list(tables.position_work(table).values()))


# --- other orders -----------------------------------------------------------------------------------------------


def more_microbatches(b: Basis, counts: Iterable[int]) -> Iterator[Idea]:
    """Another number of micro-batches of the same size, counted per unit of work."""
    if b.model is None:
        return
    now = b.model.microbatches
    for wanted in counts:
        batches = "micro-batch" if wanted == 1 else "micro-batches"
        action = f"Run {wanted} {batches} per step instead of {now}, at the same size"
        if wanted == now:
            b.found.append(Refusal(f"Run {wanted} {batches} per step", "that is the number of this run"))
            continue
        try:
            schedule = whatif.same_order(b.model, b.shape.schedule or "custom", wanted)
            step = whatif.predict(b.model, schedule)
        except (ScheduleError, UsageError) as error:
            b.found.append(Refusal(action, str(error)))
            continue
        per_work = step * now / wanted
        yield Idea(
            action,
            "microbatches",
            step,
            b.measured - per_work,
            {"microbatches": wanted, "step_seconds_per_same_work": per_work},
            (
                f"the global batch {'grows' if wanted > now else 'shrinks'} from {now} to {wanted} {batches}; "
                f"the saving is per {counted(now, 'micro-batch', 'micro-batches')}",
                "other numbers of micro-batches, transfers and pauses of the host vary in length as the measured ones, "
                "and slow GPUs stay slow",
                "what is outside the pipeline (optimizer, reductions, what the host does before the first forward) "
                "costs the same per step; loading the data that a step waits for takes as long per micro-batch as now",
            ),
            memory_note(b.model, schedule),
        )


def one_pass(b: Basis) -> Iterator[Idea]:
    """Instead of several passes through the pipeline per optimizer step (gradient accumulation) a single one: it fills
    and drains once."""
    if b.model is None or not b.shape.schedule:
        return
    m, passes = b.model.microbatches, b.shape.passes
    action = f"Run the {m} micro-batches of a step in one pass instead of {passes}"
    try:
        schedule = whatif.same_order(b.model, b.shape.schedule, m)
        step = whatif.predict(b.model, schedule)
    except (ScheduleError, UsageError) as error:
        b.found.append(Refusal(action, str(error)))
        return
    detail = {"microbatches": m, "passes": 1}
    note = memory_note(b.model, schedule)
    yield Idea(action, "microbatches", step, b.measured - step, detail, (SAME,), note)


def other_schedules(b: Basis, names: Iterable[str] = tuple(FAMILIES), *, balanced: bool = False) -> Iterator[Idea]:
    """The same work in another order; with `balanced`, after the layers were moved as well."""
    if b.model is None:
        return
    for name in names:
        if name == b.shape.schedule:
            if not balanced:
                b.found.append(Refusal(f"Use the {name} schedule", "that is the schedule of this run"))
            continue
        idea = _other_schedule(b, b.model, name, balanced)
        if isinstance(idea, Idea):
            yield idea
        elif not balanced:
            b.found.append(idea)


def _other_schedule(b: Basis, model: PipelineModel, name: str, balanced: bool) -> Idea | Refusal:
    action = f"Use the {name} schedule"
    try:
        schedule = make(name, model.stages, model.microbatches)
        action += f" with {schedule.chunks} chunks per GPU" if schedule.chunks > 1 else ""
        detail: dict[str, Any] = {"schedule": name, "chunks": schedule.chunks}
        assumptions = ["transfers cost what they cost now, also where there are more of them"]
        if balanced:
            model, more, said = _rebalanced(b, model, schedule.virtual_stages)
            slow = _unevenness(b.attribution)
            layers = "layers" if slow is None or slow[1] < tables.UNEVEN else f"layers off stage {slow[0]}"
            action, detail = f"Move {layers} and {action[0].lower()}{action[1:]}", detail | more
            assumptions = [*said, *assumptions]
        elif schedule.virtual_stages != model.virtual_stages:
            _check_layers(b, schedule)
            assumptions.append(f"the layers can be cut into {schedule.virtual_stages} equal parts")
        step = whatif.predict(model, schedule)
        if not balanced and b.attribution.replicas < 2:
            step, both, why = _worse_of_two(b, model, schedule, step)
            detail |= both
            assumptions += why
    except (InputError, ScheduleError, UsageError) as error:
        return Refusal(action, str(error))
    if not model.split_known and _splits(schedule):
        assumptions.append("I and W take half of B each (they were not measured apart)")
    note = memory_note(b.model or model, schedule)
    return Idea(action, "schedule", step, b.measured - step, detail, tuple(assumptions), note)


def _check_layers(b: Basis, schedule: Schedule) -> None:
    """Raises UsageError when some virtual stage would be empty."""
    free = [layer for layer in b.layers or () if not layer.pinned]
    if b.layers and len(free) < schedule.virtual_stages:
        raise UsageError(f"it needs {schedule.virtual_stages} virtual stages, and there are {len(free)} layers")


def _worse_of_two(
    b: Basis, model: PipelineModel, schedule: Schedule, if_layers: float
) -> tuple[float, dict[str, Any], list[str]]:
    """A slow stage may be slow because of its layers (another schedule spreads them) or of its GPU (it stays where it
    is). One replica cannot tell, so the worse prediction is the one that is given."""
    if_gpu = whatif.predict_on_slow_gpus(model, schedule)
    if abs(if_gpu - if_layers) < WORTH_SAYING * b.measured:
        return max(if_layers, if_gpu), {}, []
    detail = {"step_seconds_if_layers": if_layers, "step_seconds_if_gpu": if_gpu}
    said = (
        f"the worse of two cases: uneven stages are so because of their layers ({if_layers:.4g} s) or of their GPUs "
        f"({if_gpu:.4g} s); with one replica the two look the same"
    )
    return max(if_layers, if_gpu), detail, [said]


def _rebalanced(b: Basis, model: PipelineModel, n: int) -> tuple[PipelineModel, dict[str, Any], tuple[str, ...]]:
    cut, uneven = best_cut(b, n), _unevenness(b.attribution)
    alike = () if uneven is None else _one_replica(b, uneven[0])
    if cut is None:
        detail = {"rebalanced": True, "bound": "continuous"}
        said: tuple[str, ...] = (EVEN, needs_layers(b), *alike)
        return whatif.balanced(whatif.resample(model, n)), detail, said
    return cut.model, {"rebalanced": True, "bound": "integer", **cut_detail(cut)}, (*cut_assumptions(b, cut), *alike)


def _splits(schedule: Schedule) -> bool:
    return any(a.kind.name == "BACKWARD_WEIGHT" for order in schedule.orders.values() for a in order)


def memory_note(model: PipelineModel, schedule: Schedule) -> str:
    """Peak activations against now, in micro-batches of one whole GPU's layers."""
    now = max(peak_activations({r: list(o) for r, o in model.orders.items()})) / model.chunks
    then = max(peak_activations(schedule.orders)) / schedule.chunks
    if abs(then - now) < 1e-9:
        return f"peak activations stay at {now:.3g} micro-batches"
    return f"peak activations change from {now:.3g} to {then:.3g} micro-batches on the fullest GPU"
