"""Which sends and receives are one message, and which kernels are one collective (ATTRIBUTION.md §3)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.model import Kind, Lane, Notice, Run

Int = NDArray[np.int64]
Mask = NDArray[np.bool_]
_SHIFTS = 16


def match(run: Run) -> Run:
    """Fill `Links.p2p`, `Links.p2p_wait` and `Links.collective` where they are empty.

    Key: (communicator, source, destination, k-th in host issue order). Messages of a step that the two sides count
    differently stay unmatched. Where no steps are known, heads or tails are dropped by the smallest shift that
    satisfies bytes and, on one clock, causality. What stays unmatched is counted in a Notice.
    """
    if len(run.links.p2p) == 0:
        run = _match_p2p(run)
    return _match_collectives(run) if len(run.links.collective) == 0 else run


def issue_time(run: Run) -> Int:
    """Start of the launch where it is known, else of the row itself."""
    at = run.spans.start_ns.copy()
    launch = run.links.launch
    if len(launch):
        at[launch[:, 1]] = run.spans.start_ns[launch[:, 0]]
    return at


# --- point to point ------------------------------------------------------------------------------------------


def _match_p2p(run: Run) -> Run:
    spans = run.spans
    rows = np.flatnonzero(
        np.isin(spans.kind, (Kind.SEND, Kind.RECV))
        & np.isin(spans.lane, (Lane.COMM, Lane.POST))
        & (spans.peer >= 0)
        & (spans.peer != spans.rank)
    )
    if len(rows) == 0:
        return run
    rows = rows[np.lexsort((rows, issue_time(run)[rows]))]
    sends, receives = _queues(run, rows)
    present = set(run.ranks)
    pairs: list[tuple[Int, Int]] = []
    lost: Counter[str] = Counter()
    shifted = 0
    for key in sorted(set(sends) | set(receives)):
        _, source, destination = key
        if source not in present or destination not in present:
            lost["one end has no trace"] += len(sends.get(key, ())) + len(receives.get(key, ()))
            continue
        a, b = np.array(sends.get(key, []), dtype=np.int64), np.array(receives.get(key, []), dtype=np.int64)
        mine, theirs, moved = _pair(run, a, b)
        shifted += moved
        pairs.append((mine, theirs))
        lost["no counterpart"] += len(a) + len(b) - 2 * len(mine)
    p2p = np.concatenate([np.stack(p, axis=1) for p in pairs]) if pairs else np.empty((0, 2), np.int64)
    p2p = p2p[np.lexsort((p2p[:, 1], spans.start_ns[p2p[:, 0]]))]
    links = replace(run.links, p2p=p2p, p2p_wait=_waits(run, p2p))
    return replace(run, links=links).with_notices(*_p2p_notices(len(p2p), lost, shifted))


def _queues(run: Run, rows: Int) -> tuple[dict[tuple[int, int, int], list[int]], dict[tuple[int, int, int], list[int]]]:
    """(communicator, source, destination) -> rows in issue order, for sends and for receives."""
    spans = run.spans
    group = _one_name_per_pair(run, rows)
    sends: dict[tuple[int, int, int], list[int]] = {}
    receives: dict[tuple[int, int, int], list[int]] = {}
    sent = (spans.kind[rows] == Kind.SEND).tolist()
    columns = (group.tolist(), spans.rank[rows].tolist(), spans.peer[rows].tolist())
    for row, is_send, name, rank, peer in zip(rows.tolist(), sent, *columns, strict=True):
        if is_send:
            sends.setdefault((name, rank, peer), []).append(row)
        else:
            receives.setdefault((name, peer, rank), []).append(row)
    return sends, receives


def _one_name_per_pair(run: Run, rows: Int) -> Int:
    """The communicator of each row; 0 for a pair of ranks whose two ends do not name the same set of them.

    Names of subgroups are counters in some versions and differ between ranks: then only the pair is a key.
    """
    spans = run.spans
    source = np.where(spans.kind[rows] == Kind.SEND, spans.rank[rows], spans.peer[rows])
    destination = np.where(spans.kind[rows] == Kind.SEND, spans.peer[rows], spans.rank[rows])
    group = spans.group[rows].astype(np.int64)
    named: dict[tuple[int, int], dict[int, set[int]]] = {}
    for s, d, kind, g in zip(
        source.tolist(), destination.tolist(), spans.kind[rows].tolist(), group.tolist(), strict=True
    ):
        named.setdefault((s, d), {}).setdefault(kind, set()).add(g)
    agree = {pair for pair, sides in named.items() if sides.get(Kind.SEND) == sides.get(Kind.RECV)}
    same = np.array(
        [(s, d) in agree for s, d in zip(source.tolist(), destination.tolist(), strict=True)], dtype=np.bool_
    )
    return np.where(same, group, 0)


def _pair(run: Run, sends: Int, receives: Int) -> tuple[Int, Int, int]:
    """Matched rows of one queue, and 1 when a shift was needed. Where steps are known those that both sides count alike
    are matched within themselves: of another one nobody can say which message was lost, and it moves nothing else."""
    spans = run.spans
    step_s, step_r = spans.step[sends], spans.step[receives]
    if len(sends) and len(receives) and (step_s >= 0).all() and (step_r >= 0).all():
        counts = [dict(zip(*np.unique(steps, return_counts=True), strict=True)) for steps in (step_s, step_r)]
        alike = [step for step, count in counts[0].items() if counts[1].get(step) == count]
        return sends[np.isin(step_s, alike)], receives[np.isin(step_r, alike)], 0
    if len(sends) == len(receives):
        return sends, receives, 0
    return (*_shift(run, sends, receives), 1)


def _shift(run: Run, sends: Int, receives: Int) -> tuple[Int, Int]:
    """The overlap of two queues under the smallest shift that fits; nothing when none does."""
    for distance in sorted(range(-_SHIFTS, _SHIFTS + 1), key=lambda d: (abs(d), d)):
        a, b = (sends[distance:], receives) if distance >= 0 else (sends, receives[-distance:])
        n = min(len(a), len(b))
        if n and _fits(run, a[:n], b[:n]):
            return a[:n], b[:n]
    return sends[:0], receives[:0]


def _fits(run: Run, sends: Int, receives: Int) -> bool:
    """Equal bytes; and no receive ends before its send began, as far as one clock tells."""
    spans = run.spans
    known = (spans.bytes[sends] >= 0) & (spans.bytes[receives] >= 0)
    if np.any(known & (spans.bytes[sends] != spans.bytes[receives])):
        return False
    both = (spans.microbatch[sends] >= 0) & (spans.microbatch[receives] >= 0)
    if np.any(both & (spans.microbatch[sends] != spans.microbatch[receives])):
        return False
    if not same_clock(run, sends, receives).all():
        return True
    return bool(np.all(arrival(run, receives) >= spans.start_ns[sends]))


def arrival(run: Run, rows: Int) -> Int:
    """End of the kernel, or of the wait of a post."""
    waits = _wait_rows(run, rows)
    result: Int = np.where(waits >= 0, run.spans.end_ns[waits], run.spans.end_ns[rows])
    return result


def same_clock(run: Run, a: Int, b: Int) -> Mask:
    """Whether rows `a` and `b` stand on one clock: stamped by one host, or put on one since."""
    if len(run.layout.host) == 0:
        return np.ones(len(a), dtype=np.bool_)
    result: Mask = run.clock_part(run.spans.rank[a]) == run.clock_part(run.spans.rank[b])
    return result


def _waits(run: Run, p2p: Int) -> Int:
    """The WAIT rows beside matched POST rows; -1 for kernels, which are their own wait."""
    if len(p2p) == 0:
        return np.empty((0, 2), dtype=np.int64)
    return np.stack([_wait_rows(run, p2p[:, 0]), _wait_rows(run, p2p[:, 1])], axis=1)


def _wait_rows(run: Run, rows: Int) -> Int:
    spans = run.spans
    waits = np.flatnonzero((spans.lane == Lane.WAIT) & (spans.corr >= 0))
    if len(waits) == 0:
        return np.full(len(rows), -1, dtype=np.int64)
    place = {(int(spans.rank[w]), int(spans.kind[w]), int(spans.corr[w])): w for w in waits.tolist()}
    found = [
        place.get((int(spans.rank[r]), int(spans.kind[r]), int(spans.corr[r])), -1)
        if spans.lane[r] == Lane.POST
        else -1
        for r in rows.tolist()
    ]
    return np.array(found, dtype=np.int64)


def _p2p_notices(matched: int, lost: Counter[str], shifted: int) -> list[Notice]:
    out = []
    unmatched = {why: n for why, n in lost.items() if n}
    if unmatched:
        why = ", ".join(f"{n} ({reason})" for reason, n in sorted(unmatched.items()))
        out.append(Notice("p2p-unmatched", f"{matched} messages were matched; ends without a partner: {why}"))
    if shifted:
        out.append(
            Notice("p2p-shifted", f"{shifted} message queues were matched after dropping an unmatched head or tail")
        )
    return out


# --- collectives ---------------------------------------------------------------------------------------------


def _match_collectives(run: Run) -> Run:
    """Instances by (communicator, sequence number), else the k-th of that kernel name where all count alike."""
    spans = run.spans
    rows = np.flatnonzero(
        (spans.kind == Kind.COLLECTIVE) & np.isin(spans.lane, (Lane.COMM, Lane.POST)) & (spans.device >= 0)
    )
    if len(rows) == 0:
        return run
    rows = rows[np.lexsort((rows, issue_time(run)[rows], spans.rank[rows]))]
    families: dict[tuple[int, int], list[int]] = {}
    for row in rows.tolist():
        group = int(spans.group[row])
        # Names stand in for an unknown communicator; a known one orders all of its operations together.
        families.setdefault((group, 0 if group else int(spans.name[row])), []).append(row)
    instances: list[list[int]] = []
    left_out = 0
    for (group, _), members in sorted(families.items()):
        found = _instances(run, members, known=group > 0)
        matched = {row for instance in found for row in instance}
        left_out += len(members) - len(matched)
        instances.extend(found)
    pairs = [(number, row) for number, instance in enumerate(instances) for row in sorted(instance)]
    run = replace(run, links=replace(run.links, collective=np.array(pairs, dtype=np.int64).reshape(-1, 2)))
    if left_out:
        message = (
            f"{len(instances)} collectives were matched; {left_out} kernels found no partner on another rank: how "
            "long they waited for other members is not known, and their part of exposed collective is an upper limit, "
            "estimated by the quickest of the same kind"
        )
        run = run.with_notices(Notice("collective-unmatched", message))
    return run


def _instances(run: Run, rows: list[int], *, known: bool) -> list[list[int]]:
    spans = run.spans
    by_rank: dict[int, list[int]] = {}
    for row in rows:
        by_rank.setdefault(int(spans.rank[row]), []).append(row)
    if len(by_rank) < 2:
        return []
    numbers = {rank: [int(spans.seq[r]) for r in mine] for rank, mine in by_rank.items()}
    if known and all(min(n) >= 0 and len(set(n)) == len(n) for n in numbers.values()):
        at: dict[int, list[int]] = {}
        for rank, mine in by_rank.items():
            for row, number in zip(mine, numbers[rank], strict=True):
                at.setdefault(number, []).append(row)
        return [at[number] for number in sorted(at) if len(at[number]) > 1]
    if len({len(mine) for mine in by_rank.values()}) != 1:
        return []
    found = [list(instance) for instance in zip(*by_rank.values(), strict=True)]
    return found if known or _overlap(run, found) else []


def _overlap(run: Run, instances: list[list[int]]) -> bool:
    """Whether k-th with k-th is believable where the communicator is not known: on one clock, all members of
    nearly every instance run at some moment together. Different groups with one kernel name would not."""
    spans = run.spans
    good = told = 0
    for instance in instances:
        rows = np.array(instance, dtype=np.int64)
        if not same_clock(run, rows[:-1], rows[1:]).all():
            continue
        told += 1
        good += bool(spans.start_ns[rows].max() <= spans.end_ns[rows].min())
    return told == 0 or good >= 0.9 * told


# --- wait and transfer ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Messages:
    """One matched message a row, beside `Links.p2p`; times in ns on the aligned clock.

    sent, posted: when the sender and the receiver began (S, own start). ready: R = max of both. arrived: Q, end
    of the receive. wait: of the receiver. send_wait: of the sender (0 when eager). transfer, with transfer_low
    and transfer_high: best value and the limits that both methods and the clock interval leave. eager: the
    sender was done before the receiver began. one_clock: both ends were stamped by one host.
    """

    sent: Int
    posted: Int
    ready: Int
    arrived: Int
    wait: Int
    send_wait: Int
    transfer: Int
    transfer_low: Int
    transfer_high: Int
    eager: Mask
    one_clock: Mask

    def __len__(self) -> int:
        return len(self.sent)


def wait_transfer(run: Run) -> Messages:
    """Wait and transfer of every matched message, by both methods of ATTRIBUTION.md §3.

    First method: transfer = end - max(start), which needs aligned clocks. Second: the shorter of the two
    kernels, which needs none, but is an upper limit only: the later end still has to launch its kernel. The
    first is used where the clock allows, the second bounds it.
    """
    spans, links = run.spans, run.links
    send, receive = links.p2p[:, 0], links.p2p[:, 1]
    sent, posted = spans.start_ns[send], spans.start_ns[receive]
    send_end = np.where(links.p2p_wait[:, 0] >= 0, spans.end_ns[links.p2p_wait[:, 0]], spans.end_ns[send])
    arrived = np.where(links.p2p_wait[:, 1] >= 0, spans.end_ns[links.p2p_wait[:, 1]], spans.end_ns[receive])
    arrived = np.maximum(arrived, posted)
    one = _stamped_together(run, send, receive)
    later, earlier = _slack(run, sent, arrived, one)
    own, other = arrived - posted, np.maximum(send_end - sent, 0)
    usable = same_clock(run, send, receive)
    # Two kernels of a rendezvous end together; a sender that was done earlier handed its data to a buffer.
    eager = usable & (send_end + later < posted)
    ready = np.clip(np.maximum(sent, posted), posted, arrived)
    first = arrived - ready
    if run.source.timing == "host":
        first = np.minimum(first, _idle_between(run, receive, ready, arrived))
    second = np.where(eager, own, np.minimum(own, other))
    low = arrived - np.clip(np.maximum(sent + later, posted), posted, arrived)
    high = arrived - np.clip(np.maximum(sent - earlier, posted), posted, arrived)
    transfer = np.where(usable, first, second)
    return Messages(
        sent=sent,
        posted=posted,
        ready=np.where(usable, ready, arrived - second),
        arrived=arrived,
        wait=own - transfer,
        send_wait=np.where(eager, 0, np.where(usable, np.clip(posted - sent, 0, other), other - second)),
        transfer=transfer,
        transfer_low=np.minimum(transfer, np.where(usable, low, 0)),
        transfer_high=np.maximum(transfer, np.where(usable, np.minimum(high, np.maximum(second, first)), second)),
        eager=eager,
        one_clock=one,
    )


LOW_QUANTILE = 0.05


def one_sided_transfer(run: Run) -> Int:
    """Per span, ns: what of a send or receive kernel was transfer as far as one rank can tell, -1 for other rows.

    The other end may be missing, so no start can be compared: the estimate is the 5 % quantile of the durations of
    the same (rank, peer, direction, bytes), where some operation met a peer that was ready. A direction in which
    everybody always waits would be all transfer, so the lower one of both directions of a pair and size is taken.

    Worked example: receives of 8 MiB from rank 3 last 50, 52 and 900 us, sends of 8 MiB to it 51 and 2000 us: the
    transfer of each is 50 us.
    """
    spans = run.spans
    out = np.full(len(spans), -1, dtype=np.int64)
    rows = np.flatnonzero((spans.lane == Lane.COMM) & np.isin(spans.kind, (Kind.SEND, Kind.RECV)))
    if len(rows) == 0:
        return out
    length = spans.duration_ns[rows]
    pair = np.stack([spans.rank[rows], spans.peer[rows], spans.bytes[rows]], axis=1).astype(np.int64)
    which = np.unique(pair, axis=0, return_inverse=True)[1].reshape(-1)
    least = np.full(int(which.max()) + 1, np.iinfo(np.int64).max)
    both = which * 2 + (spans.kind[rows] == Kind.SEND)
    for one, mine in intervals.rows_by(both):
        low = np.quantile(length[mine], LOW_QUANTILE, method="lower")
        least[one // 2] = min(least[one // 2], int(low))
    out[rows] = np.minimum(length, least[which])
    return out


def local_transfer(run: Run) -> Int:
    """Per span, ns: what of a receive or send kernel was transfer, -1 for other rows: of a matched receive as its
    message tells (`wait_transfer`), else as one side can (`one_sided_transfer`)."""
    out = one_sided_transfer(run)
    receive = run.links.p2p[:, 1]
    both = wait_transfer(run).transfer
    known = out[receive]
    usable = same_clock(run, run.links.p2p[:, 0], receive)
    out[receive] = np.where(known < 0, known, np.where(usable, both, np.minimum(both, known)))
    return out


def collective_transfer(run: Run) -> Int:
    """Per span, ns: what of a collective's kernel was not waiting for its members, -1 for other rows.

    All members end together, so the last to arrive waits for nobody: its kernel is the shortest, and as long as the
    operation takes. No clock is needed. A member without a trace may have been later still: then it is an upper limit.
    Of a kernel that no other member's was found for, the limit is the 5 % quantile of the durations of the same (rank,
    communicator, name, bytes), where this rank was the last now and then.

    Worked example: an all-reduce lasts 0.3 ms on rank 0 and 6.4 ms on rank 3: rank 3 waited for 6.1 ms.
    """
    spans, links = run.spans, run.links.collective
    out = np.full(len(spans), -1, dtype=np.int64)
    rows = np.flatnonzero((spans.lane == Lane.COMM) & (spans.kind == Kind.COLLECTIVE))
    alone = np.setdiff1d(rows, links[:, 1])
    kind = np.stack([spans.rank[alone], spans.group[alone], spans.name[alone], spans.bytes[alone]], axis=1)
    for _, picked in intervals.rows_by(np.unique(kind, axis=0, return_inverse=True)[1].reshape(-1)):
        length = spans.duration_ns[alone[picked]]
        out[alone[picked]] = np.minimum(length, int(np.quantile(length, LOW_QUANTILE, method="lower")))
    links = links[spans.lane[links[:, 1]] == Lane.COMM]
    if len(links):
        where = np.unique(links[:, 0], return_inverse=True)[1].reshape(-1)
        least = np.full(int(where.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, where, spans.duration_ns[links[:, 1]])
        out[links[:, 1]] = least[where]
    return out


def _slack(run: Run, sent: Int, arrived: Int, one_clock: Mask) -> tuple[Int, Int]:
    """How much later and how much earlier each send may truly have been, against the receiver's clock.

    The messages between two hosts bound the error of their alignment: none arrives before it was sent.
    """
    layout, spans, p2p = run.layout, run.spans, run.links.p2p
    later, earlier = np.zeros(len(sent), dtype=np.int64), np.zeros(len(sent), dtype=np.int64)
    if one_clock.all():
        return later, earlier
    host = layout.host[np.searchsorted(layout.ranks, spans.rank[p2p])]
    shortest: dict[tuple[int, int], int] = {}
    for (a, b), length in zip(host.tolist(), (arrived - sent).tolist(), strict=True):
        shortest[(a, b)] = min(shortest.get((a, b), length), length)
    widths = [h.high_ns - h.low_ns for h in run.clock.hosts if h.low_ns is not None and h.high_ns is not None]
    widest = max(widths, default=0)
    for i, (a, b) in enumerate(host.tolist()):
        if a != b:
            later[i] = max(0, shortest[(a, b)])
            earlier[i] = max(0, shortest.get((b, a), widest))
    return later, earlier


def _idle_between(run: Run, receive: Int, low: Int, high: Int) -> Int:
    """Part of [low, high) in which the receiver did nothing else. A gloo receive is over for the profiler when
    the host asks for it, and a host that computes asks late."""
    spans = run.spans
    out = high - low
    compute = np.flatnonzero(spans.lane == Lane.COMPUTE)
    busy_of = {rank: compute[rows] for rank, rows in intervals.rows_by(spans.rank[compute])}
    for rank, mine in intervals.rows_by(spans.rank[receive]):
        busy = busy_of.get(rank, compute[:0])
        done = intervals.union(spans.start_ns[busy], spans.end_ns[busy])
        worked = intervals.measure_before(done, high[mine]) - intervals.measure_before(done, low[mine])
        out[mine] -= worked
    return out


def _stamped_together(run: Run, a: Int, b: Int) -> Mask:
    layout, spans = run.layout, run.spans
    if len(layout.host) == 0:
        return np.ones(len(a), dtype=np.bool_)
    host = layout.host[np.searchsorted(layout.ranks, spans.rank[a])]
    result: Mask = host == layout.host[np.searchsorted(layout.ranks, spans.rank[b])]
    return result
