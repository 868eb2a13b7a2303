"""The dependency graph of a schedule: who must end before whom, and which edges are messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.maxplus import CycleError, Graph, build_graph
from bubblescope.errors import ScheduleError
from bubblescope.model import Action, Kind
from bubblescope.replay.schedules import Orders, stage_ranks

Int = NDArray[np.int64]

_ROLES = {Kind.FORWARD: "F", Kind.BACKWARD: "BW", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}
"""What an op gives to others: a forward, a backward to the input, a weight gradient."""


@dataclass(frozen=True, eq=False)
class Dag:
    """A schedule as a graph. An *op* is one action; a *node* is one op, or one overlapped pair of ops.

    actions: one per op, position by position in the order of execution. rank, node: shape (ops,), its pipeline
    position and its node. node_rank: shape (nodes,). hop: shape (edges,), whether the edge crosses positions
    and so pays the transfer. ranks: the positions, ascending.
    """

    graph: Graph
    actions: tuple[Action, ...]
    rank: Int
    node: Int
    node_rank: Int
    hop: NDArray[np.bool_]
    ranks: tuple[int, ...]

    @property
    def stage(self) -> Int:
        return np.array([a.stage for a in self.actions], dtype=np.int64)

    @property
    def kind(self) -> Int:
        return np.array([int(a.kind) for a in self.actions], dtype=np.int64)


def build_dag(orders: Orders, overlapped: Mapping[int, Sequence[int]] | None = None) -> Dag:
    """The graph of per-position orders. Dependencies, beside the order on each position:

    a forward needs the forward of the stage before; a backward (B or I) needs its own forward and the backward of
    the stage after; a weight gradient needs its own input gradient. Between positions an edge is a message.

    overlapped: {position: indices i such that actions i and i+1 are one op pair}: both wait for all that either
    needs, and both end together. Raises ScheduleError for an action that comes twice, a producer that is missing,
    a stage on two positions, or an order that deadlocks (the cycle is named).

    >>> dag = build_dag({0: [Action.parse("0F0"), Action.parse("0B0")]})
    >>> dag.graph.level.tolist()
    [0, 1]
    """
    stage_ranks(orders)
    actions, rank, node = _ops(orders, overlapped or {})
    owner = _index(actions, rank)
    last = max((a.stage for a in actions), default=-1)
    edges = [(node[i - 1], node[i], False) for i in range(1, len(node)) if rank[i] == rank[i - 1]]
    edges = [edge for edge in edges if edge[0] != edge[1]]
    for op, action in enumerate(actions):
        for producer in _producers(action, last, owner, rank[op]):
            edges.append((node[producer], node[op], rank[producer] != rank[op]))
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    n_nodes = node[-1] + 1 if node else 0
    node_rank = np.zeros(n_nodes, dtype=np.int64)
    node_rank[node] = rank
    try:
        graph = build_graph(n_nodes, table[:, 0], table[:, 1])
    except CycleError as error:
        raise _deadlock(error, actions, node) from error
    return Dag(
        graph,
        tuple(actions),
        np.array(rank, dtype=np.int64),
        np.array(node, dtype=np.int64),
        node_rank,
        table[:, 2].astype(np.bool_),
        tuple(sorted(orders)),
    )


def _ops(orders: Orders, overlapped: Mapping[int, Sequence[int]]) -> tuple[list[Action], list[int], list[int]]:
    """Actions, positions and node numbers of all ops."""
    actions: list[Action] = []
    ranks: list[int] = []
    nodes: list[int] = []
    following = 0
    for rank, order in sorted(orders.items()):
        second = {i + 1 for i in overlapped.get(rank, ())}
        for i, action in enumerate(order):
            if i not in second:
                following += 1
            actions.append(action)
            ranks.append(rank)
            nodes.append(following - 1)
    return actions, ranks, nodes


def _index(actions: Sequence[Action], rank: Sequence[int]) -> dict[tuple[int, str, int], int]:
    """{(stage, role, micro-batch): op}. Raises ScheduleError where two ops do the same."""
    found: dict[tuple[int, str, int], int] = {}
    for op, action in enumerate(actions):
        for role in _ROLES[action.kind]:
            key = (action.stage, role, action.microbatch)
            if found.setdefault(key, op) != op:
                raise ScheduleError(
                    f"{action} on position {rank[op]} repeats what {actions[found[key]]} does: a stage runs "
                    "forward, input gradient and weight gradient of a micro-batch only once"
                )
    return found


def _producers(action: Action, last: int, owner: Mapping[tuple[int, str, int], int], rank: int) -> Iterator[int]:
    """The ops that `action` needs. Raises ScheduleError when one is nowhere."""
    stage, i = action.stage, action.microbatch
    needs: list[tuple[int, str, int]] = []
    if action.kind == Kind.FORWARD:
        needs += [(stage - 1, "F", i)] if stage > 0 else []
    elif action.kind == Kind.BACKWARD_WEIGHT:
        needs += [(stage, "B", i)]
    else:
        needs += [(stage, "F", i)] + ([(stage + 1, "B", i)] if stage < last else [])
    for key in needs:
        if key not in owner:
            letter = {"F": "F", "B": "B (or I)", "W": "W"}[key[1]]
            raise ScheduleError(
                f"{action} on position {rank} needs {letter} of stage {key[0]}, micro-batch {key[2]}, which no "
                "position runs",
                hint="every stage must run every micro-batch",
            )
        yield owner[key]


def _deadlock(error: CycleError, actions: Sequence[Action], node: Sequence[int]) -> ScheduleError:
    parts: dict[int, list[str]] = {}
    for op, where in enumerate(node):
        parts.setdefault(where, []).append(str(actions[op]))
    names = [";".join(parts[n]) for n in error.cycle]
    names = [f"({name})" if ";" in name else name for name in names]
    return ScheduleError(
        f"the order deadlocks: {' → '.join([*names, names[0]])} (each must end before the next can start)",
        hint="move one of these operations on its GPU",
    )
