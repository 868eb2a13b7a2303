"""What each rank did in a step, as a graph that can be replayed with other durations (ATTRIBUTION.md §6).

Every rank is a chain of nodes in the order it executed them: operations, posts (isend, irecv), waits, collectives.
Messages tie the chains together: a wait ends when both ends were posted and the payload has crossed. With
nothing changed the replay gives the measured times back; with some durations or delays set to zero it tells
what they cost. Steps with the same structure are columns of the same arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.algebra.maxplus import CycleError, Graph, build_graph
from bubblescope.analysis.operations import Operations
from bubblescope.analysis.windows import Windows
from bubblescope.errors import ScheduleError
from bubblescope.model import Kind, Lane, Run

Int = NDArray[np.int64]
Float = NDArray[np.float64]


class Node(IntEnum):
    BEGIN = 0
    OP = 1
    POST = 2
    WAIT = 3
    ARRIVE = 4
    DONE = 5
    GROUP = 6


class Edge(IntEnum):
    """CHAIN: next on the same rank. SENT, POSTED: the sender's, the receiver's post, to the receiver's wait.
    TAKEN: the receiver's post, to the sender's wait (rendezvous); OWN: the sender's post, to its own wait.
    NEEDS: producing operation to consuming operation. JOIN, LEAVE: into and out of a collective."""

    CHAIN = 0
    SENT = 1
    POSTED = 2
    TAKEN = 3
    OWN = 4
    NEEDS = 5
    JOIN = 6
    LEAVE = 7


@dataclass(frozen=True, eq=False)
class Program:
    """K steps of one structure. Times in ns relative to T_{k-1} of each step, float64 holding exact integers.

    steps: shape (K,). Nodes, shape (n,): rank, node (see `Node`), kind, stage, chunk, microbatch (of an OP),
    operation (row of `Operations`, shape (n, K), -1 for others). duration, start, end: shape (n, K), measured.
    release: shape (n, K), earliest start (BEGIN nodes).
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


@dataclass(eq=False)
class _Nodes:
    """Growing flat tables over all windows; `window` -1 for group nodes (then `step` tells)."""

    window: list[Int]
    type: list[Int]
    start: list[Int]
    end: list[Int]
    operation: list[Int]
    chain: list[NDArray[np.bool_]]
    count: int = 0

    @classmethod
    def new(cls) -> _Nodes:
        return cls([], [], [], [], [], [])

    def add(
        self, kind: Node, window: Int, start: Int, end: Int, *, operation: Int | None = None, chain: bool = True
    ) -> Int:
        n = len(window)
        self.window.append(window)
        self.type.append(np.full(n, int(kind)))
        self.start.append(start)
        self.end.append(end)
        self.operation.append(np.full(n, -1) if operation is None else operation)
        self.chain.append(np.full(n, chain))
        first = self.count
        self.count += n
        return np.arange(first, self.count)


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
) -> list[Program]:
    """The programs of the steps of the chosen windows, one per distinct structure, biggest group first.

    Only ranks with a window in a step take part in it. Raises ScheduleError when the measured order is cyclic
    (which only a wrong matching can cause).
    """
    if not len(windows) or not len(operations):
        return []
    steps = windows.steps if chosen is None else np.unique(windows.step[chosen])
    flat = _flatten(run, windows, operations)
    groups: dict[bytes, list[_StepSlice]] = {}
    for part in _split(flat, operations):
        if part.step in steps:
            groups.setdefault(part.signature, []).append(part)
    ordered = sorted(groups.values(), key=lambda g: (-len(g), g[0].step))
    try:
        return [_stack(flat, group, windows, operations) for group in ordered]
    except CycleError as error:
        raise ScheduleError(f"the measured order of operations and messages is circular: {error}") from error


# --- nodes -------------------------------------------------------------------------------------------------


def _flatten(run: Run, windows: Windows, operations: Operations) -> _Flat:
    spans = run.spans
    nodes = _Nodes.new()
    all_windows = np.arange(len(windows))
    nodes.add(Node.BEGIN, all_windows, windows.start_ns, windows.start_ns)
    nodes.add(
        Node.OP,
        operations.window,
        operations.start_ns,
        operations.end_ns,
        operation=np.arange(len(operations)),
    )
    row_window = windows.of_spans(spans)
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
        out[rows] = _add_shared(nodes, kind, rows, row_window, spans.start_ns, spans.end_ns)
    lookup = _OperationLookup(operations, windows)
    kernels = np.flatnonzero(p2p & (spans.lane == Lane.COMM))
    row_post[kernels] = nodes.add(
        Node.POST, row_window[kernels], spans.start_ns[kernels], spans.start_ns[kernels], chain=False
    )
    received = kernels[spans.kind[kernels] == Kind.RECV]
    _add_kernel_waits(nodes, run, received, row_window, row_wait, lookup, operations)
    collectives = _collectives(run, row_window)
    arrive, done = _add_collectives(nodes, run, collectives, row_window, operations, windows)
    return _connect(run, windows, nodes, row_window, row_post, row_wait, lookup, collectives, arrive, done)


def _add_shared(nodes: _Nodes, kind: Node, rows: Int, row_window: Int, start: Int, end: Int) -> Int:
    """Rows with the same window and interval are one call, so one node."""
    if not len(rows):
        return np.empty(0, dtype=np.int64)
    key = np.column_stack([row_window[rows], start[rows], end[rows]])
    unique, inverse = np.unique(key, axis=0, return_inverse=True)
    made = nodes.add(kind, unique[:, 0], unique[:, 1], unique[:, 2])
    return made[inverse.reshape(-1)]


def _add_kernel_waits(
    nodes: _Nodes,
    run: Run,
    rows: Int,
    row_window: Int,
    row_wait: Int,
    lookup: _OperationLookup,
    operations: Operations,
) -> None:
    """A receive kernel shows no wait of its own: the compute stream waits just before the consuming operation."""
    spans = run.spans
    grad = _is_grad(run, rows)
    consumer = lookup.find(row_window[rows], spans.stage[rows].astype(np.int64), spans.microbatch[rows], grad)
    unknown = consumer < 0
    consumer[unknown] = lookup.next_after(row_window[rows][unknown], spans.end_ns[rows][unknown])
    rows, consumer = rows[consumer >= 0], consumer[consumer >= 0]
    opens = operations.opens
    window_start = lookup.windows.start_ns[operations.window]
    previous_end = np.where(opens, window_start, np.append(0, operations.end_ns[:-1]))[consumer]
    end = np.clip(spans.end_ns[rows], previous_end, operations.start_ns[consumer])
    row_wait[rows] = nodes.add(Node.WAIT, operations.window[consumer], previous_end, end)


class _OperationLookup:
    """Finds the operation of (window, stage, microbatch) that needs or makes an activation or a gradient."""

    def __init__(self, operations: Operations, windows: Windows) -> None:
        self.operations = operations
        self.windows = windows
        kinds = operations.kind
        forward = kinds == Kind.FORWARD
        backward = np.isin(kinds, (Kind.BACKWARD, Kind.BACKWARD_INPUT))
        self._rows = np.flatnonzero((forward | backward) & (operations.microbatch >= 0))
        self._stages = int(operations.stage.max(initial=0)) + 2
        self._microbatches = int(operations.microbatch.max(initial=0)) + 2
        key = self._key(
            operations.window[self._rows],
            operations.stage[self._rows],
            operations.microbatch[self._rows],
            backward[self._rows],
        )
        order = np.argsort(key, kind="stable")
        self._sorted, self._rows = key[order], self._rows[order]

    def _key(self, window: Int, stage: Int, microbatch: Int, grad: NDArray[np.bool_]) -> Int:
        key = (window * self._stages + stage) * self._microbatches + microbatch
        result: Int = key * 2 + grad
        return result

    def find(self, window: Int, stage: Int, microbatch: NDArray[np.integer], grad: NDArray[np.bool_]) -> Int:
        """Row of `Operations`, -1 when there is none."""
        good = (window >= 0) & (stage >= 0) & (stage < self._stages - 1)
        good &= (microbatch >= 0) & (microbatch < self._microbatches - 1)
        key = self._key(window, stage, microbatch.astype(np.int64), grad)
        i = np.minimum(np.searchsorted(self._sorted, key), max(len(self._sorted) - 1, 0))
        if not len(self._sorted):
            return np.full(len(window), -1, dtype=np.int64)
        return np.where(good & (self._sorted[i] == key), self._rows[i], -1)

    def next_after(self, window: Int, time_ns: Int) -> Int:
        """First operation of the window that starts at or after the time, -1 when there is none."""
        out = np.full(len(window), -1, dtype=np.int64)
        ops = self.operations
        for w, mine in intervals.rows_by(window):
            low, high = np.searchsorted(ops.window, [w, w + 1])
            i = low + np.searchsorted(ops.start_ns[low:high], time_ns[mine], "left")
            out[mine] = np.where(i < high, i, -1)
        return out

    def last_ended(self, window: Int, time_ns: Int) -> Int:
        """Last operation of the window that ended at or before the time, -1 when there is none."""
        out = np.full(len(window), -1, dtype=np.int64)
        ops = self.operations
        for w, mine in intervals.rows_by(window):
            low, high = np.searchsorted(ops.window, [w, w + 1])
            i = low + np.searchsorted(ops.end_ns[low:high], time_ns[mine], "right") - 1
            out[mine] = np.where(i >= low, i, -1)
        return out


def _is_grad(run: Run, rows: Int) -> NDArray[np.bool_]:
    """Whether P2P rows carry a gradient: by name ("act", "grad"), which readers and labels set."""
    grad = np.array([text.startswith("grad") for text in run.names.texts], dtype=np.bool_)
    result: NDArray[np.bool_] = grad[run.spans.name[rows]]
    return result


# --- collectives -------------------------------------------------------------------------------------------


def _collectives(run: Run, row_window: Int) -> Int:
    """(instance, row) pairs of blocking or exposed collectives, only those in a window."""
    spans = run.spans
    if len(run.links.collective):
        pairs = run.links.collective
    else:
        rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.seq >= 0) & (spans.device >= 0))
        if not len(rows):
            return np.empty((0, 2), dtype=np.int64)
        key = np.column_stack([spans.group[rows], spans.seq[rows]])
        instance = np.unique(key, axis=0, return_inverse=True)[1].reshape(-1)
        pairs = np.column_stack([instance, rows])
    lanes = spans.lane[pairs[:, 1]]
    keep = (row_window[pairs[:, 1]] >= 0) & np.isin(lanes, (Lane.WAIT, Lane.COMM))
    return pairs[keep]


def _add_collectives(
    nodes: _Nodes, run: Run, pairs: Int, row_window: Int, operations: Operations, windows: Windows
) -> tuple[Int, Int]:
    """ARRIVE and DONE node per member; a hidden kernel (no idle at its end) holds nobody up: DONE is -1."""
    spans = run.spans
    rows = pairs[:, 1]
    arrive = np.full(len(rows), -1, dtype=np.int64)
    done = np.full(len(rows), -1, dtype=np.int64)
    blocking = spans.lane[rows] == Lane.WAIT
    chosen = rows[blocking]
    arrive[blocking] = nodes.add(Node.ARRIVE, row_window[chosen], spans.start_ns[chosen], spans.start_ns[chosen])
    done[blocking] = nodes.add(Node.DONE, row_window[chosen], spans.start_ns[chosen], spans.end_ns[chosen])
    kernel = rows[~blocking]
    arrive[~blocking] = nodes.add(
        Node.ARRIVE, row_window[kernel], spans.start_ns[kernel], spans.start_ns[kernel], chain=False
    )
    done[~blocking] = _exposed_done(nodes, run, kernel, row_window, operations, windows)
    return arrive, done


def _exposed_done(nodes: _Nodes, run: Run, rows: Int, row_window: Int, operations: Operations, windows: Windows) -> Int:
    """DONE nodes of collective kernels that end while nothing computes."""
    spans = run.spans
    lookup = _OperationLookup(operations, windows)
    before = lookup.last_ended(row_window[rows], spans.end_ns[rows])
    after = lookup.next_after(row_window[rows], spans.end_ns[rows])
    free_from = np.where(before >= 0, operations.end_ns[before], windows.start_ns[row_window[rows]])
    following = np.where(before >= 0, before + 1, -1)
    first = np.searchsorted(operations.window, row_window[rows])
    following = np.where(before >= 0, following, first)
    # Nothing computes at its end exactly when the next operation to start is the one after the last that ended.
    idle = (after < 0) | (after == following)
    out = np.full(len(rows), -1, dtype=np.int64)
    start = np.maximum(free_from, spans.start_ns[rows])
    idle &= spans.end_ns[rows] > start
    out[idle] = nodes.add(Node.DONE, row_window[rows][idle], start[idle], spans.end_ns[rows][idle])
    return out


# --- edges -------------------------------------------------------------------------------------------------


class _Edges:
    def __init__(self) -> None:
        self.parts: list[tuple[Int, Int, int, Int, Int]] = []

    def add(self, kind: Edge, src: Int, dst: Int, delay: Int, data: Int | None = None) -> None:
        self.parts.append((src, dst, int(kind), delay, np.zeros(len(src), np.int64) if data is None else data))

    def arrays(self) -> tuple[Int, Int, Int, Int, Int]:
        if not self.parts:
            z = np.empty(0, dtype=np.int64)
            return z, z, z, z, z
        return (
            np.concatenate([p[0] for p in self.parts]),
            np.concatenate([p[1] for p in self.parts]),
            np.concatenate([np.full(len(p[0]), p[2]) for p in self.parts]),
            np.concatenate([p[3] for p in self.parts]),
            np.concatenate([p[4] for p in self.parts]),
        )


def _connect(
    run: Run,
    windows: Windows,
    nodes: _Nodes,
    row_window: Int,
    row_post: Int,
    row_wait: Int,
    lookup: _OperationLookup,
    collectives: Int,
    arrive: Int,
    done: Int,
) -> _Flat:
    window = np.concatenate(nodes.window)
    type_ = np.concatenate(nodes.type)
    start = np.concatenate(nodes.start).astype(np.int64)
    end = np.concatenate(nodes.end).astype(np.int64)
    operation = np.concatenate(nodes.operation)
    chain = np.concatenate(nodes.chain)
    order, start, end = _chain_order(windows, window, type_, start, end, chain)
    edges = _Edges()
    _chain_edges(edges, run, windows, window, start, end, order)
    _side_edges(edges, windows, window, start, end, order, np.flatnonzero(~chain))
    duration = np.where(np.isin(type_, (Node.OP, Node.POST)), end - start, 0)
    msg = _message_rows(run, row_window, row_post, row_wait, lookup, operation, windows)
    transfer, exact, residual = _transfers(run, msg, start, end)
    duration += residual
    _message_edges(edges, msg, transfer, duration, start, end)
    group_step = _group_edges(edges, windows, collectives, arrive, done, row_window, start, end, len(window))
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


def _chain_order(
    windows: Windows, window: Int, type_: Int, start: Int, end: Int, chain: NDArray[np.bool_]
) -> tuple[Int, Int, Int]:
    """Chain nodes by window and time, made disjoint: a node starts no earlier than the one before it ended."""
    rows = np.flatnonzero(chain)
    begin_first = (type_[rows] != Node.BEGIN).astype(np.int64)
    order = rows[np.lexsort((type_[rows], end[rows], start[rows], begin_first, window[rows]))]
    start, end = start.copy(), end.copy()
    w = window[order]
    bounds = np.flatnonzero(np.append(True, w[1:] != w[:-1]))
    for low, high in zip(bounds, np.append(bounds[1:], len(order)), strict=True):
        part = order[low:high]
        reach = np.maximum.accumulate(end[part])
        start[part[1:]] = np.maximum(start[part[1:]], reach[:-1])
        end[part] = reach
    return order, start, end


def _chain_edges(edges: _Edges, run: Run, windows: Windows, window: Int, start: Int, end: Int, order: Int) -> None:
    src, dst = order[:-1], order[1:]
    same = window[src] == window[dst]
    src, dst = src[same], dst[same]
    gap = start[dst] - end[src]
    edges.add(Edge.CHAIN, src, dst, gap, _data_within(run, windows, window[src], end[src], start[dst]))


def _data_within(run: Run, windows: Windows, window: Int, low: Int, high: Int) -> Int:
    """How much of each [low, high) the rank spent loading data."""
    out = np.zeros(len(low), dtype=np.int64)
    spans = run.spans
    rows = np.flatnonzero(spans.kind == Kind.DATA)
    of_rank = dict(intervals.rows_by(windows.rank[window]))
    for rank, picked in intervals.rows_by(spans.rank[rows]):
        own = rows[picked]
        loading = intervals.union(spans.start_ns[own], spans.end_ns[own])
        mine = of_rank.get(rank, np.empty(0, dtype=np.int64))
        low_part = intervals.measure_before(loading, low[mine])
        out[mine] = intervals.measure_before(loading, high[mine]) - low_part
    return out


def _side_edges(edges: _Edges, windows: Windows, window: Int, start: Int, end: Int, order: Int, side: Int) -> None:
    """Kernels of communication streams begin some time after the last chain node that had ended by then."""
    if not len(side):
        return
    w = window[order]
    for row, picked in intervals.rows_by(window[side]):
        low, high = np.searchsorted(w, [row, row + 1])
        part = order[low:high]
        mine = side[picked]
        i = np.maximum(np.searchsorted(end[part], start[mine], "right") - 1, 0)
        edges.add(Edge.CHAIN, part[i], mine, np.maximum(start[mine] - end[part[i]], 0))


def _message_rows(
    run: Run,
    row_window: Int,
    row_post: Int,
    row_wait: Int,
    lookup: _OperationLookup,
    operation: Int,
    windows: Windows,
) -> dict[str, Int]:
    """Messages whose both ends lie in windows of the same step and that hold somebody up."""
    spans = run.spans
    pairs = run.links.p2p
    waits = run.links.p2p_wait if len(run.links.p2p_wait) == len(pairs) else np.full_like(pairs, -1)
    keep = (pairs >= 0).all(axis=1)
    pairs, waits = pairs[keep], waits[keep]
    ws, wr = row_window[pairs[:, 0]], row_window[pairs[:, 1]]
    recv_wait = np.where(waits[:, 1] >= 0, row_wait[waits[:, 1]], row_wait[pairs[:, 1]])
    keep = (ws >= 0) & (wr >= 0) & (recv_wait >= 0)
    keep[keep] &= windows.step[ws[keep]] == windows.step[wr[keep]]
    pairs, waits, ws, wr, recv_wait = pairs[keep], waits[keep], ws[keep], wr[keep], recv_wait[keep]
    send, recv = pairs[:, 0], pairs[:, 1]
    grad = _is_grad(run, send)
    node_of = np.full(len(lookup.operations) + 1, -1, dtype=np.int64)
    ops = np.flatnonzero(operation >= 0)
    node_of[operation[ops]] = ops
    producer = lookup.find(ws, spans.stage[send].astype(np.int64), spans.microbatch[send], grad)
    consumer = lookup.find(wr, spans.stage[recv].astype(np.int64), spans.microbatch[recv], grad)
    return {
        "send": row_post[send],
        "recv": row_post[recv],
        "wait": recv_wait,
        "send_wait": np.where(waits[:, 0] >= 0, row_wait[waits[:, 0]], -1),
        "producer": node_of[producer],
        "consumer": node_of[consumer],
        "is_grad": grad.astype(np.int64),
        "bytes": np.maximum(spans.bytes[send], spans.bytes[recv]),
        "src": windows.rank[ws],
        "dst": windows.rank[wr],
    }


def _transfers(run: Run, msg: dict[str, Int], start: Int, end: Int) -> tuple[Int, NDArray[np.bool_], Int]:
    """Transfer time per message, whether it was seen, and what the waits took beyond their messages.

    A transfer is seen when the wait was already running as the later end was posted, and this message was the last
    of the wait; otherwise only a bound is known, and the median of the seen ones of the same route stands in.
    """
    residual = np.zeros(len(start), dtype=np.int64)
    n = len(msg["send"])
    if not n:
        return np.empty(0, np.int64), np.empty(0, np.bool_), residual
    ready = np.maximum(start[msg["send"]], start[msg["recv"]])
    wait = msg["wait"]
    bound = np.maximum(end[wait] - ready, 0)
    last = np.full(len(start), np.iinfo(np.int64).min)
    np.maximum.at(last, wait, ready)
    exact = (ready >= start[wait]) & (ready == last[wait])
    typical = _typical(np.column_stack([msg["src"], msg["dst"], msg["is_grad"]]), bound, exact)
    transfer = np.where(exact, bound, np.minimum(typical, bound))
    arrival = np.full(len(start), np.iinfo(np.int64).min)
    np.maximum.at(arrival, wait, ready + transfer)
    used = np.unique(wait)
    _sender_arrivals(msg, start, end, transfer, arrival)
    used = np.unique(np.append(used, msg["send_wait"][msg["send_wait"] >= 0]))
    residual[used] = np.maximum(end[used] - np.maximum(start[used], arrival[used]), 0)
    return transfer, exact, residual


def _sender_arrivals(msg: dict[str, Int], start: Int, end: Int, transfer: Int, arrival: Int) -> None:
    """When each sender's wait could end: its own post, or the rendezvous with the receiver's post."""
    sw = msg["send_wait"]
    rows = np.flatnonzero(sw >= 0)
    met = _rendezvous(msg, start, end)[rows]
    own = start[msg["send"][rows]]
    both = np.maximum(own, start[msg["recv"][rows]]) + _sender_transfer(msg, start, end, transfer)[rows]
    np.maximum.at(arrival, sw[rows], np.where(met, both, own))


def _rendezvous(msg: dict[str, Int], start: Int, end: Int) -> NDArray[np.bool_]:
    """Whether the sender's wait outlasted the receiver's post; if not, the message was sent eagerly."""
    sw = msg["send_wait"]
    result: NDArray[np.bool_] = (sw >= 0) & (end[sw] >= start[msg["recv"]])
    return result


def _sender_transfer(msg: dict[str, Int], start: Int, end: Int, transfer: Int) -> Int:
    """The sender is done no later than its wait ended, and no later than the receiver."""
    ready = np.maximum(start[msg["send"]], start[msg["recv"]])
    result: Int = np.clip(end[msg["send_wait"]] - ready, 0, transfer)
    return result


def _typical(route: Int, bound: Int, exact: NDArray[np.bool_]) -> Int:
    """Per message: the median of the seen transfers of its route, else the smallest bound of the route."""
    where = np.unique(route, axis=0, return_inverse=True)[1].reshape(-1)
    out = np.zeros(len(bound), dtype=np.int64)
    for _, mine in intervals.rows_by(where):
        seen = bound[mine][exact[mine]]
        out[mine] = int(np.median(seen)) if len(seen) else int(bound[mine].min())
    return out


def _message_edges(edges: _Edges, msg: dict[str, Int], transfer: Int, duration: Int, start: Int, end: Int) -> None:
    """A post's node ends when the call returns, but the message exists from its start: hence minus duration."""
    send, recv, wait = msg["send"], msg["recv"], msg["wait"]
    edges.add(Edge.SENT, send, wait, transfer - duration[send])
    edges.add(Edge.POSTED, recv, wait, transfer - duration[recv])
    known = (msg["producer"] >= 0) & (msg["consumer"] >= 0)
    zero = np.zeros(int(known.sum()), dtype=np.int64)
    edges.add(Edge.NEEDS, msg["producer"][known], msg["consumer"][known], zero)
    met = _rendezvous(msg, start, end)
    own = _sender_transfer(msg, start, end, transfer)
    edges.add(Edge.TAKEN, recv[met], msg["send_wait"][met], (own - duration[recv])[met])
    edges.add(Edge.OWN, send[met], msg["send_wait"][met], (own - duration[send])[met])


def _group_edges(
    edges: _Edges,
    windows: Windows,
    pairs: Int,
    arrive: Int,
    done: Int,
    row_window: Int,
    start: Int,
    end: Int,
    first_node: int,
) -> Int:
    """One GROUP node per collective and step; returns the step of each."""
    if not len(pairs):
        return np.empty(0, dtype=np.int64)
    step = windows.step[row_window[pairs[:, 1]]]
    instance = np.unique(np.column_stack([pairs[:, 0], step]), axis=0, return_inverse=True)[1].reshape(-1)
    count = int(instance.max()) + 1
    ready = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(ready, instance, start[arrive])
    group_step = np.zeros(count, dtype=np.int64)
    group_step[instance] = step
    node = first_node + instance
    edges.add(Edge.JOIN, arrive, node, np.zeros(len(arrive), dtype=np.int64))
    held = done >= 0
    delay = np.maximum(end[done[held]] - ready[instance[held]], 0)
    edges.add(Edge.LEAVE, node[held], done[held], delay)
    return group_step


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
        of(operations.microbatch),
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
        _closing(rank, type_, of(operations.kind)),
        ranks,
        trim,
        window,
        build_graph(len(rank), src, dst),
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


def _closing(rank: Int, type_: Int, kind: Int) -> Int:
    """Per rank its last optimizer operation, else its last chain node."""
    chain = np.isin(type_, (Node.BEGIN, Node.OP, Node.POST, Node.WAIT, Node.DONE))
    out = []
    rows = np.flatnonzero(chain)
    for _, picked in intervals.rows_by(rank[rows]):
        mine = rows[picked]
        optimizer = mine[kind[mine] == Kind.OPTIMIZER]
        out.append(optimizer[-1] if len(optimizer) else mine[-1])
    return np.array(out, dtype=np.int64)
