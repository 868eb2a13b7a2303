"""What another order, partition or number of micro-batches would take: re-generated and replayed (§7).

The model of a run is small: base times per virtual stage, one transfer time per direction, what the host takes
around each operation, and `fixed`: what the measured step takes beyond the replay of its own order with these
(optimizer, data, reductions). A change is predicted as the replay of the new order plus `fixed`, never as a ratio of
closed forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.errors import ScheduleError
from bubblescope.model import Action, Kind
from bubblescope.model.units import NS
from bubblescope.replay import engine
from bubblescope.replay.bases import BaseTable
from bubblescope.replay.dag import build_dag
from bubblescope.replay.program import Edge, Node, Program
from bubblescope.replay.schedules import Schedule, make, stage_ranks

Float = NDArray[np.float64]
DEFERRING = ("torch", "torchtitan")
"""Frameworks that run torch's pipeline stages: see `PipelineModel.first_defers`."""


@dataclass(frozen=True, eq=False)
class PipelineModel:
    """Seconds. forward, input_grad, weight_grad: shape (p·v,), per virtual stage and micro-batch; the loss counts as
    forward of the stage that computes it. split_known: I and W were measured, not halves of B. act, grad: transfer
    of one message. overhead: of the host around each operation (launching, posting messages), whatever its length.
    first_defers: the first stage does nothing for I and the whole backward for W, as torch does. fixed: per step.
    measured: the step as it was."""

    stages: int
    chunks: int
    microbatches: int
    orders: Mapping[int, Sequence[Action]]
    overlapped: Mapping[int, Sequence[int]]
    forward: Float
    input_grad: Float
    weight_grad: Float
    split_known: bool
    act: float
    grad: float
    overhead: float
    first_defers: bool
    fixed: float
    measured: float

    @property
    def virtual_stages(self) -> int:
        return len(self.forward)


def calibrate(
    programs: Sequence[Program],
    bases: BaseTable,
    orders: Mapping[int, Sequence[Action]],
    measured: float,
    framework: str | None = None,
) -> PipelineModel | None:
    """The model of a measured run, None when its order cannot be replayed on its own.

    measured: mean seconds per step. framework: as in `Layout`.
    """
    n = max((a.stage for order in orders.values() for a in order), default=-1) + 1
    if n == 0 or not programs:
        return None
    forward, input_grad, weight_grad, known = _stage_times(bases, n)
    act, grad = _transfer(programs, grad=False), _transfer(programs, grad=True)
    microbatches = max(a.microbatch for order in orders.values() for a in order) + 1
    model = PipelineModel(
        len(orders), max(n // max(len(orders), 1), 1), microbatches, orders, {},
        forward, input_grad, weight_grad, known, act, grad, _overhead(programs), framework in DEFERRING, 0.0, measured,
    )  # fmt: skip
    try:
        own = makespan(model, orders)
    except ScheduleError:
        return None
    return replace(model, fixed=measured - own)


def _stage_times(bases: BaseTable, n: int) -> tuple[Float, Float, Float, bool]:
    table = {(int(s), int(k)): float(t) * NS for s, k, t in zip(bases.stage, bases.kind, bases.by_stage, strict=True)}

    def of(kind: Kind) -> Float:
        return np.array([table.get((s, int(kind)), 0.0) for s in range(n)])

    forward = of(Kind.FORWARD) + of(Kind.LOSS)
    input_grad, weight_grad = of(Kind.BACKWARD_INPUT), of(Kind.BACKWARD_WEIGHT)
    whole = of(Kind.BACKWARD)
    known = bool((input_grad + weight_grad).sum() > 0)
    if not known:
        return forward, whole / 2, whole / 2, False
    # torch's first stage has an empty I, its W does both; a stage that only ever ran B tells the sum.
    only_whole = (input_grad + weight_grad == 0) & (whole > 0)
    share = input_grad.sum() / (input_grad + weight_grad).sum()
    input_grad = np.where(only_whole, whole * share, input_grad)
    weight_grad = np.where(only_whole, whole * (1 - share), weight_grad)
    return forward, input_grad, weight_grad, True


def _transfer(programs: Sequence[Program], *, grad: bool) -> float:
    """Median seconds of the transfers that were seen, 0 when none was."""
    seen = [p.messages.transfer[p.messages.is_grad == grad][p.messages.exact[p.messages.is_grad == grad]]
            for p in programs]  # fmt: skip
    values = np.concatenate([s.reshape(-1) for s in seen]) if seen else np.empty(0)
    return float(np.median(values)) * NS if len(values) else 0.0


def _overhead(programs: Sequence[Program]) -> float:
    """Seconds of the host per pipeline operation: gaps before it and its messages, posting, and what waits took
    beyond their messages; of each the median over the steps, so that a hiccup is none of it."""
    spent = count = 0.0
    for p in programs:
        op = (p.node == Node.OP) & (p.microbatch >= 0)
        message = np.isin(p.node, (Node.POST, Node.WAIT))
        led = (p.edge == Edge.CHAIN) & (op | message)[p.dst] & (p.node[p.src] != Node.BEGIN)
        host = p.delay[led] - p.data[led]
        typical = np.median(host, axis=1).sum() + np.median(p.duration[message], axis=1).sum()
        spent += float(typical) * len(p.steps)
        count += int((op & (p.kind != Kind.LOSS)).sum()) * len(p.steps)
    return spent / count * NS if count else 0.0


def makespan(
    model: PipelineModel,
    orders: Mapping[int, Sequence[Action]],
    overlapped: Mapping[int, Sequence[int]] | None = None,
) -> float:
    """Seconds from the first to the last operation of the orders, with the model's times. Raises ScheduleError."""
    dag = build_dag(dict(orders), overlapped)
    input_grad, weight_grad = model.input_grad.copy(), model.weight_grad.copy()
    if model.first_defers and len(input_grad):
        weight_grad[0] += input_grad[0]
        input_grad[0] = 0.0
    table = {
        Kind.FORWARD: model.forward,
        Kind.BACKWARD_INPUT: input_grad,
        Kind.BACKWARD_WEIGHT: weight_grad,
        Kind.BACKWARD: model.input_grad + model.weight_grad,
    }
    duration = np.array([table[a.kind][a.stage] for a in dag.actions]) + model.overhead
    forward_node = np.zeros(dag.graph.n_nodes, dtype=np.bool_)
    forward_node[dag.node[dag.kind == Kind.FORWARD]] = True
    comm = np.where(forward_node[dag.graph.dst], model.act, model.grad)
    return float(engine.run(dag, duration, comm)[1].max())


def predict(model: PipelineModel, schedule: Schedule) -> float:
    """Seconds per step when `schedule` runs the same model: base times resampled to its virtual stages."""
    return makespan(resample(model, schedule.virtual_stages), schedule.orders, schedule.overlapped) + model.fixed


def on_slow_gpus(model: PipelineModel, schedule: Schedule) -> PipelineModel:
    """As `resample`, but uneven stages are taken as uneven GPUs: each GPU keeps what it takes per micro-batch, and
    spreads it over the chunks that `schedule` gives it.

    With one replica a heavy stage and a slow GPU look the same; moving layers mends the one and not the other.
    """
    then, now = stage_ranks(schedule.orders), stage_ranks(dict(model.orders))
    chunks = np.bincount([then[s] for s in range(len(then))], minlength=model.stages)

    def kept(times: Float) -> Float:
        per_gpu = np.bincount([now[s] for s in range(len(times))], weights=times, minlength=model.stages)
        return np.array([per_gpu[then[s]] / chunks[then[s]] for s in range(len(then))])

    return replace(
        model, forward=kept(model.forward), input_grad=kept(model.input_grad), weight_grad=kept(model.weight_grad)
    )


def predict_on_slow_gpus(model: PipelineModel, schedule: Schedule) -> float:
    """As `predict`, if the unevenness lies in the GPUs."""
    return makespan(on_slow_gpus(model, schedule), schedule.orders, schedule.overlapped) + model.fixed


def resample(model: PipelineModel, n: int) -> PipelineModel:
    """The same layers cut into `n` equal virtual stages instead of the measured number.

    Layers are taken as even within a measured stage: two stages of 2 and 4 s become four of 1, 1, 2 and 2 s.
    """
    return replace(
        model,
        forward=_resample(model.forward, n),
        input_grad=_resample(model.input_grad, n),
        weight_grad=_resample(model.weight_grad, n),
    )


def _resample(times: Float, n: int) -> Float:
    """Integrate the piecewise constant density of `times` over n equal parts."""
    if len(times) == n:
        return times
    edges = np.linspace(0, 1, len(times) + 1)
    total = np.concatenate(([0.0], np.cumsum(times)))
    return np.diff(np.interp(np.linspace(0, 1, n + 1), edges, total))


def balanced(model: PipelineModel) -> PipelineModel:
    """Every virtual stage at the mean: the continuous bound of any partition."""

    def even(times: Float) -> Float:
        return np.full_like(times, times.mean())

    return replace(
        model,
        forward=even(model.forward),
        input_grad=even(model.input_grad),
        weight_grad=even(model.weight_grad),
    )


def same_order(model: PipelineModel, name: str, microbatches: int) -> Schedule:
    """The run's own schedule with another number of micro-batches. Raises ScheduleError, UsageError."""
    return make(name, model.stages, microbatches, model.chunks)
