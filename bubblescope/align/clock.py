"""One time for all hosts, as far as the messages allow (ATTRIBUTION.md §4).

A correction x of each host is bounded by difference constraints: a send begins before its receive ends; a
receive begins before a send ends that cannot be buffered; every member of a collective begins before any ends.
The estimate comes from operations that end together on both sides, and is clipped into what is feasible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.model import Clock, HostClock, Kind, Lane, Notice, Run

Int = NDArray[np.int64]
Float = NDArray[np.float64]

EAGER_BYTES = 4 << 20
"""NCCL's default FIFO: a message up to this size may be sent before anyone receives it."""
_RESOLUTION_NS = 1_000.0
_SAME_CLOCK_NS = 10_000.0
_TOO_WIDE = 0.05
_FEW = 6


def align(run: Run) -> Run:
    """Put all spans on the clock of the lowest rank's host and fill `Run.clock`.

    When the constraints contradict each other, leave a host unbounded, or leave more than 5 % of a step open,
    nothing is moved, `Clock.aligned` is False, and a Notice says why. Ranks of one host share a clock.
    """
    if run.clock.aligned or len(run.layout.ranks) == 0:
        return run
    problem = _Problem.of(run)
    if len(problem.hosts) <= 1:
        return replace(run, clock=Clock(tuple(HostClock(h, 0, 0.0, 0, 0) for h in problem.texts), True, "one host"))
    drift = _drifts(problem)
    limits = _closure(problem.limits(drift))
    if limits is None:
        # A larger FIFO than NCCL's default buffers larger messages: without the rendezvous all may be well.
        limits = _closure(problem.limits(drift, rendezvous=False))
    if limits is None:
        return _refused(run, problem, "clock-infeasible", "messages would arrive before they were sent")
    low, high = -limits[0, :], limits[:, 0]
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        loose = [problem.texts[i] for i in np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))]
        return _refused(run, problem, "clock-unbounded", f"nothing bounds the clock of {', '.join(loose[:4])}")
    offset = _estimate(problem, drift, limits)
    if problem.unknown and np.all(np.abs(offset) <= _SAME_CLOCK_NS) and np.all(low <= 0) and np.all(high >= 0):
        offset, drift = np.zeros_like(offset), np.zeros_like(drift)
    return _moved(run, problem, offset, drift, low, high)


@dataclass(eq=False)
class _Problem:
    """Matched events between hosts (by place in `hosts`); times in ns since `origin`, as stamped.

    pairs: columns (sender host, receiver host, send start, send end, receive start, receive end, may be eager).
    groups: for every collective its (host, latest start, earliest end), one row per member host.
    """

    hosts: Int
    texts: list[str]
    origin: int
    span: float
    step_ns: float
    unknown: bool
    pairs: Float
    groups: list[Float]

    @classmethod
    def of(cls, run: Run) -> _Problem:
        spans, layout = run.spans, run.layout
        timed = np.isin(layout.ranks, np.unique(spans.rank[spans.device >= 0]))
        order = layout.host[timed] if timed.any() else layout.host[:1]
        _, first = np.unique(order, return_index=True)
        hosts = order[np.sort(first)].astype(np.int64)
        place = {int(h): i for i, h in enumerate(hosts.tolist())}
        of_rank = {int(r): place.get(int(h), -1) for r, h in zip(layout.ranks, layout.host, strict=True)}
        origin = int(spans.start_ns.min()) if len(spans) else 0
        texts = [run.names[int(h)] for h in hosts]
        length = float(spans.end_ns.max() - origin) if len(spans) else 0.0
        return cls(
            hosts, texts, origin, length, _step_length(run, length),
            all(t.endswith("(host unknown)") for t in texts),
            _pairs(run, of_rank, origin), _groups(run, of_rank, origin),
        )  # fmt: skip

    def limits(self, drift: Float, *, rendezvous: bool = True) -> Float:
        """Upper bounds on x_a - x_b, shape (hosts, hosts), after drift is taken out; inf where there is none."""
        n = len(self.hosts)
        bound = np.full((n, n), np.inf)
        np.fill_diagonal(bound, 0.0)
        if len(self.pairs):
            s, r = self.pairs[:, 0].astype(int), self.pairs[:, 1].astype(int)
            times = self.pairs[:, 2:6]
            own_s, own_r = times[:, :2] * (1 + drift[s])[:, None], times[:, 2:] * (1 + drift[r])[:, None]
            np.minimum.at(bound, (s, r), own_r[:, 1] - own_s[:, 0] + _RESOLUTION_NS)
            firm = (self.pairs[:, 6] == 0) & rendezvous
            np.minimum.at(bound, (r[firm], s[firm]), (own_s[:, 1] - own_r[:, 0])[firm] + _RESOLUTION_NS)
        for group in self.groups:
            host = group[:, 0].astype(int)
            times = group[:, 1:] * (1 + drift[host])[:, None]
            gaps = times[None, :, 1] - times[:, 0, None] + _RESOLUTION_NS
            a, b = np.meshgrid(host, host, indexing="ij")
            np.minimum.at(bound, (a, b), gaps)
        np.fill_diagonal(bound, 0.0)
        return bound


def _step_length(run: Run, otherwise: float) -> float:
    rows = run.spans.where(lane=Lane.RANGE, kind=Kind.STEP)
    return float(np.median(run.spans.duration_ns[rows])) if rows.any() else otherwise


def _pairs(run: Run, of_rank: dict[int, int], origin: int) -> Float:
    spans, p2p, waits = run.spans, run.links.p2p, run.links.p2p_wait
    if len(p2p) == 0:
        return np.empty((0, 7))
    a = np.array([of_rank.get(int(r), -1) for r in spans.rank[p2p[:, 0]]])
    b = np.array([of_rank.get(int(r), -1) for r in spans.rank[p2p[:, 1]]])
    end_a = np.where(waits[:, 0] >= 0, spans.end_ns[waits[:, 0]], spans.end_ns[p2p[:, 0]])
    end_b = np.where(waits[:, 1] >= 0, spans.end_ns[waits[:, 1]], spans.end_ns[p2p[:, 1]])
    size = np.maximum(spans.bytes[p2p[:, 0]], spans.bytes[p2p[:, 1]])
    # A post that is not a kernel says nothing about when the transfer was over for the sender.
    eager = (size <= EAGER_BYTES) | (waits[:, 0] >= 0)
    times = np.stack([spans.start_ns[p2p[:, 0]], end_a, spans.start_ns[p2p[:, 1]], end_b], axis=1) - origin
    table: Float = np.column_stack([a, b, times, eager]).astype(np.float64)
    result: Float = table[(a >= 0) & (b >= 0) & (a != b)]
    return result


def _groups(run: Run, of_rank: dict[int, int], origin: int) -> list[Float]:
    spans, links = run.spans, run.links.collective
    if len(links) == 0:
        return []
    order = np.argsort(links[:, 0], kind="stable")
    links = links[order]
    out = []
    for part in np.split(links[:, 1], np.flatnonzero(np.diff(links[:, 0])) + 1):
        host = np.array([of_rank.get(int(r), -1) for r in spans.rank[part]])
        rows = []
        for h in np.unique(host[host >= 0]).tolist():
            mine = part[host == h]
            rows.append((h, spans.start_ns[mine].max() - origin, spans.end_ns[mine].min() - origin))
        if len(rows) > 1:
            out.append(np.array(rows, dtype=np.float64))
    return out


def _closure(bound: Float) -> Float | None:
    """Tightest implied bounds (Floyd and Warshall); None when a cycle contradicts itself."""
    out = bound.copy()
    for k in range(len(out)):
        out = np.minimum(out, out[:, k, None] + out[None, k, :])
        if np.any(np.diag(out) < 0):
            return None
    return out


# --- estimate ------------------------------------------------------------------------------------------------


def _ends(problem: _Problem, a: int, b: int) -> tuple[Float, Float]:
    """(time, x_a - x_b that would make the ends equal) of operations that a and b share."""
    out: list[tuple[float, float]] = []
    pairs = problem.pairs
    if len(pairs):
        there = (pairs[:, 0] == a) & (pairs[:, 1] == b)
        back = (pairs[:, 0] == b) & (pairs[:, 1] == a)
        out.extend(zip(pairs[there, 3].tolist(), (pairs[there, 5] - pairs[there, 3]).tolist(), strict=True))
        out.extend(zip(pairs[back, 5].tolist(), (pairs[back, 3] - pairs[back, 5]).tolist(), strict=True))
    for group in problem.groups:
        mine, theirs = group[group[:, 0] == a], group[group[:, 0] == b]
        if len(mine) and len(theirs):
            out.append((float(mine[0, 2]), float(theirs[0, 2] - mine[0, 2])))
    out.sort()
    table: Float = np.array(out, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _line(time: Float, value: Float) -> tuple[float, float]:
    """Robust line (slope, value at time 0): least squares on what stays within three deviations of it."""
    keep = np.ones(len(time), dtype=np.bool_)
    slope, level = 0.0, float(np.median(value)) if len(value) else 0.0
    for round_ in range(6):
        if keep.sum() < _FEW or np.ptp(time[keep]) == 0:
            break
        if round_:
            slope, level = (float(c) for c in np.polyfit(time[keep], value[keep], 1))
        rest = np.abs(value - (slope * time + level))
        spread = 1.4826 * float(np.median(rest[keep]))
        keep = rest <= 3 * max(spread, _RESOLUTION_NS)
    return slope, level


def _tree(problem: _Problem) -> list[tuple[int, int]]:
    """(host, host already reached) from the first host on; hosts that share nothing with it are left out."""
    n = len(problem.hosts)
    linked = np.zeros((n, n), dtype=np.bool_)
    if len(problem.pairs):
        linked[problem.pairs[:, 0].astype(int), problem.pairs[:, 1].astype(int)] = True
    for group in problem.groups:
        host = group[:, 0].astype(int)
        linked[np.ix_(host, host)] = True
    linked |= linked.T
    reached, edges = [0], []
    for at in reached:
        for other in np.flatnonzero(linked[at]).tolist():
            if other not in reached:
                reached.append(other)
                edges.append((other, at))
    return edges


def _drifts(problem: _Problem) -> Float:
    """Rate of each clock against the first; 0 unless the ends show one that the window is long enough to see."""
    drift = np.zeros(len(problem.hosts))
    for host, known in _tree(problem):
        time, value = _ends(problem, host, known)
        if len(time) < _FEW:
            drift[host] = drift[known]
            continue
        slope, level = _line(time, value)
        rest = np.abs(value - (slope * time + level))
        noise = 1.4826 * float(np.median(rest)) + _RESOLUTION_NS
        # The slope of n points over the window is known to about noise / window.
        seen = abs(slope) * np.ptp(time) > 6 * noise and abs(slope) < 1e-3
        drift[host] = drift[known] + (slope if seen else 0.0)
    return drift


def _estimate(problem: _Problem, drift: Float, limits: Float) -> Float:
    """Offset of each host: where ends meet, clipped so that all constraints hold together."""
    offset = np.zeros(len(problem.hosts))
    fixed = [0]
    for host, known in _tree(problem):
        low = max(offset[k] - limits[k, host] for k in fixed)
        high = min(offset[k] + limits[host, k] for k in fixed)
        middle = (low + high) / 2
        wanted = _meeting(problem, host, known, drift, middle - offset[known], (high - low) / 2)
        offset[host] = np.clip(middle if wanted is None else offset[known] + wanted, low, high)
        fixed.append(host)
    return offset


def _meeting(problem: _Problem, a: int, b: int, drift: Float, guess: float, slack: float) -> float | None:
    """x_a - x_b at which operations end together that surely did: collectives, and messages whose receiver was
    waiting already (a buffered message may end earlier for its sender). None when there are none."""
    values: list[float] = []
    for row in problem.pairs:
        if {int(row[0]), int(row[1])} != {a, b}:
            continue
        s, r = int(row[0]), int(row[1])
        send = row[2:4] * (1 + drift[s])
        receive = row[4:6] * (1 + drift[r])
        if send[0] == send[1]:
            continue  # A mark of where the message was made, derived by a reader: it does not end with the receive.
        shift = guess if s == a else -guess
        if receive[0] < send[0] + shift - slack:
            gap = receive[1] - send[1]
            values.append(gap if s == a else -gap)
    for group in problem.groups:
        mine, theirs = group[group[:, 0] == a], group[group[:, 0] == b]
        if len(mine) and len(theirs):
            values.append(float(theirs[0, 2] * (1 + drift[b]) - mine[0, 2] * (1 + drift[a])))
    return float(np.median(values)) if values else None


# --- result --------------------------------------------------------------------------------------------------


def _refused(run: Run, problem: _Problem, code: str, why: str) -> Run:
    clock = Clock(tuple(HostClock(h) for h in problem.texts), False, why)
    message = f"the clocks of {len(problem.hosts)} hosts are not aligned: {why}; their times are not compared"
    return replace(run, clock=clock).with_notices(Notice(code, message))


def _moved(run: Run, problem: _Problem, offset: Float, drift: Float, low: Float, high: Float) -> Run:
    half = float(np.max(high - low)) / 2
    hosts = tuple(
        HostClock(text, round(offset[i]), float(drift[i]), round(low[i]), round(high[i]))
        for i, text in enumerate(problem.texts)
    )
    if half > _TOO_WIDE * problem.step_ns:
        step_us = problem.step_ns / 1e3
        why = f"the offset is only known to ±{half / 1e3:.0f} us, more than 5 % of a step of {step_us:.0f} us"
        refused = _refused(run, problem, "clock-too-wide", why)
        return replace(
            refused, clock=replace(refused.clock, hosts=tuple(replace(h, offset_ns=0, drift=0.0) for h in hosts))
        )
    spans, layout = run.spans, run.layout
    place = {int(h): i for i, h in enumerate(problem.hosts.tolist())}
    start, end = spans.start_ns.copy(), spans.end_ns.copy()
    for rank, host in zip(layout.ranks.tolist(), layout.host.tolist(), strict=True):
        i = place.get(host, -1)
        if i < 0 or (offset[i] == 0 and drift[i] == 0):
            continue
        rows = spans.rank == rank
        for column in (start, end):
            since = (column[rows] - problem.origin).astype(np.float64)
            column[rows] += np.rint(offset[i] + drift[i] * since).astype(np.int64)
    clock = Clock(hosts, True, "operations that both sides end together, within the limits of causality")
    return replace(run, spans=spans.with_columns(start_ns=start, end_ns=end), clock=clock)
