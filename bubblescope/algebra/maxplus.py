"""Longest paths in directed acyclic graphs, over many columns of weights at once (max-plus algebra).

A graph is sorted once into topological levels; one evaluation is then a few array operations per level, for
every column (scenario, step, …) together. Sums are exact as long as all values are integers below 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int64]
Float = NDArray[np.float64]

_WIDE = 16
"""From this many incoming edges on, a node is reduced alone instead of together with its level."""


class CycleError(ValueError):
    """The graph has a cycle. `cycle`: its node ids in order; the last one leads back to the first."""

    def __init__(self, cycle: Sequence[int]) -> None:
        self.cycle = [int(node) for node in cycle]
        super().__init__("the graph has a cycle: " + " → ".join(map(str, [*self.cycle, self.cycle[0]])))


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed acyclic graph, sorted for evaluation. Made by `build_graph`.

    src, dst: shape (n_edges,), as given. level: shape (n_nodes,), the longest number of edges that lead to a node.
    node_order: node ids by level, wide nodes first, then by falling in-degree. edge_order: edge ids in the order
    in which `_plan` uses them. _plan: one entry per array operation, (first node, last node, first edge, last
    edge): edge i of the slice enters node i of the slice, or all edges enter the one node when it is wide.
    """

    n_nodes: int
    src: Int
    dst: Int
    level: Int
    node_order: Int
    edge_order: Int
    _position: Int
    _plan: tuple[tuple[int, int, int, int], ...]
    _levels: tuple[tuple[int, int, int, int, int, int], ...]

    @property
    def n_edges(self) -> int:
        return len(self.src)

    @property
    def n_levels(self) -> int:
        return int(self.level.max()) + 1 if self.n_nodes else 0


def build_graph(n_nodes: int, src: ArrayLike, dst: ArrayLike) -> Graph:
    """Sort the graph of the edges src[i] → dst[i] over nodes 0..n_nodes-1. O(nodes + edges · log edges).

    Raises CycleError with the nodes of one cycle, ValueError when an edge names a node that is not there.

    >>> build_graph(4, [0, 0, 1, 2], [1, 2, 3, 3]).level.tolist()
    [0, 1, 1, 2]
    """
    sources = np.ascontiguousarray(src, dtype=np.int64)
    targets = np.ascontiguousarray(dst, dtype=np.int64)
    _check_edges(n_nodes, sources, targets)
    degree = np.bincount(targets, minlength=n_nodes).astype(np.int64)
    level = _levels(n_nodes, sources, targets, degree)
    node_order = np.lexsort((-degree, level)).astype(np.int64)
    position = np.empty(n_nodes, dtype=np.int64)
    position[node_order] = np.arange(n_nodes)
    edge_order, plan, levels = _sort_edges(targets, degree, level, node_order, position)
    return Graph(n_nodes, sources, targets, level, node_order, edge_order, position, plan, levels)


def _check_edges(n_nodes: int, src: Int, dst: Int) -> None:
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src and dst must be one-dimensional and equal in length: {src.shape}, {dst.shape}")
    if len(src) and (min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= n_nodes):
        raise ValueError(f"an edge names a node outside 0..{n_nodes - 1}")


def _levels(n_nodes: int, src: Int, dst: Int, degree: Int) -> Int:
    """Kahn's algorithm, one whole level at a time; touches every edge once."""
    by_source = np.argsort(src, kind="stable")
    targets = dst[by_source]
    first = np.concatenate(([0], np.cumsum(np.bincount(src, minlength=n_nodes)))).astype(np.int64)
    level = np.full(n_nodes, -1, dtype=np.int64)
    missing = degree.copy()
    seen = np.empty(n_nodes, dtype=np.int64)
    frontier = np.flatnonzero(missing == 0)
    depth = 0
    while len(frontier):
        level[frontier] = depth
        depth += 1
        reached = targets[_ranges(first[frontier], first[frontier + 1])]
        np.subtract.at(missing, reached, 1)
        ready = reached[missing[reached] == 0]
        # A node reached by several edges at once is kept once: where the last write to `seen` was its own.
        turn = np.arange(len(ready))
        seen[ready] = turn
        frontier = ready[seen[ready] == turn]
    if (level < 0).any():
        raise CycleError(_find_cycle(src, dst, level < 0))
    return level


def _ranges(low: Int, high: Int) -> Int:
    """All integers of the ranges [low_i, high_i), one range after the other."""
    count = high - low
    total = int(count.sum())
    numbers: Int = np.arange(total) + np.repeat(low - np.cumsum(count) + count, count)
    return numbers


def _find_cycle(src: Int, dst: Int, stuck: NDArray[np.bool_]) -> list[int]:
    """Walk backwards among nodes that never got ready; each has such a predecessor, so a node must repeat."""
    inside = stuck[src] & stuck[dst]
    predecessor = dict(zip(dst[inside].tolist(), src[inside].tolist(), strict=True))
    node = int(np.flatnonzero(stuck)[0])
    turn: dict[int, int] = {}
    walk: list[int] = []
    while node not in turn:
        turn[node] = len(walk)
        walk.append(node)
        node = predecessor[node]
    return walk[turn[node] :][::-1]


def _sort_edges(
    dst: Int, degree: Int, level: Int, node_order: Int, position: Int
) -> tuple[Int, tuple[tuple[int, int, int, int], ...], tuple[tuple[int, int, int, int, int, int], ...]]:
    """Edges so that each array operation of the evaluation reads one slice of them.

    Narrow nodes of a level take their first edges together, then their second ones, …: sorted by falling
    in-degree, the nodes that still have a j-th edge are always a prefix. Wide nodes take all their edges at once.
    """
    sorted_degree = degree[node_order]
    by_target = np.argsort(position[dst], kind="stable")
    target = position[dst[by_target]]
    first = np.concatenate(([0], np.cumsum(sorted_degree)))[:-1]
    slot = np.arange(len(dst)) - first[target]
    wide = sorted_degree[target] > _WIDE
    slot[wide] = -1
    rank_in_slot = np.where(wide, target, 0)
    edge_level = level[dst[by_target]]
    inner = np.lexsort((target, rank_in_slot, slot, edge_level))
    edge_order = by_target[inner].astype(np.int64)
    key = np.stack((edge_level[inner], slot[inner], rank_in_slot[inner]), axis=1)
    opens = np.flatnonzero(np.any(key[1:] != key[:-1], axis=1)) + 1
    begin = np.concatenate(([0], opens)) if len(dst) else np.empty(0, dtype=np.int64)
    end = np.append(begin[1:], len(dst)) if len(dst) else begin
    low = target[inner][begin]
    high = np.where(wide[inner][begin], low + 1, low + (end - begin))
    plan = tuple(zip(low.tolist(), high.tolist(), begin.tolist(), end.tolist(), strict=True))
    op_level = edge_level[inner][begin]
    return edge_order, plan, _level_slices(level, node_order, op_level, begin, end)


def _level_slices(
    level: Int, node_order: Int, op_level: Int, begin: Int, end: Int
) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """Per level ≥ 1: its nodes [a, b), its edges [c, d), its operations [i, j) of the plan."""
    if not len(op_level):
        return ()
    depth = np.arange(1, int(op_level[-1]) + 1)
    nodes = level[node_order]
    a, b = np.searchsorted(nodes, depth), np.searchsorted(nodes, depth, side="right")
    i, j = np.searchsorted(op_level, depth), np.searchsorted(op_level, depth, side="right")
    columns = (a, b, begin[i], end[j - 1], i, j)
    return tuple(zip(*(c.tolist() for c in columns), strict=True))


def longest_path(
    graph: Graph, duration: ArrayLike, delay: ArrayLike = 0.0, release: ArrayLike | None = None
) -> tuple[Float, Float]:
    """When each node starts and ends: start[i] = max(release[i], end[src] + delay over its incoming edges).

    duration: shape (n_nodes, …). delay: shape (n_edges,), (n_edges, 1, …) or (n_edges, …), in the order in which
    the edges were given; -inf switches an edge off. release: as delay, but by node; None = 0. Returns start and
    end = start + duration, shape of `duration`, in the order of the node ids.

    >>> g = build_graph(3, [0, 0, 1], [1, 2, 2])
    >>> start, end = longest_path(g, [1.0, 2.0, 3.0], [0.0, 4.0, 0.5])
    >>> start.tolist(), end.tolist()
    ([0.0, 1.0, 5.0], [1.0, 3.0, 8.0])
    """
    length = np.asarray(duration, dtype=np.float64)
    if length.ndim < 1 or length.shape[0] != graph.n_nodes:
        raise ValueError(f"duration has shape {length.shape}, the graph {graph.n_nodes} nodes")
    shape = length.shape
    length = length.reshape(graph.n_nodes, math.prod(shape[1:]))
    start = _rows(release if release is not None else 0.0, graph.n_nodes, shape, "release")[graph.node_order]
    start = np.array(np.broadcast_to(start, length.shape))
    end = length[graph.node_order]
    wait = _rows(delay, graph.n_edges, shape, "delay")
    _sweep(graph, start, end, wait[graph.edge_order])
    return start[graph._position].reshape(shape), end[graph._position].reshape(shape)


@dataclass(frozen=True, eq=False)
class Weights:
    """Delays and releases in a graph's own order, for evaluating many durations with them (see `ends_at`)."""

    graph: Graph
    delay: Float
    release: Float
    shape: tuple[int, ...]


def weigh(graph: Graph, shape: tuple[int, ...], delay: ArrayLike, release: ArrayLike) -> Weights:
    """shape: of the durations to come; delay and release: as in `longest_path`."""
    wait = _rows(delay, graph.n_edges, shape, "delay")[graph.edge_order]
    return Weights(graph, wait, _rows(release, graph.n_nodes, shape, "release")[graph.node_order], shape)


def ends_at(weights: Weights, duration: Float, nodes: Int) -> Float:
    """What `longest_path` gives as `end[nodes]`, without putting everything else back in the order of the ids.

    >>> g = build_graph(3, [0, 0, 1], [1, 2, 2])
    >>> w = weigh(g, (3, 1), [0.0, 4.0, 0.5], [0.0, 0.0, 0.0])
    >>> ends_at(w, np.array([[1.0], [2.0], [3.0]]), np.array([2])).tolist()
    [[8.0]]
    """
    graph = weights.graph
    end = duration.reshape(graph.n_nodes, -1)[graph.node_order]
    start = np.array(np.broadcast_to(weights.release, end.shape))
    _sweep(graph, start, end, weights.delay)
    return end[graph._position[nodes]].reshape(len(nodes), *weights.shape[1:])


def _rows(values: ArrayLike, rows: int, shape: tuple[int, ...], what: str) -> Float:
    """`values` as (rows, columns) or (rows, 1), for a `duration` of this shape."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0:
        return np.broadcast_to(array, (rows, 1))
    if array.shape[0] != rows:
        raise ValueError(f"{what} has {array.shape[0]} rows, not {rows}")
    if array.size == rows:
        return array.reshape(rows, 1)
    return np.broadcast_to(array, (rows, *shape[1:])).reshape(rows, math.prod(shape[1:]))


def _sweep(graph: Graph, start: Float, end: Float, delay: Float) -> None:
    """Fill `start`, and turn `end` from durations into ends; all in the graph's own order."""
    source = graph._position[graph.src[graph.edge_order]]
    plan = graph._plan
    if graph.n_levels:
        first = graph._levels[0][0] if graph._levels else graph.n_nodes
        end[:first] += start[:first]
    for a, b, c, d, i, j in graph._levels:
        arrival = end[source[c:d]]
        arrival += delay[c:d]
        for low, high, begin, stop in plan[i:j]:
            here = arrival[begin - c : stop - c]
            if high - low != stop - begin:
                here = here.max(axis=0, keepdims=True)
            np.maximum(start[low:high], here, out=start[low:high])
        end[a:b] += start[a:b]


def deciding_edges(graph: Graph, end: Float, delay: Float) -> Int:
    """Per node the incoming edge over which it was reached last, -1 where none binds: shape (n_nodes,).

    end: shape (n_nodes,), one column of `longest_path`; delay: shape (n_edges,). Of equally late edges the first given
    one is taken.

    >>> g = build_graph(3, [0, 0, 1], [1, 2, 2])
    >>> deciding_edges(g, np.array([1.0, 3.0, 8.0]), np.array([0.0, 4.0, 0.5])).tolist()
    [-1, 0, 1]
    """
    arrival = end[graph.src] + delay
    latest = np.full(graph.n_nodes, -np.inf)
    np.maximum.at(latest, graph.dst, arrival)
    last = np.flatnonzero((arrival == latest[graph.dst]) & np.isfinite(arrival))[::-1]
    edge = np.full(graph.n_nodes, -1, dtype=np.int64)
    edge[graph.dst[last]] = last
    return edge
