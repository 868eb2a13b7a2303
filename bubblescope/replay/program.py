"""What each rank did in a step, as a graph that can be replayed with other durations (ATTRIBUTION.md §6).

Every rank is a chain of nodes in the order it executed them: operations, posts (isend, irecv), waits, collectives.
Messages tie the chains together: a wait ends when both ends were posted and the payload has crossed. With
nothing changed the replay gives the measured times back; with some durations or delays set to zero it tells
what they cost. Steps with the same structure are columns of the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.algebra.maxplus import CycleError, Graph, build_graph
from bubblescope.analysis.operations import Operations
from bubblescope.analysis.windows import Windows
from bubblescope.errors import ScheduleError
from bubblescope.model import PIPELINE_KINDS, Kind, Lane, Run
from bubblescope.model.kinds import SHORT
from bubblescope.replay.edges import (
    Edge,
    EdgeTable,
    barrier_edges,
    chain_edges,
    chain_order,
    find_transfers,
    group_edges,
    message_edges,
    message_rows,
    side_edges,
)
from bubblescope.replay.nodes import (
    Node,
    NodeTable,
    OperationLookup,
    add_collectives,
    add_kernel_waits,
    add_shared,
    collective_rows,
)
from bubblescope.replay.partial import known_lengths

__all__ = ["Edge", "Messages", "Node", "Program", "build_programs"]

Int = NDArray[np.int64]
Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Program:
    """K steps of one structure. Times in ns relative to T_{k-1} of each step, float64 holding exact integers.

    steps: shape (K,). Nodes, shape (n,): rank, node (see `Node`), kind, stage, chunk, microbatch (of an OP of
    the pipeline, its losses among them), operation (row of `Operations`, shape (n, K), -1 for others). duration, start,
    end: shape (n, K), measured. release: shape (n, K), earliest start (BEGIN nodes).
    Edges, shape (e,): src, dst, edge (see `Edge`); delay: shape (e, K), measured; of it host and data (CHAIN).
    closing: nodes whose end closes the step; trim: shape (n_ranks, K), T_k minus the window's end, beside `ranks`.
    """

    steps: Int
    rank: Int
    node: Int
    kind: Int
    stage: Int
    chunk: Int
    microbatch: Int
    operation: Int
    duration: Float
    start: Float
    end: Float
    release: Float
    src: Int
    dst: Int
    edge: Int
    delay: Float
    data: Float
    closing: Int
    ranks: Int
    trim: Float
    window: Int
    graph: Graph
    messages: Messages


@dataclass(frozen=True, eq=False)
class Messages:
    """Shape (q,), one P2P message a row, nodes of the `Program`: the posts at both ends, the receiver's wait, the
    sender's wait (-1 none), the producing and the consuming operation (-1 unknown). is_grad, bytes.
    transfer: shape (q, K), ns from max(both posted) to the end of the receiver's wait, best estimate;
    exact: shape (q, K), whether it was seen rather than bounded (the receiver was already waiting)."""

    send: Int
    recv: Int
    wait: Int
    send_wait: Int
    producer: Int
    consumer: Int
    is_grad: NDArray[np.bool_]
    bytes: Int
    transfer: Float
    exact: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Flat:
    """All steps together, before they are split: nodes in final order (by step, rank, chain position)."""

    step: Int
    rank: Int
    window: Int
    type: Int
    start: Int
    end: Int
    operation: Int
    src: Int
    dst: Int
    edge: Int
    delay: Int
    data: Int
    msg: dict[str, Int]
    message_transfer: Int
    message_exact: NDArray[np.bool_]
    duration: Int


def build_programs(
    run: Run, windows: Windows, operations: Operations, chosen: NDArray[np.bool_] | None = None
) -> tuple[list[Program], dict[int, str]]:
    """The programs of the chosen windows (None: of all), one per distinct structure of a step, biggest group first; and
    the steps in which the measured order is circular (which only a wrong matching can cause), with the circle.

    Only ranks with a chosen window in a step take part in it.
    """
    if not len(windows) or not len(operations):
        return [], {}
    flat = _flatten(run, windows, operations, np.ones(len(windows), dtype=np.bool_) if chosen is None else chosen)
    groups: dict[bytes, list[_StepSlice]] = {}
    for part in _split(flat, operations):
        groups.setdefault(part.signature, []).append(part)
    programs: list[Program] = []
    circular: dict[int, str] = {}
    for group in sorted(groups.values(), key=lambda g: (-len(g), g[0].step)):
        try:
            programs.append(_stack(flat, group, windows, operations))
        except ScheduleError as error:
            circular |= dict.fromkeys((part.step for part in group), str(error))
    return programs, circular


def _named(cycle: Sequence[int], rank: Int, type_: Int, label: Callable[[int], str]) -> str:
    """The operations and messages of a cycle, in words, at most six of them."""
    words = [f"{label(node)} on rank {rank[node]}" for node in cycle if type_[node] != Node.GROUP]
    words = list(dict.fromkeys(words))
    return " → ".join(words[:6]) + (f" → … ({len(words)} in all)" if len(words) > 6 else "")


# --- all steps together ---------------------------------------------------------------------------------------


def _flatten(run: Run, windows: Windows, operations: Operations, chosen: NDArray[np.bool_]) -> _Flat:
    spans = run.spans
    nodes = NodeTable.new()
    begun = np.flatnonzero(chosen)
    nodes.add(Node.BEGIN, begun, windows.start_ns[begun], windows.start_ns[begun])
    ops = np.flatnonzero(chosen[operations.window])
    nodes.add(Node.OP, operations.window[ops], operations.start_ns[ops], operations.end_ns[ops], operation=ops)
    row_window = windows.of_spans(spans)
    known = known_lengths(run, windows, row_window, chosen)
    row_window = np.where((row_window >= 0) & chosen[row_window], row_window, -1)
    # What began before the window (a receive posted ahead) is taken as there from the start.
    low = windows.start_ns[row_window]
    start = np.where(row_window >= 0, np.maximum(spans.start_ns, low), spans.start_ns)
    run = replace(run, spans=spans.with_columns(start_ns=start, end_ns=np.maximum(spans.end_ns, start)))
    spans = run.spans
    row_post = np.full(len(spans), -1, dtype=np.int64)
    row_wait = np.full(len(spans), -1, dtype=np.int64)
    p2p = np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & (spans.device >= 0) & (row_window >= 0)
    for lane, kind, out in ((Lane.POST, Node.POST, row_post), (Lane.WAIT, Node.WAIT, row_wait)):
        rows = np.flatnonzero(p2p & (spans.lane == lane))
        out[rows] = add_shared(nodes, kind, rows, row_window, spans.start_ns, spans.end_ns)
    lookup = OperationLookup(operations, windows)
    kernels = np.flatnonzero(p2p & (spans.lane == Lane.COMM))
    row_post[kernels] = nodes.add(
        Node.POST, row_window[kernels], spans.start_ns[kernels], spans.start_ns[kernels], chain=False
    )
    sent = kernels[spans.kind[kernels] == Kind.SEND]
    row_wait[sent] = nodes.add(Node.SENT, row_window[sent], spans.start_ns[sent], spans.end_ns[sent], chain=False)
    received = kernels[spans.kind[kernels] == Kind.RECV]
    add_kernel_waits(nodes, run, received, row_window, row_wait, lookup, operations)
    collectives = collective_rows(run, row_window)
    arrive, done = add_collectives(nodes, run, collectives, row_window, operations, windows)
    return _connect(run, windows, nodes, row_window, row_post, row_wait, lookup, collectives, arrive, done, known)


def _connect(
    run: Run,
    windows: Windows,
    nodes: NodeTable,
    row_window: Int,
    row_post: Int,
    row_wait: Int,
    lookup: OperationLookup,
    collectives: Int,
    arrive: Int,
    done: Int,
    known: Int,
) -> _Flat:
    window = np.concatenate(nodes.window)
    type_ = np.concatenate(nodes.type)
    start = np.concatenate(nodes.start).astype(np.int64)
    end = np.concatenate(nodes.end).astype(np.int64)
    operation = np.concatenate(nodes.operation)
    chain = np.concatenate(nodes.chain)
    order, start, end = chain_order(windows, window, type_, start, end, chain)
    edges = EdgeTable()
    chain_edges(edges, run, windows, window, start, end, order)
    side_edges(edges, window, type_, start, end, order, np.flatnonzero(~chain))
    duration = np.where(np.isin(type_, (Node.OP, Node.POST)), end - start, 0)
    msg = message_rows(run, row_window, row_post, row_wait, lookup, operation, windows)
    transfer, exact, residual = find_transfers(run, msg, start, end)
    duration += residual
    message_edges(edges, msg, transfer, duration, start, end)
    group_step = group_edges(edges, windows, collectives, arrive, done, row_window, start, end, len(window), known)
    optimizer = (operation >= 0) & (lookup.operations.kind[operation] == Kind.OPTIMIZER)
    first_barrier = len(window) + len(group_step)
    barrier_step = barrier_edges(edges, windows, window, type_, optimizer, start, end, first_barrier)
    group_step = np.concatenate([group_step, barrier_step])
    n_groups = len(group_step)
    step = np.concatenate([windows.step[window], group_step])
    rank = np.concatenate([windows.rank[window], np.full(n_groups, np.iinfo(np.int32).max)])
    pad = np.full(n_groups, -1)
    window = np.concatenate([window, pad])
    group_time = np.zeros(n_groups, dtype=np.int64)
    type_ = np.concatenate([type_, np.full(n_groups, int(Node.GROUP))])
    chain_rank = np.empty(len(window), dtype=np.int64)
    chain_rank[order] = np.arange(len(order))
    side = np.flatnonzero(~chain)
    chain_rank[side] = len(order) + np.argsort(np.argsort(start[side], kind="stable"), kind="stable")
    chain_rank[len(window) - n_groups :] = len(window) + np.arange(n_groups)
    final = np.lexsort((chain_rank, rank, step))
    new = np.empty(len(final), dtype=np.int64)
    new[final] = np.arange(len(final))
    src, dst, kind, delay, data = edges.arrays()
    for column in ("send", "recv", "wait", "send_wait", "producer", "consumer"):
        msg[column] = np.where(msg[column] >= 0, new[msg[column]], -1)
    return _Flat(
        step[final],
        rank[final],
        window[final],
        type_[final],
        np.concatenate([start, group_time])[final],
        np.concatenate([end, group_time])[final],
        np.concatenate([operation, pad])[final],
        new[src],
        new[dst],
        kind,
        delay,
        data,
        msg,
        transfer,
        exact,
        np.concatenate([duration, group_time])[final],
    )


# --- per step, per structure ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _StepSlice:
    step: int
    nodes: slice
    edges: Int
    messages: Int
    signature: bytes


def _split(flat: _Flat, operations: Operations) -> Iterator[_StepSlice]:
    steps, first = np.unique(flat.step, return_index=True)
    last = np.append(first[1:], len(flat.step))
    edge_step = flat.step[flat.dst]
    edge_order = np.lexsort((flat.edge, flat.src, flat.dst, edge_step))
    edge_first = np.searchsorted(edge_step[edge_order], np.append(steps, steps[-1] + 1))
    msg_step = flat.step[flat.msg["wait"]] if len(flat.msg["wait"]) else np.empty(0, dtype=np.int64)
    msg_order = np.lexsort((flat.msg["send"], flat.msg["wait"], msg_step))
    msg_first = np.searchsorted(msg_step[msg_order], np.append(steps, steps[-1] + 1))
    for i, step in enumerate(steps):
        nodes = slice(int(first[i]), int(last[i]))
        edges = edge_order[edge_first[i] : edge_first[i + 1]]
        messages = msg_order[msg_first[i] : msg_first[i + 1]]
        parts = [flat.rank[nodes], flat.type[nodes], flat.src[edges] - first[i], flat.dst[edges] - first[i]]
        parts += [flat.edge[edges], flat.msg["wait"][messages] - first[i], flat.msg["send"][messages] - first[i]]
        parts.append(_identity(flat.operation[nodes], operations))
        yield _StepSlice(int(step), nodes, edges, messages, b"|".join(p.tobytes() for p in parts))


def _identity(operation: Int, operations: Operations) -> Int:
    """What each node computes, so that columns of one program hold the same operations."""
    columns = (operations.kind, operations.stage, operations.microbatch)
    return np.column_stack([np.where(operation >= 0, c[operation], -1) for c in columns])


def _stack(flat: _Flat, group: list[_StepSlice], windows: Windows, operations: Operations) -> Program:
    first = group[0]
    base = first.nodes.start
    node_rows = np.column_stack([np.arange(g.nodes.start, g.nodes.stop) for g in group])
    edge_rows = np.column_stack([g.edges for g in group])
    msg_rows = np.column_stack([g.messages for g in group])
    steps = np.array([g.step for g in group], dtype=np.int64)
    zero = np.array([_base_of(windows, g.step) for g in group], dtype=np.int64)
    operation = flat.operation[node_rows]
    type_ = flat.type[first.nodes]
    rank = flat.rank[first.nodes]
    op = operation[:, 0]
    known = op >= 0
    is_group = type_ == Node.GROUP

    def of(column: Int) -> Int:
        return np.where(known, column[op], -1)

    start = (flat.start[node_rows] - zero).astype(np.float64)
    end = (flat.end[node_rows] - zero).astype(np.float64)
    start[is_group] = end[is_group] = np.nan
    release = np.where((type_ == Node.BEGIN)[:, None], start, -np.inf)
    src, dst = flat.src[first.edges] - base, flat.dst[first.edges] - base
    ranks = np.unique(rank[~is_group])
    window = flat.window[node_rows]
    begin = np.flatnonzero(type_ == Node.BEGIN)

    def label(node: int) -> str:
        if not known[node]:
            return Node(int(type_[node])).name.lower()
        kind = Kind(int(operations.kind[op[node]]))
        return f"{SHORT.get(kind, kind.name.lower())}{operations.microbatch[op[node]]}"

    try:
        graph = build_graph(len(rank), src, dst)
    except CycleError as error:
        raise ScheduleError(f"the measured order is circular: {_named(error.cycle, rank, type_, label)}") from error
    trim = (windows.close_ns - windows.end_ns)[window[begin]].astype(np.float64)
    m = msg_rows[:, 0]

    def node_of(column: str) -> Int:
        return np.where(flat.msg[column][m] >= 0, flat.msg[column][m] - base, -1)

    return Program(
        steps,
        rank,
        type_,
        of(operations.kind),
        of(operations.stage),
        of(operations.chunk),
        of(np.where(np.isin(operations.kind, (*PIPELINE_KINDS, Kind.LOSS)), operations.microbatch, -1)),
        operation,
        flat.duration[node_rows].astype(np.float64),
        start,
        end,
        release,
        src,
        dst,
        flat.edge[first.edges],
        flat.delay[edge_rows].astype(np.float64),
        flat.data[edge_rows].astype(np.float64),
        _closing(rank, type_, of(operations.kind), end),
        ranks,
        trim,
        window,
        graph,
        Messages(
            node_of("send"),
            node_of("recv"),
            node_of("wait"),
            node_of("send_wait"),
            node_of("producer"),
            node_of("consumer"),
            flat.msg["is_grad"][m] == 1,
            flat.msg["bytes"][m],
            flat.message_transfer[msg_rows].astype(np.float64),
            flat.message_exact[msg_rows],
        ),
    )


def _base_of(windows: Windows, step: int) -> int:
    return int(windows.base_ns[windows.step == step].min())


def _closing(rank: Int, type_: Int, kind: Int, end: Float) -> Int:
    """Per rank its last optimizer operation; without any, whatever of operations, waits and sends ends last."""
    out = []
    rows = np.flatnonzero(np.isin(type_, (Node.BEGIN, Node.OP, Node.WAIT, Node.DONE, Node.SENT)))
    for _, picked in intervals.rows_by(rank[rows]):
        mine = rows[picked]
        optimizer = mine[kind[mine] == Kind.OPTIMIZER]
        if len(optimizer):
            out.append(optimizer[-1])
            continue
        for node in (Node.OP, Node.WAIT, Node.DONE, Node.SENT):
            of_type = mine[type_[mine] == node]
            if len(of_type):
                out.append(of_type[end[of_type, 0].argmax()])
    return np.array(out, dtype=np.int64)
