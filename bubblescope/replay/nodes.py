"""Nodes of a replay program: what each rank executed, found in spans, operations and links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.analysis.operations import Operations
from bubblescope.analysis.windows import Windows
from bubblescope.model import Kind, Lane, Run

Int = NDArray[np.int64]


class Node(IntEnum):
    """POST: a message is handed over. WAIT: until it is there (or taken). ARRIVE, DONE: into and out of a collective,
    GROUP: when all have arrived. SENT: a send kernel ends. POST, ARRIVE and SENT of kernels stand beside the chain."""

    BEGIN = 0
    OP = 1
    POST = 2
    WAIT = 3
    ARRIVE = 4
    DONE = 5
    GROUP = 6
    SENT = 7


@dataclass(eq=False)
class NodeTable:
    """Growing flat tables over all windows; `window` -1 for group nodes (then `step` tells)."""

    window: list[Int]
    type: list[Int]
    start: list[Int]
    end: list[Int]
    operation: list[Int]
    chain: list[NDArray[np.bool_]]
    count: int = 0

    @classmethod
    def new(cls) -> NodeTable:
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


def add_shared(nodes: NodeTable, kind: Node, rows: Int, row_window: Int, start: Int, end: Int) -> Int:
    """Rows with the same window and interval are one call, so one node."""
    if not len(rows):
        return np.empty(0, dtype=np.int64)
    key = np.column_stack([row_window[rows], start[rows], end[rows]])
    unique, inverse = np.unique(key, axis=0, return_inverse=True)
    made = nodes.add(kind, unique[:, 0], unique[:, 1], unique[:, 2])
    return made[inverse.reshape(-1)]


def add_kernel_waits(
    nodes: NodeTable,
    run: Run,
    rows: Int,
    row_window: Int,
    row_wait: Int,
    lookup: OperationLookup,
    operations: Operations,
) -> None:
    """A receive kernel shows no wait of its own: the compute stream waits just before the consuming operation."""
    spans = run.spans
    grad = is_grad(run, rows)
    consumer = lookup.find(row_window[rows], spans.stage[rows].astype(np.int64), spans.microbatch[rows], grad)
    unknown = consumer < 0
    consumer[unknown] = lookup.next_after(row_window[rows][unknown], spans.end_ns[rows][unknown])
    rows, consumer = rows[consumer >= 0], consumer[consumer >= 0]
    opens = operations.opens
    window_start = lookup.windows.start_ns[operations.window]
    previous_end = np.where(opens, window_start, np.append(0, operations.end_ns[:-1]))[consumer]
    end = np.clip(spans.end_ns[rows], previous_end, operations.start_ns[consumer])
    row_wait[rows] = nodes.add(Node.WAIT, operations.window[consumer], previous_end, end)


class OperationLookup:
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


def is_grad(run: Run, rows: Int) -> NDArray[np.bool_]:
    """Whether P2P rows carry a gradient: it goes from a later stage to an earlier one. Where a stage is not known,
    the name says it ("grad", "backward…"), which readers and labels set."""
    spans = run.spans
    named = np.array([text.startswith(("grad", "bwd", "backward")) for text in run.names.texts], dtype=np.bool_)
    out: NDArray[np.bool_] = named[spans.name]
    pairs = run.links.p2p
    send, recv = pairs[(pairs >= 0).all(axis=1)].T
    known = (spans.stage[send] >= 0) & (spans.stage[recv] >= 0) & (spans.stage[send] != spans.stage[recv])
    send, recv = send[known], recv[known]
    out[send] = out[recv] = spans.stage[recv] < spans.stage[send]
    return out[rows]


def collective_rows(run: Run, row_window: Int) -> Int:
    """(instance, row) pairs of blocking or exposed collectives, only those in a window. A kernel of which no other
    member was seen is one of its own: what waits for it waits for no host."""
    spans = run.spans
    if len(run.links.collective):
        pairs = run.links.collective
        kernels = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.lane == Lane.COMM) & (spans.device >= 0))
        alone = np.setdiff1d(kernels, pairs[:, 1])
        pairs = np.concatenate([pairs, np.column_stack([pairs[:, 0].max() + 1 + np.arange(len(alone)), alone])])
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


def add_collectives(
    nodes: NodeTable, run: Run, pairs: Int, row_window: Int, operations: Operations, windows: Windows
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


def _exposed_done(
    nodes: NodeTable, run: Run, rows: Int, row_window: Int, operations: Operations, windows: Windows
) -> Int:
    """DONE nodes of collective kernels that end while nothing computes."""
    spans = run.spans
    lookup = OperationLookup(operations, windows)
    before = lookup.last_ended(row_window[rows], spans.end_ns[rows])
    after = lookup.next_after(row_window[rows], spans.end_ns[rows])
    free_from = np.where(before >= 0, operations.end_ns[before], windows.start_ns[row_window[rows]])
    following = np.where(before >= 0, before + 1, -1)
    first = np.searchsorted(operations.window, row_window[rows])
    following = np.where(before >= 0, following, first)
    # Nothing computes at its end exactly when the next operation to start is the one after the last that ended.
    idle = (after < 0) | (after == following)
    out = np.full(len(rows), -1, dtype=np.int64)
    idle &= spans.end_ns[rows] > free_from
    out[idle] = nodes.add(Node.DONE, row_window[rows][idle], free_from[idle], spans.end_ns[rows][idle])
    return out
