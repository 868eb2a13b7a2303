"""What another order, partition or number of micro-batches would take: re-generated and replayed (§7).

The model of a run: base times per virtual stage, how far each measured operation was from them, what the host took
before it and its message's transfer, and `fixed`: what the measured step takes beyond the replay of its own order with
these (optimizer, reductions, what comes before the first operation). A change is predicted as the replay of the new
order plus `fixed`, never as a ratio of closed forms.

Slow GPUs, uneven micro-batches, single long operations, pauses of the host and transfers belong to the operations, so
they come again in the new order, as often as it has operations: it is replayed for every replica, with the measured
micro-batches, one after the other, and a step ends when its slowest replica does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.intervals import rows_by
from bubblescope.errors import ScheduleError
from bubblescope.model import Action, Kind, Layout
from bubblescope.model.units import NS
from bubblescope.replay import engine
from bubblescope.replay.bases import BaseTable
from bubblescope.replay.dag import Dag, build_dag
from bubblescope.replay.program import Edge, Node, Program
from bubblescope.replay.scenario import delays, replay_with
from bubblescope.replay.schedules import Schedule, make, stage_ranks

Int = NDArray[np.int64]
Float = NDArray[np.float64]
DEFERRING = ("torch", "torchtitan")
"""Frameworks that run torch's pipeline stages: see `PipelineModel.first_defers`."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The measured micro-batches, step by step. Shape (…, replicas, p·v, steps·m). relative: (3, …), what F, I and W
    took over what their stage usually takes. host: (3, …), seconds of the host before them, beyond `overhead`.
    transfer: (2, …), seconds of the activation and the gradient that came in."""

    relative: Float
    host: Float
    transfer: Float

    def on(self, stages: Sequence[Sequence[int]]) -> Seen:
        """For other stages, each of which takes the mean of so many of the measured ones."""
        parts = (np.stack([x[:, :, list(s)].mean(axis=2) for s in stages], axis=2) for x in
                 (self.relative, self.host, self.transfer))  # fmt: skip
        return Seen(*parts)


@dataclass(frozen=True, eq=False)
class PipelineModel:
    """Seconds. forward, input_grad, weight_grad: shape (p·v,), per virtual stage and micro-batch; the loss counts as
    forward of the stage that computes it. split_known: I and W were measured, not halves of B. overhead: of the host
    around each operation (launching, posting messages), whatever its length.
    first_defers: the first stage does nothing for I and the whole backward for W, as torch does. fixed: per step.
    loading: of `fixed`, what loading data before the first operations of a step costs; it grows with the micro-batches.
    measured: the step as it was. seen: the measured micro-batches."""

    stages: int
    chunks: int
    microbatches: int
    orders: Mapping[int, Sequence[Action]]
    overlapped: Mapping[int, Sequence[int]]
    forward: Float
    input_grad: Float
    weight_grad: Float
    split_known: bool
    overhead: float
    first_defers: bool
    fixed: float
    loading: float
    measured: float
    seen: Seen

    @property
    def virtual_stages(self) -> int:
        return len(self.forward)


def calibrate(
    programs: Sequence[Program],
    bases: BaseTable,
    orders: Mapping[int, Sequence[Action]],
    measured: float,
    layout: Layout,
) -> PipelineModel | None:
    """The model of a measured run, None when its order cannot be replayed on its own.

    measured: mean seconds per step.
    """
    n = max((a.stage for order in orders.values() for a in order), default=-1) + 1
    if n == 0 or not programs:
        return None
    forward, input_grad, weight_grad, known = _stage_times(bases, n)
    overhead = _overhead(programs)
    microbatches = max(a.microbatch for order in orders.values() for a in order) + 1
    if any(p.stage.max() >= n or p.microbatch.max() >= microbatches for p in programs):
        return None  # other steps have others
    model = PipelineModel(
        len(orders), max(n // max(len(orders), 1), 1), microbatches, orders, {},
        forward, input_grad, weight_grad, known, overhead, layout.framework in DEFERRING, 0.0, _loading(programs),
        measured,
        _seen(programs, layout, np.stack([forward, input_grad, weight_grad]), overhead, microbatches),
    )  # fmt: skip
    try:
        own = makespan(model, orders)
    except ScheduleError:
        return None
    return replace(model, fixed=measured - own)


def _loading(programs: Sequence[Program]) -> float:
    """Seconds per step, mean: without the data that is loaded before anything else in a step it would be shorter by so
    much."""
    saved, steps = 0.0, 0
    for p in programs:
        delay = delays(p, ())
        first = (p.edge == Edge.CHAIN) & (p.node[p.src] == Node.BEGIN)
        loaded = np.where(first[:, None], delay - p.data, delay)
        saved += float((replay_with(p, p.duration, delay).makespan - replay_with(p, p.duration, loaded).makespan).sum())
        steps += len(p.steps)
    return saved / steps * NS if steps else 0.0


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


_PARTS = {
    Kind.FORWARD: (0,),
    Kind.LOSS: (0,),
    Kind.BACKWARD_INPUT: (1,),
    Kind.BACKWARD_WEIGHT: (2,),
    Kind.BACKWARD: (1, 2),
}
"""Which of F, I and W an operation does."""


def _seen(programs: Sequence[Program], layout: Layout, base: Float, overhead: float, microbatches: int) -> Seen:
    """See `Seen`. What was not seen is as usual. base: F, I and W, shape (3, p·v).

    Worked example: a stage usually takes F = 10 and B = 20; micro-batch 3 took 15 and 20 there: 1.5 for F, 1 for I
    and W, of which nobody knows more than their sum.
    """
    n, steps = base.shape[1], np.concatenate([p.steps for p in programs])
    replicas, replica = np.unique(layout.replica, return_inverse=True)
    shape = (len(replicas), n, microbatches, len(steps))
    took, host, transfer = np.zeros((3, *shape)), np.zeros((3, *shape)), np.full((2, *shape), np.nan)
    order = np.argsort(np.argsort(steps))
    done = 0
    for p in programs:
        column = order[done : done + len(p.steps)]
        done += len(p.steps)

        def cell(rows: Int, p: Program = p, column: Int = column) -> tuple[Int, ...]:
            of = replica[np.searchsorted(layout.ranks, p.rank[rows])]
            return (of[:, None], p.stage[rows][:, None], p.microbatch[rows][:, None], column)

        before = _host_before(p)
        for kind, parts in _PARTS.items():
            rows = np.flatnonzero((p.node == Node.OP) & (p.kind == kind) & (p.microbatch >= 0))
            stage, whole = p.stage[rows], base[list(parts)].sum(axis=0)
            host[parts[0]][cell(rows)] += before[rows] * NS - (0.0 if kind == Kind.LOSS else overhead)
            for part in parts:
                share = np.divide(base[part], whole, out=np.zeros(n), where=whole > 0)
                took[part][cell(rows)] += p.duration[rows] * NS * share[stage][:, None]
        known = p.messages.consumer >= 0
        for grad in (False, True):
            mine = known & (p.messages.is_grad == grad)
            seconds = np.where(p.messages.exact[mine], p.messages.transfer[mine] * NS, np.nan)
            np.fmax.at(transfer[int(grad)], cell(p.messages.consumer[mine]), seconds)
    usual = np.broadcast_to(base[:, None, :, None, None], took.shape)
    relative = np.divide(took, usual, out=np.ones_like(took), where=(usual > 0) & (took > 0))
    flat = (x.swapaxes(3, 4).reshape(len(x), len(replicas), n, -1) for x in (relative, host, _completed(transfer)))
    return Seen(*flat)


def _host_before(p: Program) -> Float:
    """Shape (nodes, K), ns that the host took before each operation of a micro-batch: gaps before it and its messages,
    posting, and what waits took beyond their messages. What comes before the first one in a step is left out; what
    follows the last one is its own."""
    op, message, led = _host_parts(p)
    out = np.zeros(p.duration.shape)
    spent = np.where(message[:, None], p.duration, 0.0)
    np.add.at(spent, p.dst[led], p.delay[led])
    hosted, start = np.abs(spent).sum(axis=1) > 0, p.start[:, 0]
    for _, nodes in rows_by(p.rank):
        mine = nodes[op[nodes]]
        mine = mine[np.argsort(start[mine], kind="stable")]
        nodes = nodes[hosted[nodes]] if len(mine) else mine
        following = np.minimum(np.searchsorted(start[mine], start[nodes], "left"), len(mine) - 1)
        np.add.at(out, mine[following], spent[nodes])
    return out


def _host_parts(p: Program) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each node whether it is an operation of a micro-batch, and whether it is of a message; of each edge whether it
    leads to one of these, but for the first of a step."""
    op = (p.node == Node.OP) & (p.microbatch >= 0)
    message = np.isin(p.node, (Node.POST, Node.WAIT))
    led = (p.edge == Edge.CHAIN) & (op | message)[p.dst] & (p.node[p.src] != Node.BEGIN)
    return op, message, led


def _completed(transfer: Float) -> Float:
    """Where a transfer was not seen, one that was seen into the same stage stands in, else one of any stage: all of
    them in turn, so that they stay as uneven as they are."""
    for way in transfer:
        seen = way[np.isfinite(way)]
        for stage in range(way.shape[1]):
            mine = way[:, stage]
            missing = ~np.isfinite(mine)
            known = mine[~missing] if not missing.all() else seen
            mine[missing] = np.resize(known, int(missing.sum())) if len(known) else 0.0
    return transfer


def _overhead(programs: Sequence[Program]) -> float:
    """Seconds of the host per pipeline operation: gaps before it and its messages, posting, and what waits took
    beyond their messages; of each the median over the steps, so that a hiccup is none of it."""
    spent = count = 0.0
    for p in programs:
        op, message, led = _host_parts(p)
        typical = np.median(p.delay[led], axis=1).sum() + np.median(p.duration[message], axis=1).sum()
        spent += float(typical) * len(p.steps)
        count += int((p.kind[op] != Kind.LOSS).sum()) * len(p.steps)
    return spent / count * NS if count else 0.0


def makespan(
    model: PipelineModel,
    orders: Mapping[int, Sequence[Action]],
    overlapped: Mapping[int, Sequence[int]] | None = None,
) -> float:
    """Seconds from the first operation of the orders to the end of the slowest replica, mean over the steps that the
    measured micro-batches make. Raises ScheduleError."""
    dag = build_dag(dict(orders), overlapped)
    seen, drawn, received = _placed(model, dag), _drawn(model, dag), _received(dag)
    parts = _parts(dag)
    work = _work(model, dag, parts)
    # Pauses come with the work: operations of half the size hold half of them.
    pauses = parts * model.seen.host.shape[2] / model.virtual_stages
    ways = np.where(dag.kind == Kind.FORWARD, 0, 1)
    ends = []
    blocks = min(drawn.size * seen.host.shape[1] // MOST_AT_ONCE + 1, drawn.shape[1])
    for columns in np.array_split(drawn, blocks, axis=1):
        at = (slice(None), slice(None), dag.stage[:, None], columns)
        host = np.maximum(np.einsum("po,pdoc->odc", pauses, seen.host[at]) + model.overhead, 0.0)
        duration = np.einsum("po,pdoc->odc", work, seen.relative[at]) + host
        transfer = seen.transfer[ways[:, None], :, dag.stage[:, None], columns].swapaxes(1, 2)[received]
        lots = duration.shape[1] * duration.shape[2]
        flat = (x.reshape(len(x), lots) for x in (duration, transfer))  # of one operation there is no edge
        end = engine.run(dag, *flat)[1].max(axis=0)
        ends.append(end.reshape(duration.shape[1:]).max(axis=0))
    return float(np.concatenate(ends).mean())


MOST_AT_ONCE = 1_000_000
"""Durations that are replayed together: more would not be faster, and take memory."""


def _parts(dag: Dag) -> Float:
    """Shape (3, ops): 1 where an operation does F, I, W, else 0."""
    parts = np.zeros((3, len(dag.actions)))
    for op, action in enumerate(dag.actions):
        parts[list(_PARTS[action.kind]), op] = 1.0
    return parts


def _work(model: PipelineModel, dag: Dag, parts: Float) -> Float:
    """Shape (3, ops): seconds of F, I and W that each operation does, when nothing is special about it."""
    does = parts.copy()
    if model.first_defers:
        first = dag.stage == 0
        does[1, first & (dag.kind == Kind.BACKWARD_INPUT)] = 0.0
        does[1, first & (dag.kind == Kind.BACKWARD_WEIGHT)] = 1.0
    return does * np.stack([model.forward, model.input_grad, model.weight_grad])[:, dag.stage]


def _placed(model: PipelineModel, dag: Dag) -> Seen:
    """What was seen, for the stages of `dag`: a GPU that was slow, or had a long micro-batch, is and has so in any
    order. Where stages are on other GPUs than measured, each takes the mean of what was measured on its own."""
    now, then = stage_ranks(dict(model.orders)), dict(zip(dag.stage.tolist(), dag.rank.tolist(), strict=True))
    if now == then:
        return model.seen
    mine = {gpu: [stage for stage, rank in now.items() if rank == gpu] for gpu in set(now.values())}
    return model.seen.on([mine[then[stage]] for stage in range(len(then))])


def _drawn(model: PipelineModel, dag: Dag) -> Int:
    """Shape (ops, steps): which measured micro-batch each operation works on. The measured ones follow each other
    round and round, so that all are taken equally often, and each is the same one on every stage.

    Worked example: 2 measured steps of 4 micro-batches, numbered 0 to 7. Steps of 8 hold 0..7 and 0..7 again; those
    of 2 hold 0 1, 2 3, 4 5 and 6 7.
    """
    microbatch = np.array([a.microbatch for a in dag.actions])
    count = int(microbatch.max()) + 1
    seen = model.seen.host.shape[-1]
    steps = max(seen // model.microbatches, -(-seen // count))
    drawn: Int = (np.arange(steps) * count + microbatch[:, None]) % seen
    return drawn


def _received(dag: Dag) -> Int:
    """Of each edge: the operation that it leads to; of an overlapped pair its forward."""
    op = np.empty(dag.graph.n_nodes, dtype=np.int64)
    op[dag.node] = np.arange(len(dag.node))
    forward = np.flatnonzero(dag.kind == Kind.FORWARD)
    op[dag.node[forward]] = forward
    result: Int = op[dag.graph.dst]
    return result


def predict(model: PipelineModel, schedule: Schedule) -> float:
    """Seconds per step when `schedule` runs the same model: base times resampled to its virtual stages. Data that a
    step waits for at its start is loaded for each of its micro-batches: 40 ms for 4 of them are 160 for 16."""
    more = model.loading * (schedule.microbatches / model.microbatches - 1)
    return makespan(resample(model, schedule.virtual_stages), schedule.orders, schedule.overlapped) + model.fixed + more


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
