"""The pipeline's shape as the report states it, with how each fact was found."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.stats import count_distinct, usual
from bubblescope.errors import ScheduleError, UsageError
from bubblescope.model import PIPELINE_KINDS, Action, Kind, Layout, Notice
from bubblescope.model.units import NS
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.closed_form import HOLDS, closed_form
from bubblescope.replay.program import Node, Program
from bubblescope.replay.schedules import canonical, recognise

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """stages p, chunks v, microbatches m, schedule; None when unknown. orders: what each position of the first
    replica really ran. times: uniform F, I, W in seconds (B = I + W; a B that was never split counts as W = B - I
    with I = W). steps: the analysed ones that have m micro-batches and that orders are of, None = all of them.
    overruled: what the input shows of fields that the user gave otherwise."""

    stages: int | None
    chunks: int | None
    microbatches: int | None
    schedule: str | None
    data_parallel: int | None
    inferred: dict[str, str]
    orders: dict[int, list[Action]] = field(default_factory=dict)
    times: tuple[float, float, float] | None = None
    notices: tuple[Notice, ...] = ()
    passes: int = 1
    steps: Int | None = None
    overruled: dict[str, str | int] = field(default_factory=dict)

    def as_given(self, **given: str | int | None) -> Shape:
        """With the user's word for these fields, None = nothing said. What the input shows against it is kept in
        `overruled`, and noticed."""
        changes: dict[str, Any] = {name: new for name, new in given.items() if new is not None}
        overruled = {k: old for k, new in changes.items() if (old := getattr(self, k)) is not None and old != new}
        said = [
            Notice(
                "overruled",
                f"the input shows {name} {old}; {changes[name]}, as given, contradicts it and is used for the closed "
                "form only: causes and savings are those of what the input shows",
            )
            for name, old in overruled.items()
        ]
        return replace(
            self,
            **changes,
            inferred={**self.inferred, **dict.fromkeys(changes, "said by the user")},
            notices=(*self.notices, *said),
            overruled=overruled,
        )

    def holds_in(self, steps: Int) -> NDArray[np.bool_]:
        """Which of these analysed steps have `microbatches`."""
        return np.ones(len(steps), dtype=np.bool_) if self.steps is None else np.isin(steps, self.steps)

    def seen(self) -> Shape:
        """As the input shows it, with the user's word only for what it does not show."""
        return replace(self, **self.overruled)  # type: ignore[arg-type]

    def document(self) -> dict[str, Any]:
        return {
            "stages": self.stages,
            "chunks_per_gpu": self.chunks,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "data_parallel": self.data_parallel,
            "passes_per_step": self.passes,
            "inferred": dict(sorted(self.inferred.items())),
            "overruled": dict(sorted(self.overruled.items())),
        }

    @property
    def no_theory(self) -> tuple[Notice, ...]:
        """Why there is no `theory`, and what stands in for it; empty where there is one."""
        if self.theory() is not None:
            return ()
        needed = {"stages": self.stages, "micro-batches": self.microbatches, "schedule": self.schedule}
        lacking = [name for name, fact in (*needed.items(), ("times of operations", self.times)) if not fact]
        name = canonical(self.schedule) if self.schedule and _is_known(self.schedule) else "custom"
        instead = ""
        if lacking:
            why = f"it needs what is not known ({', '.join(lacking)})"
        elif name == "custom":
            why = "none is known for this order"
        else:
            why = f"that of {name} holds for {HOLDS[name]}" if name in HOLDS else f"none is known for {name}"
            m = (self.microbatches or 0) // self.passes
            times = zip(("forward", "input-grad", "weight-grad"), self.times or (), strict=True)
            options = " ".join(f"--{key} {seconds:.4g}" for key, seconds in times)
            shape = f"--schedule {name} --stages {self.stages} --microbatches {m}"
            instead = f"; bubblescope simulate {shape} {options} replays it"
        text = f"the closed form (bubble.theory) is unavailable, because {why}{instead}"
        return (Notice("theory-unavailable", text),)

    def theory(self) -> dict[str, Any] | None:
        """The schedule's closed form for equal stages with the measured mean times; None where none is known."""
        if None in (self.stages, self.microbatches, self.schedule) or self.times is None or not sum(self.times) > 0:
            return None
        forward, input_grad, weight_grad = self.times
        try:
            form = closed_form(
                self.schedule or "",
                self.stages or 0,
                (self.microbatches or 0) // self.passes,
                self.chunks or 1,
                forward=forward,
                input_grad=input_grad,
                weight_grad=weight_grad,
            )
        except (UsageError, ScheduleError):
            return None
        if form is None:
            return None
        return {
            "makespan": form.makespan,
            "fraction": form.fraction,
            "over_ideal": form.over_ideal,
            "own_span_rate": form.own_span_rate,
            "source": form.source,
        }


def stage_of(layout: Layout, rank: int) -> int | None:
    """Position of a rank in its pipeline, None when not known."""
    try:
        position = int(layout.pp[layout.index_of(rank)])
    except (KeyError, IndexError):
        return None
    return position if position >= 0 else None


def pipeline_shape(a: Attribution) -> Shape:
    """What the layout says, completed from what the replayed steps show."""
    layout = a.run.layout
    inferred = dict(layout.inferred)
    microbatches, steps = layout.microbatches, None
    mixed = mixed_microbatches(a)
    if mixed is not None:
        microbatches, steps, _ = mixed
        inferred["microbatches"] = f"{len(steps)} of the analysed steps have so many"
    elif microbatches is None and len(per_step := _microbatches_of_steps(a)[1]):
        microbatches = int(per_step[0])
        inferred["microbatches"] = "distinct micro-batches of a step"
    programs = [p for p in a.programs if steps is None or p.steps[0] in steps]
    orders = measured_orders(layout, programs[0]) if programs else {}
    schedule = layout.schedule
    if orders and not _is_known(schedule):
        found = recognise(orders, layout.stages, layout.chunks)
        if schedule is None:
            inferred["schedule"] = f"{found.how} (confidence {found.confidence:.2f})"
            schedule = found.name
        elif found.exact:
            inferred["schedule"] = f"the run calls it '{schedule}'; {found.how}"
            schedule = found.name
    return Shape(
        layout.stages,
        layout.chunks,
        microbatches,
        schedule,
        layout.data_parallel,
        inferred,
        orders,
        _times(a),
        () if mixed is None else mixed[2:],
        _passes(a, steps),
        steps,
    )


def _is_known(schedule: str | None) -> bool:
    """Whether it is the name of a schedule, or "custom"."""
    try:
        canonical(schedule or "")
    except UsageError:
        return False
    return True


def mixed_microbatches(a: Attribution) -> tuple[int, Int, Notice] | None:
    """Where the analysed steps have different numbers of micro-batches (a batch size that grows): the one that most of
    them have, of equally frequent ones the largest; the steps that have it; and what to say. None: all have the same.
    """
    steps, per_step = _microbatches_of_steps(a)
    found, times = np.unique(per_step, return_counts=True)
    if len(found) < 2:
        return None
    m = usual(per_step)
    each = ", ".join(f"{n} with {count}" for count, n in zip(found.tolist(), times.tolist(), strict=True))
    text = (
        f"the analysed steps differ in their number of micro-batches ({each}): times and causes are means over all of "
        f"them; the pipeline's shape, its closed form and what changes would save are of steps with {m} alone"
    )
    return m, steps[per_step == m], Notice("microbatches-differ", text)


def _microbatches_of_steps(a: Attribution) -> tuple[Int, Int]:
    """(analysed steps, distinct micro-batches of each); steps without any are left out."""
    ops = a.operations
    rows = np.isin(ops.kind, PIPELINE_KINDS) & (ops.microbatch >= 0) & a.main[ops.window]
    windows, counts = count_distinct(ops.window[rows], ops.microbatch[rows])
    steps, at = np.unique(a.windows.step[windows], return_inverse=True)
    most = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(most, at, counts)
    return steps, most


def _passes(a: Attribution, steps: Int | None) -> int:
    """Schedule calls per optimizer step (gradient accumulation): the recorder marks each with a STEP row. steps: those
    to look at, None = all."""
    spans = a.run.spans
    marks = np.flatnonzero((spans.kind == Kind.STEP) & (spans.step >= 0))
    marks = marks if steps is None else marks[np.isin(spans.step[marks], steps)]
    if a.run.source.format != "recording" or not len(marks):
        return 1
    pairs = spans.rank[marks].astype(np.int64) * (int(spans.step.max()) + 1) + spans.step[marks]
    return max(int(np.median(np.unique(pairs, return_counts=True)[1])), 1)


def measured_orders(layout: Layout, program: Program) -> dict[int, list[Action]]:
    """Per pipeline position of the first replica: the actions of one step, in the order they ran."""
    first = layout.replica.min(initial=0) if len(layout.replica) else 0
    orders: dict[int, list[Action]] = {}
    for node in np.flatnonzero((program.node == Node.OP) & (program.microbatch >= 0)):
        kind = Kind(int(program.kind[node]))
        if kind == Kind.LOSS:
            continue
        try:
            i = layout.index_of(int(program.rank[node]))
        except KeyError:
            continue
        if layout.replica[i] == first:
            action = Action(int(program.stage[node]), kind, int(program.microbatch[node]))
            orders.setdefault(int(layout.pp[i]), []).append(action)
    return orders


def _times(a: Attribution) -> tuple[float, float, float] | None:
    """Uniform F, I and W; from the medians of what was seen where nothing could be replayed."""
    if a.bases is None:
        return _seen_times(a)
    mean = {int(k): float(a.bases.uniform[a.bases.kind == k][0]) * NS for k in np.unique(a.bases.kind)}
    forward = mean.get(Kind.FORWARD)
    if forward is None:
        return None
    if Kind.BACKWARD_INPUT in mean and Kind.BACKWARD_WEIGHT in mean:
        return forward, mean[Kind.BACKWARD_INPUT], mean[Kind.BACKWARD_WEIGHT]
    backward = mean.get(Kind.BACKWARD, 0.0)
    return forward, backward / 2, backward / 2


def _seen_times(a: Attribution) -> tuple[float, float, float] | None:
    """Median F, I and W of the ranks that were seen: what the closed form takes as equal for all stages."""
    ops = a.operations
    length = (ops.end_ns - ops.start_ns) * NS
    of = {k: length[(ops.kind == k) & (ops.microbatch >= 0)] for k in PIPELINE_KINDS}
    median = {k: float(np.median(v)) for k, v in of.items() if len(v)}
    if Kind.FORWARD not in median:
        return None
    if Kind.BACKWARD_INPUT in median and Kind.BACKWARD_WEIGHT in median:
        return median[Kind.FORWARD], median[Kind.BACKWARD_INPUT], median[Kind.BACKWARD_WEIGHT]
    backward = median.get(Kind.BACKWARD, 0.0)
    return median[Kind.FORWARD], backward / 2, backward / 2
