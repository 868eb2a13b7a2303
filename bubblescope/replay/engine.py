"""Replay of a schedule with given times: when each operation runs, and where each GPU stands idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.maxplus import longest_path
from bubblescope.errors import UsageError
from bubblescope.model import BACKWARD_KINDS, Action, Kind
from bubblescope.replay.dag import Dag, build_dag
from bubblescope.replay.schedules import Orders, Schedule, peak_activations

Float = NDArray[np.float64]
PHASES = ("warmup", "steady", "cooldown")


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a replay shows, in the unit of the times that went in.

    start, end: shape (ops,), beside dag.actions; an overlapped pair shares both. busy, idle, own_span: shape (p,),
    by position. phases: shape (p, 3), idle by `PHASES` (ATTRIBUTION.md §6); rows sum to idle.
    The four ratios of ATTRIBUTION.md §1: fraction = idle/makespan; over_ideal = idle/busy; own_span_rate =
    (longest own span - mean busy)/longest own span; straggler_waste = 1 - T_ideal/T, T_ideal being the makespan
    with all stages equally fast (0 when they are).
    """

    dag: Dag
    start: Float
    end: Float
    makespan: float
    busy: Float
    idle: Float
    own_span: Float
    phases: Float
    fraction: float
    over_ideal: float
    own_span_rate: float
    straggler_waste: float
    peak_activations: tuple[int, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.dag.actions


def simulate(
    orders: Orders | Schedule,
    forward: float,
    input_grad: float,
    weight_grad: float,
    comm: float = 0.0,
    scale_per_stage: Sequence[float] | None = None,
    overlapped: Mapping[int, Sequence[int]] | None = None,
) -> Simulation:
    """Replay orders with F, I, W per chunk operation (B = I + W) and `comm` per hop between positions.

    scale_per_stage: factor on all three, one per virtual stage (p·v) or one per position (p). An overlapped pair
    (a `Schedule` brings its own) takes the sum of its two operations. A send costs its GPU nothing, as in
    ATTRIBUTION.md §6: start = max(end of the operation before, end of each producer + comm).

    Raises ScheduleError for an order that cannot run, UsageError for times that make no sense.

    >>> from bubblescope.replay.schedules import make
    >>> sim = simulate(make("1F1B", 4, 8), 1, 1, 1)
    >>> sim.makespan, round(sim.fraction, 4), sim.idle.tolist(), sim.phases[1].tolist()
    (33.0, 0.2727, [9.0, 9.0, 9.0, 9.0], [5.0, 0.0, 4.0])
    """
    if isinstance(orders, Schedule):
        overlapped = overlapped or orders.overlapped
        orders = orders.orders
    _check_times(forward, input_grad, weight_grad, comm)
    dag = build_dag(orders, overlapped)
    scale = stage_scale(dag, scale_per_stage)
    duration = op_durations(dag, forward, input_grad, weight_grad, scale)
    start, end = run(dag, duration, comm)
    ideal = op_durations(dag, forward, input_grad, weight_grad, np.full_like(scale, scale.mean()))
    best = float(run(dag, ideal, comm)[1].max())
    return _measured(dag, duration, start, end, best, tuple(peak_activations(orders)))


def _check_times(forward: float, input_grad: float, weight_grad: float, comm: float) -> None:
    times = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "comm": comm}
    for what, value in times.items():
        if not (np.isfinite(value) and value >= 0):
            raise UsageError(f"the {what} time is {value}", hint="times are finite numbers, 0 or more")
    if forward + input_grad + weight_grad == 0:
        raise UsageError("forward, input-grad and weight-grad are all 0", hint="give at least one a time")


def stage_scale(dag: Dag, factors: Sequence[float] | None) -> Float:
    """One factor per virtual stage, from one per virtual stage or one per position (None = all 1)."""
    count = max((a.stage for a in dag.actions), default=-1) + 1
    if not count:
        raise UsageError("the schedule has no operations")
    if factors is None:
        return np.ones(count)
    scale = np.asarray(factors, dtype=np.float64)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise UsageError("--scale-per-stage holds a factor that is not a positive number")
    if len(scale) == count:
        return scale
    if len(scale) != len(dag.ranks):
        wanted = f"{count}" if count == len(dag.ranks) else f"{len(dag.ranks)} (per GPU) or {count} (per chunk)"
        raise UsageError(f"--scale-per-stage has {len(scale)} factors, the schedule needs {wanted}")
    by_stage = np.ones(count)
    by_stage[dag.stage] = scale[np.searchsorted(np.array(dag.ranks), dag.rank)]
    return by_stage


def op_durations(dag: Dag, forward: float, input_grad: float, weight_grad: float, scale: Float) -> Float:
    """Shape (ops,): the time of each op's kind, times its stage's factor."""
    base = np.zeros(max(Kind) + 1)
    base[Kind.FORWARD], base[Kind.BACKWARD] = forward, input_grad + weight_grad
    base[Kind.BACKWARD_INPUT], base[Kind.BACKWARD_WEIGHT] = input_grad, weight_grad
    return np.asarray(base[dag.kind] * scale[dag.stage], dtype=np.float64)


def run(dag: Dag, duration: Float, comm: float | Float = 0.0) -> tuple[Float, Float]:
    """Start and end of every op, shape of `duration`, which is (ops, …): many scenarios go at once.

    comm: added on every edge between positions; a number, or an array (edges, …) of which only those are read.
    """
    node_duration = np.zeros((dag.graph.n_nodes, *duration.shape[1:]))
    np.add.at(node_duration, dag.node, duration)
    hop = dag.hop.reshape(-1, *[1] * (duration.ndim - 1))
    start, end = longest_path(dag.graph, node_duration, np.where(hop, comm, 0.0))
    return start[dag.node], end[dag.node]


def _measured(
    dag: Dag, duration: Float, start: Float, end: Float, ideal: float, peaks: tuple[int, ...]
) -> Simulation:
    makespan = float(end.max())
    place = np.searchsorted(np.array(dag.ranks), dag.rank)
    busy: Float = np.bincount(place, weights=duration, minlength=len(dag.ranks)).astype(np.float64)
    idle: Float = makespan - busy
    first, last = np.full(len(dag.ranks), np.inf), np.full(len(dag.ranks), -np.inf)
    np.minimum.at(first, place, start)
    np.maximum.at(last, place, end)
    own_span = np.where(last >= first, last - first, 0.0)
    cost = float(own_span.max())
    return Simulation(
        dag=dag,
        start=start,
        end=end,
        makespan=makespan,
        busy=busy,
        idle=idle,
        own_span=own_span,
        phases=idle_phases(dag, start, end),
        fraction=float(idle.mean()) / makespan,
        over_ideal=float(idle.sum() / busy.sum()),
        own_span_rate=(cost - float(busy.mean())) / cost,
        straggler_waste=1.0 - ideal / makespan,
        peak_activations=peaks,
    )


def idle_phases(dag: Dag, start: Float, end: Float) -> Float:
    """Idle time per position and phase, shape (p, 3), by position of the gap (ATTRIBUTION.md §6).

    Before the first backward starts: warm-up; after the last forward ends: cool-down; between: steady. Where the
    last forward ends before the first backward starts (GPipe), the gap between is split at the end of the last
    forward of the last stage: cool-down before it, warm-up after it.
    """
    makespan = float(end.max())
    kind, forward = dag.kind, dag.kind == Kind.FORWARD
    backward = np.isin(kind, [int(k) for k in BACKWARD_KINDS])
    drained = float(end[forward & (dag.stage == dag.stage.max())].max(initial=0.0))
    rows = []
    for rank in dag.ranks:
        mine = dag.rank == rank
        first_backward = float(start[mine & backward].min(initial=makespan))
        last_forward = float(end[mine & forward].max(initial=0.0))
        gap_start = np.concatenate(([0.0], end[mine]))
        gap_end = np.concatenate((start[mine], [makespan]))
        regions = _regions(first_backward, last_forward, drained, makespan)
        rows.append([sum(_overlap(gap_start, gap_end, low, high) for low, high in regions[p]) for p in PHASES])
    return np.array(rows, dtype=np.float64).reshape(-1, len(PHASES))


def _regions(
    first_backward: float, last_forward: float, drained: float, makespan: float
) -> dict[str, list[tuple[float, float]]]:
    if last_forward > first_backward:
        return {
            "warmup": [(0.0, first_backward)],
            "steady": [(first_backward, last_forward)],
            "cooldown": [(last_forward, makespan)],
        }
    split = min(max(drained, last_forward), first_backward)
    return {
        "warmup": [(0.0, last_forward), (split, first_backward)],
        "steady": [],
        "cooldown": [(last_forward, split), (first_backward, makespan)],
    }


def _overlap(gap_start: Float, gap_end: Float, low: float, high: float) -> float:
    length = np.minimum(gap_end, high) - np.maximum(gap_start, low)
    return float(np.maximum(length, 0.0).sum())
