"""The figures of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), by its rules.

They stand beside our own attribution, on that paper's data format only, so that the two can be compared. The
rules: an ideal operation takes the mean of its type over the job (computation) or the median (communication); a
communication's own time is its end minus the latest start of its group; delays before launches are left out. Step
times are replayed from the dependencies alone.

Differs from our own attribution (ATTRIBUTION.md §6): the bases here are over all workers and steps at once, so a
slow stage, a slow worker and a slow micro-batch all count as "straggling".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.maxplus import CycleError, Graph, build_graph, longest_path
from bubblescope.errors import InputError
from bubblescope.ingest import straggler
from bubblescope.model import Kind, Lane, Run

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Mask = NDArray[np.bool_]

Key = TypeVar("Key", int, str)

COMMUNICATION = (
    *straggler.P2P,
    *straggler.DATA_PARALLEL,
    straggler.EMBEDDING,
    straggler.LAYERNORM,
    straggler.CLIP,
)
"""Types whose ideal is the median; all others take the mean."""
SYNCHRONISED = (*straggler.DATA_PARALLEL, straggler.CLIP)
"""Types whose group spans the data-parallel replicas."""
NEGATIVE_LIMIT_S = 0.01
"""A transfer that would be more negative than this (an early send) counts as 0; the paper keeps smaller ones."""
WORST_SHARE = 3
"""M_W looks at the slowest 3 % of the workers, rounded up."""


@dataclass(frozen=True)
class Figures:
    """What the paper reports for one job; times are means over the analysed steps.

    measured_s: steps as recorded. replayed_s: without launch delays. ideal_s: with every operation at its ideal.
    slowdown: S = replayed/ideal (eq. 1). waste: 1 - 1/S (eq. 3). by_type, by_stage, by_replica: S with only these
    operations as recorded, all others ideal (eq. 2); by_worker: min of its replica's and its stage's (eq. 4).
    stage_share: M_S, how much of the slowdown goes when the last stage becomes ideal (§5.2). worker_share: M_W, the
    same for the slowest 3 % of the workers (eq. 5). steps: analysed; skipped: steps that lack operations.
    """

    measured_s: float
    replayed_s: float
    ideal_s: float
    slowdown: float
    waste: float
    by_type: dict[str, float]
    by_stage: dict[int, float]
    by_replica: dict[int, float]
    by_worker: dict[int, float]
    stage_share: float
    worker_share: float
    steps: int
    skipped: tuple[int, ...] = ()


def figures(run: Run) -> Figures:
    """S, M_S, M_W and their breakdowns. Raises InputError for a run that is not of that paper's format."""
    model = build_model(run)
    replayed, ideal = model.step_time(model.weight), model.step_time(model.ideal)
    slowdown = replayed / ideal

    def kept(mask: Mask) -> float:
        return model.step_time(np.where(mask[:, None], model.weight, model.ideal)) / ideal

    def share_of(mask: Mask) -> float:
        cured = model.step_time(np.where(mask[:, None], model.ideal, model.weight))
        return (replayed - cured) / (replayed - ideal) if replayed != ideal else 0.0

    types = {t: np.flatnonzero([_family(name) == t for name in model.types]) for t in map(_family, model.types)}
    by_type = {t: kept(np.isin(model.type_of, codes)) for t, codes in types.items()}
    by_stage = {int(s): kept(model.stage == s) for s in np.unique(model.stage)}
    by_replica = {int(r): kept(model.replica == r) for r in np.unique(model.replica)}
    by_worker = {
        int(rank): min(by_replica[int(r)], by_stage[int(s)])
        for rank, r, s in np.unique(np.stack((model.rank, model.replica, model.stage), axis=1), axis=0)
    }
    return Figures(
        measured_s=float(model.measured.mean()),
        replayed_s=replayed,
        ideal_s=ideal,
        slowdown=slowdown,
        waste=1 - 1 / slowdown,
        by_type=_worst_first(by_type),
        by_stage=_worst_first(by_stage),
        by_replica=_worst_first(by_replica),
        by_worker=_worst_first(by_worker),
        stage_share=share_of(model.stage == model.stage.max()),
        worker_share=share_of(np.isin(model.rank, _slowest(by_worker))),
        steps=len(model.measured),
        skipped=model.skipped,
    )


def _family(name: str) -> str:
    """The paper reports the two ends of a message together."""
    direction = name.split("-")[0]
    return f"{direction}-pp-comm" if name in straggler.P2P else name


def _worst_first(scores: dict[Key, float]) -> dict[Key, float]:
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def _slowest(by_worker: dict[int, float]) -> list[int]:
    count = -(-len(by_worker) * WORST_SHARE // 100)
    return sorted(by_worker, key=lambda rank: (-by_worker[rank], rank))[:count]


@dataclass(frozen=True, eq=False)
class Model:
    """Every operation of a step as a node, replica by replica in the same order; the steps are columns.

    weight: shape (ops, steps), seconds: the recorded duration, or transfer. ideal: the same, by the paper's rule.
    rank, replica, stage (pipeline position), type_of (index into `types`): shape (ops,). measured: shape (steps,).
    graph: over ops first, then groups, whose duration is 0.
    """

    graph: Graph
    weight: Float
    ideal: Float
    rank: Int
    replica: Int
    stage: Int
    type_of: Int
    types: tuple[str, ...]
    measured: Float
    skipped: tuple[int, ...]

    def step_time(self, weight: Float) -> float:
        """Mean over the steps of the time that a step takes with these durations, in seconds."""
        duration = np.zeros((self.graph.n_nodes, weight.shape[1]))
        duration[: len(weight)] = weight
        return float(longest_path(self.graph, duration)[1].max(axis=0).mean())


def build_model(run: Run) -> Model:
    """The dependency model of a straggler trace."""
    if run.source.format != "straggler":
        raise InputError(
            "the OSDI'25 figures are defined on that paper's trace format only",
            hint="give a trace-*.parquet of StragglerAnalysis",
        )
    ops = _operations(run)
    grid, skipped = _grid(ops)
    template = _template(ops, grid)
    group, synced = _template_groups(ops, template)
    start, end = ops.start[grid] / 1e9, ops.end[grid] / 1e9
    weight = _weights(start, end, group, synced)
    graph = _graph(_dependencies(template), group, synced, len(grid))
    shape = (-1, grid.shape[2])
    first = grid[:, :, 0].reshape(-1)
    weight = weight.reshape(shape)
    return Model(
        graph=graph,
        weight=weight,
        ideal=_ideal(weight, ops.type_of[first], ops.types),
        rank=ops.rank[first],
        replica=ops.replica[first],
        stage=ops.stage[first],
        type_of=ops.type_of[first],
        types=ops.types,
        measured=end.max(axis=(0, 1)) - start.min(axis=(0, 1)),
        skipped=skipped,
    )


@dataclass(frozen=True, eq=False)
class _Operations:
    """The rows that the model is made of, as columns. row: index into Run.spans."""

    row: Int
    rank: Int
    replica: Int
    stage: Int
    step: Int
    type_of: Int
    seq: Int
    chunk: Int
    part: Int
    microbatch: Int
    start: Int
    end: Int
    types: tuple[str, ...]
    pairs: dict[int, int]


def _operations(run: Run) -> _Operations:
    spans = run.spans
    launched = (spans.lane != Lane.RANGE) & (spans.kind != Kind.STEP)
    row = np.flatnonzero(launched)
    place = np.searchsorted(run.layout.ranks, spans.rank[row])
    name, type_of = np.unique(spans.name[row], return_inverse=True)
    pairs = {int(a): int(b) for a, b in run.links.p2p}
    pairs.update({b: a for a, b in pairs.items()})
    return _Operations(
        row=row,
        rank=spans.rank[row].astype(np.int64),
        replica=run.layout.replica[place],
        stage=run.layout.pp[place],
        step=spans.step[row].astype(np.int64),
        type_of=type_of.astype(np.int64),
        seq=spans.seq[row],
        chunk=spans.chunk[row].astype(np.int64),
        part=spans.stage[row].astype(np.int64),
        microbatch=spans.microbatch[row].astype(np.int64),
        start=spans.start_ns[row],
        end=spans.end_ns[row],
        types=tuple(run.names.lookup(name)),
        pairs=pairs,
    )


def _grid(ops: _Operations) -> tuple[Int, tuple[int, ...]]:
    """[replica, operation, step] → index into `ops`, and the steps left out because they lack operations."""
    key = np.stack((ops.stage, ops.type_of, ops.seq), axis=1)
    kinds, kind = np.unique(key, axis=0, return_inverse=True)
    replicas, replica = np.unique(ops.replica, return_inverse=True)
    steps, step = np.unique(ops.step, return_inverse=True)
    grid = np.full((len(replicas), len(kinds), len(steps)), -1, dtype=np.int64)
    grid[replica.reshape(-1), kind.reshape(-1), step.reshape(-1)] = np.arange(len(ops.row))
    whole = (grid >= 0).all(axis=(0, 1))
    if not whole.any():
        raise InputError("no step holds the same operations on every replica, so none can be replayed")
    return grid[:, :, whole], tuple(int(s) for s in steps[~whole])


@dataclass(frozen=True, eq=False)
class _Op:
    """One operation of the first replica in the first step, which stands for all."""

    index: int
    stage: int
    type: str
    seq: int
    chunk: int
    part: int
    microbatch: int
    start: int
    end: int
    row: int


def _template(ops: _Operations, grid: Int) -> list[_Op]:
    return [
        _Op(
            index,
            int(ops.stage[at]),
            ops.types[ops.type_of[at]],
            int(ops.seq[at]),
            int(ops.chunk[at]),
            int(ops.part[at]),
            int(ops.microbatch[at]),
            int(ops.start[at]),
            int(ops.end[at]),
            int(ops.row[at]),
        )
        for index, at in enumerate(grid[0, :, 0])
    ]


def _template_groups(ops: _Operations, template: list[_Op]) -> tuple[Int, Mask]:
    """By operation: number of its synchronising group, -1 for none; by group: whether it spans the replicas."""
    by_row = {op.row: op.index for op in template}
    group = np.full(len(template), -1, dtype=np.int64)
    members: dict[tuple[object, ...], list[int]] = defaultdict(list)
    synced: dict[tuple[object, ...], bool] = {}
    for op in template:
        key: tuple[object, ...]
        if op.type in straggler.P2P:
            peer = by_row.get(ops.pairs.get(op.row, -1), op.index)
            key = ("message", min(op.index, peer), max(op.index, peer))
        elif op.type in straggler.DATA_PARALLEL:
            key = (op.type, op.seq, op.stage)
        elif op.type in (straggler.EMBEDDING, straggler.CLIP):
            key = (op.type, op.seq)
        else:
            continue
        members[key].append(op.index)
        synced[key] = op.type in SYNCHRONISED
    for number, (_, indices) in enumerate(sorted(members.items(), key=lambda item: item[1])):
        group[indices] = number
    flags = [synced[key] for key, _ in sorted(members.items(), key=lambda item: item[1])]
    return group, np.array(flags, dtype=np.bool_)


def _weights(start: Float, end: Float, group: Int, synced: Mask) -> Float:
    """Shape [replica, operation, step]: the duration; for a grouped operation the end minus the group's last start."""
    weight = end - start
    for number, across in enumerate(synced):
        members = group == number
        last = start[:, members].max(axis=1, keepdims=True)
        if across:
            last = np.broadcast_to(last.max(axis=0, keepdims=True), last.shape)
        transfer = end[:, members] - last
        weight[:, members] = np.where(transfer <= -NEGATIVE_LIMIT_S, 0.0, transfer)
    return weight


def _ideal(weight: Float, type_of: Int, types: tuple[str, ...]) -> Float:
    """Every operation at the mean (computation) or median (communication) of its type."""
    ideal = np.empty_like(weight)
    for code, name in enumerate(types):
        mine = type_of == code
        middle = np.median if name in COMMUNICATION else np.mean
        ideal[mine] = middle(weight[mine])
    return ideal


def _graph(edges: list[tuple[int, int]], group: Int, synced: Mask, replicas: int) -> Graph:
    """The template's edges for every replica. What a grouped operation waits for, its whole group waits for."""
    ops, groups = len(group), len(synced)
    base = np.arange(replicas)[:, None]
    own_group = replicas * ops + np.where(synced, np.arange(groups), base * groups + np.arange(groups))
    source, target = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    grouped = group[target] >= 0
    into = np.where(grouped, own_group[:, np.maximum(group[target], 0)], base * ops + target)
    members = np.flatnonzero(group >= 0)
    src = np.concatenate(((base * ops + source).reshape(-1), own_group[:, group[members]].reshape(-1)))
    dst = np.concatenate((into.reshape(-1), (base * ops + members).reshape(-1)))
    try:
        return build_graph(replicas * (ops + groups), src, dst)
    except CycleError as error:
        raise InputError(
            f"the trace's operations depend on each other in a circle of {len(error.cycle)}",
            hint="its first step is damaged, or its schedule is not one that the OSDI'25 rules cover",
        ) from error


def _dependencies(template: list[_Op]) -> list[tuple[int, int]]:
    """(earlier, later) within the ranks of one replica, by the paper's rules."""
    edges: list[tuple[int, int]] = []
    stages: dict[int, list[_Op]] = defaultdict(list)
    for op in template:
        stages[op.stage].append(op)
    for _, ops in sorted(stages.items()):
        ordered = sorted(ops, key=lambda op: (op.start, op.seq, op.type))
        compute = [op for op in ordered if op.type in (straggler.FORWARD, straggler.BACKWARD)]
        edges += _chain(compute)
        edges += _p2p_edges(ordered, compute)
        edges += _chain([op for op in ordered if op.type in straggler.DATA_PARALLEL[:2]])
        edges += _gather_edges(ordered, compute)
        edges += _tail_edges(ordered, compute)
    return edges


def _chain(ops: list[_Op]) -> Iterator[tuple[int, int]]:
    return ((a.index, b.index) for a, b in pairwise(ops))


def _p2p_edges(ordered: list[_Op], compute: list[_Op]) -> Iterator[tuple[int, int]]:
    """A send follows its compute; a receive precedes its own and follows the compute of its kind before that."""
    served = {(op.type, op.part, op.microbatch): op for op in compute}
    by_seq = {(op.type, op.seq): op for op in compute}
    for name, (kind, serves, _) in straggler.P2P.items():
        stream = [op for op in ordered if op.type == name]
        yield from _chain(stream)
        for op in stream:
            own = served[serves, op.part, op.microbatch]
            if kind == Kind.SEND:
                yield own.index, op.index
                continue
            yield op.index, own.index
            before = by_seq.get((serves, own.seq - 1))
            if before is not None:
                yield before.index, op.index
        yield from _first_backward_edges(stream, serves, compute)


def _first_backward_edges(stream: list[_Op], serves: str, compute: list[_Op]) -> Iterator[tuple[int, int]]:
    """The first backward message is launched after the last forward but one before the first backward."""
    first = next((i for i, op in enumerate(compute) if op.type == straggler.BACKWARD), 0)
    if serves == straggler.BACKWARD and stream and first >= 2:
        yield compute[first - 2].index, stream[0].index


def _gather_edges(ordered: list[_Op], compute: list[_Op]) -> Iterator[tuple[int, int]]:
    """The first forward of a chunk waits for the chunk's (last) parameter gather."""
    gathers = {op.chunk: op for op in ordered if op.type == straggler.DATA_PARALLEL[0]}
    for chunk, gather in gathers.items():
        forwards = (op for op in compute if op.type == straggler.FORWARD and op.chunk == chunk)
        first = next(forwards, None)
        if first is not None:
            yield gather.index, first.index


def _tail_edges(ordered: list[_Op], compute: list[_Op]) -> Iterator[tuple[int, int]]:
    """After the last compute: gc, layer norm, embedding, gradient reduction, clipping, optimizer.

    Where reduction overlaps the backward ("separate" gradients exist), each follows its chunk's last backward.
    """
    of = {name: [op for op in ordered if op.type == name] for name in {op.type for op in ordered}}
    _, reduce, separate = straggler.DATA_PARALLEL
    last = max(compute, key=lambda op: op.end, default=None)
    overlapped = separate in of
    middle = of.get(separate, []) if overlapped else of.get(reduce, [])
    tail = [*of.get("gc", []), *of.get(straggler.LAYERNORM, []), *of.get(straggler.EMBEDDING, []), *middle]
    tail += [*of.get(straggler.CLIP, []), *of.get("optimizer", [])]
    yield from _chain([*([last] if last else []), *tail])
    if not overlapped:
        return
    yield from _chain([*of.get(reduce, [])[-1:], *of.get(straggler.LAYERNORM, [])[:1]])
    for op in of.get(reduce, []):
        backward = [c for c in compute if c.type == straggler.BACKWARD and c.chunk == op.chunk]
        yield from _chain([*sorted(backward, key=lambda c: c.end)[-1:], op])
