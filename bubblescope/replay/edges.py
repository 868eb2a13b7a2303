"""Edges of a replay program: what each node had to wait for, and how long it then took."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.analysis.windows import Windows
from bubblescope.model import Kind, Run
from bubblescope.replay.nodes import Node, OperationLookup, is_grad

Int = NDArray[np.int64]


class Edge(IntEnum):
    """CHAIN: next on the same rank. SENT, POSTED: the sender's, the receiver's post, to the receiver's wait.
    TAKEN: the receiver's post, to the sender's wait (rendezvous); OWN: the sender's post, to its own wait.
    NEEDS: producing operation to consuming operation. JOIN, LEAVE: into and out of a collective;
    AWAIT: as LEAVE, with what may have been waiting for ranks that are not replayed."""

    CHAIN = 0
    SENT = 1
    POSTED = 2
    TAKEN = 3
    OWN = 4
    NEEDS = 5
    JOIN = 6
    LEAVE = 7
    AWAIT = 8


class EdgeTable:
    def __init__(self) -> None:
        self.parts: list[tuple[Int, Int, int, Int, Int]] = []

    def add(self, kind: Edge, src: Int, dst: Int, delay: Int, data: Int | None = None) -> None:
        self.parts.append((src, dst, int(kind), delay, np.zeros(len(src), np.int64) if data is None else data))

    def take(self, kind: Edge) -> tuple[Int, Int, Int, Int]:
        """src, dst, delay, data of all edges of a kind, which are removed."""
        chosen = [p for p in self.parts if p[2] == kind]
        self.parts = [p for p in self.parts if p[2] != kind]
        empty = np.empty(0, dtype=np.int64)
        src, dst, delay, data = (np.concatenate([empty, *(p[i] for p in chosen)]) for i in (0, 1, 3, 4))
        return src, dst, delay, data

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


def chain_order(
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


def chain_edges(edges: EdgeTable, run: Run, windows: Windows, window: Int, start: Int, end: Int, order: Int) -> None:
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


LAUNCH_SLACK_NS = 2_000
"""A kernel that begins up to this long before an operation ends still follows it: stamps are rounded, aligned clocks
are corrected by a line, and dependent launches overlap by about as much."""


def side_edges(edges: EdgeTable, window: Int, type_: Int, start: Int, end: Int, order: Int, side: Int) -> None:
    """A communication kernel begins some time after whatever ended last on its GPU: an operation, a wait, or a send
    (sends of one stream follow each other, and hosts that synchronise wait for them).

    Example: B5 ends at 2000.001 us and its send begins at 2000.000 us: it follows B5 at once. Counted from what
    ended before B5, all of B5 would be a host delay of that send.
    """
    is_sent = type_[side] == Node.SENT
    launched = side[~is_sent]
    if not len(launched):
        return
    ended = np.concatenate([order, side[is_sent]])
    ended = ended[np.lexsort((end[ended], window[ended]))]
    w = window[ended]
    for row, picked in intervals.rows_by(window[launched]):
        low, high = np.searchsorted(w, [row, row + 1])
        part = ended[low:high]
        mine = launched[picked]
        i = np.maximum(np.searchsorted(end[part], start[mine], "right") - 1, 0)
        after = _just_ending(part[type_[part] == Node.OP], start, end, start[mine], part[i])
        edges.add(Edge.CHAIN, after, mine, np.maximum(start[mine] - end[after], 0))


def _just_ending(ops: Int, start: Int, end: Int, at: Int, otherwise: Int) -> Int:
    """Per time the operation that is running and ends within the slack, else `otherwise`. One that has not begun may
    need the very message that begins here."""
    if not len(ops):
        return otherwise
    j = ops[np.maximum(np.searchsorted(end[ops], at + LAUNCH_SLACK_NS, "right") - 1, 0)]
    result: Int = np.where((start[j] < at) & (end[j] > at) & (end[j] <= at + LAUNCH_SLACK_NS), j, otherwise)
    return result


def message_rows(
    run: Run,
    row_window: Int,
    row_post: Int,
    row_wait: Int,
    lookup: OperationLookup,
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
    grad = is_grad(run, send)
    node_of = np.full(len(lookup.operations) + 1, -1, dtype=np.int64)
    ops = np.flatnonzero(operation >= 0)
    node_of[operation[ops]] = ops
    producer = lookup.find(ws, spans.stage[send].astype(np.int64), spans.microbatch[send], grad)
    consumer = lookup.find(wr, spans.stage[recv].astype(np.int64), spans.microbatch[recv], grad)
    return {
        "send": row_post[send],
        "recv": row_post[recv],
        "wait": recv_wait,
        "send_wait": np.where(waits[:, 0] >= 0, row_wait[waits[:, 0]], row_wait[pairs[:, 0]]),
        "producer": node_of[producer],
        "consumer": node_of[consumer],
        "is_grad": grad.astype(np.int64),
        "bytes": np.maximum(spans.bytes[send], spans.bytes[recv]),
        "src": windows.rank[ws],
        "dst": windows.rank[wr],
    }


def find_transfers(run: Run, msg: dict[str, Int], start: Int, end: Int) -> tuple[Int, NDArray[np.bool_], Int]:
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


def message_edges(edges: EdgeTable, msg: dict[str, Int], transfer: Int, duration: Int, start: Int, end: Int) -> None:
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
    held = msg["send_wait"] >= 0
    edges.add(Edge.OWN, send[held], msg["send_wait"][held], np.where(met, own, 0)[held] - duration[send[held]])


def group_edges(
    edges: EdgeTable,
    windows: Windows,
    pairs: Int,
    arrive: Int,
    done: Int,
    row_window: Int,
    start: Int,
    end: Int,
    first_node: int,
    known: Int,
) -> Int:
    """One GROUP node per collective and step; returns the step of each. known: per span, see `known_lengths`."""
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
    takes = known[pairs[held, 1]]
    waits = takes >= 0
    edges.add(Edge.LEAVE, node[held], done[held], np.where(waits, np.minimum(takes, delay), delay))
    edges.add(Edge.AWAIT, node[held][waits], done[held][waits], delay[waits])
    return group_step


BARRIER_SPREAD = 0.02
"""Launches count as together when they lie within this share of the delay before them (and 50 µs)."""


def barrier_edges(
    edges: EdgeTable,
    windows: Windows,
    window: Int,
    type_: Int,
    optimizer: NDArray[np.bool_],
    start: Int,
    end: Int,
    first_node: int,
) -> Int:
    """Collectives that several GPUs launched together, or optimizers that all did, just after the last of them was
    ready: a barrier that was not recorded (Megatron's timers set one before the gradients, a norm of all gradients
    is one). Taken as fixed host delays, these waits would stay when the late GPU is mended. optimizer: shape of
    window, which nodes are. Adds one GROUP node per barrier, returns the step of each.

    Example: three GPUs are ready at 10, 40 and 90 ms and all launch at 91 ms: a barrier with 1 ms of host delay.
    """
    steps: list[int] = []
    src, dst, delay, data = edges.take(Edge.CHAIN)
    rank = windows.rank[window[dst]]
    rows = np.flatnonzero((type_[dst] == Node.ARRIVE) | optimizer[dst])
    for step, picked in intervals.rows_by(windows.step[window[dst[rows]]]):
        launched = rows[picked]
        groups = list(_together(launched[~optimizer[dst[launched]]], rank, start[dst], end[src], delay))
        last = launched[optimizer[dst[launched]]]
        all_ranks = len(np.unique(rank[last]))
        groups += [g for g in _together(last, rank, start[dst], end[src], delay) if len(g) == all_ranks]
        for members in groups:
            group = np.full(len(members), first_node + len(steps))
            steps.append(step)
            ready = int(end[src[members]].max())
            delay[members] = np.minimum(delay[members], np.maximum(start[dst[members]] - ready, 0))
            edges.add(Edge.JOIN, src[members], group, np.zeros(len(members), dtype=np.int64))
            edges.add(Edge.CHAIN, group, dst[members], delay[members])
    edges.add(Edge.CHAIN, src, dst, delay, data)
    return np.array(steps, dtype=np.int64)


def _together(rows: Int, rank: Int, launch: Int, ready: Int, delay: Int) -> Iterator[Int]:
    """Groups of launches that look like a barrier: within a small spread, most of the delays ended by one event."""
    rows = rows[np.argsort(launch[rows], kind="stable")]
    i = 0
    while i < len(rows):
        t = launch[rows[i]]
        longest = int(delay[rows[i:]][launch[rows[i:]] <= t + 50_000].max())
        reach = t + max(50_000, int(BARRIER_SPREAD * longest))
        j = int(np.searchsorted(launch[rows], reach, "right"))
        # One launch per GPU, and only what was ready before anyone launched: else a GPU would wait for itself.
        members = rows[i:j][ready[rows[i:j]] <= t]
        members = members[np.sort(np.unique(rank[members], return_index=True)[1])]
        last_ready = int(ready[members].max())
        waited = last_ready - ready[members]
        if len(members) > 1 and waited.max() > 1_000_000 and t - last_ready <= BARRIER_SPREAD * waited.max():
            yield members
        i = j
