"""One time for all hosts, as far as the messages allow (ATTRIBUTION.md §4).

A correction x of each host is bounded by difference constraints: a send begins before its receive ends; a
receive begins before a send ends that cannot be buffered; every member of a collective begins before any ends.
Steps that contradict what most others allow (a damaged row, a clock that was set) are left out and named. The estimate
comes from operations that end together on both sides, and is clipped into what is feasible.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.align.hosts import apart
from bubblescope.model import Clock, HostClock, Kind, Lane, Notice, Run
from bubblescope.model.notice import counted, some

Int = NDArray[np.int64]
Float = NDArray[np.float64]

EAGER_BYTES = 4 << 20
"""NCCL's default FIFO: a message up to this size may be sent before anyone receives it."""
_RESOLUTION_NS = 1_000.0
_SAME_CLOCK_NS = 10_000.0
_TOO_WIDE = 0.05
_FEW = 6
_INFEASIBLE = "clock-infeasible"
_MOST_BOUNDS = 10_000_000
_HOW = "operations that both sides end together, within the limits of causality"


def align(run: Run) -> Run:
    """Put all spans on the clock of the lowest rank's host and fill `Run.clock`. Ranks of one host share a clock.

    Hosts whose offset from the first one is not known to within 5 % of a step make parts of their own, each on one
    clock; then `Clock.aligned` is False. Hosts whose constraints contradict each other are of different parts. Steps
    that contradict most others join ``source.details["cut_steps"]``. A Notice says all of this.
    """
    if run.clock.aligned or len(run.layout.ranks) == 0:
        return run
    problem = _Problem.of(run)
    if len(problem.hosts) <= 1:
        return replace(run, clock=Clock(tuple(HostClock(h, 0, 0.0, 0, 0) for h in problem.texts), True, "one host"))
    connected = _connected(problem)
    notices = [_apart(problem, connected)] if len(connected) > 1 else []
    parts: list[_Part] = []
    wrong: dict[int, str] = {}
    for hosts in connected:
        found, said, left_out = _solve(problem.of_hosts(hosts))
        wrong |= left_out
        parts.extend(replace(part, hosts=hosts[part.hosts]) for part in found)
        notices.extend(said)
    if any(n.code == _INFEASIBLE for n in notices):
        again = _rank_by_rank(run)
        if again is not None:
            return again
    return _moved(_left_out(run, wrong), problem, parts).with_notices(*notices)


def _rank_by_rank(run: Run) -> Run | None:
    """Aligned with a clock for every rank; None where that is infeasible as well, or no host has several ranks."""
    names, count = np.unique(run.layout.host, return_counts=True)
    why = "the messages and collectives of its ranks with other hosts are possible on several clocks only"
    shared = dict.fromkeys(names[count > 1].tolist(), why)
    if not shared:
        return None
    aligned = align(apart(run, shared))
    return None if any(n.code == _INFEASIBLE for n in aligned.notices) else aligned


@dataclass(frozen=True, eq=False)
class _Part:
    """Hosts (by place) that are on one clock, after adding offset (ns) and drift (ratio) to each. low, high: limits of
    the offset, against the first of them."""

    hosts: Int
    offset: Float
    drift: Float
    low: Float
    high: Float


def _solve(problem: _Problem) -> tuple[list[_Part], list[Notice], dict[int, str]]:
    """The parts of hosts that bound each other, what is to be said where they are several, and steps that contradict
    the others (see `_contradicting`)."""
    drift = _drifts(problem)
    limits = _feasible(problem, drift)
    if limits is None:
        wrong = _contradicting(problem, drift)
        if not wrong:
            return (*_apart_by_force(problem, drift), {})
        parts, said, _ = _solve(problem.without(wrong))
        return parts, said, wrong
    half = (limits + limits.T) / 2
    near = _near(half, _TOO_WIDE * problem.step_ns)
    parts = []
    for hosts in near:
        low, high = -limits[hosts[0], hosts], limits[hosts, hosts[0]]
        own = problem.of_hosts(hosts)
        offset = _estimate(own, drift[hosts], limits[np.ix_(hosts, hosts)])
        rate = drift[hosts]
        if problem.unknown and np.all(np.abs(offset) <= _SAME_CLOCK_NS) and np.all(low <= 0) and np.all(high >= 0):
            offset, rate = np.zeros_like(offset), np.zeros_like(rate)
        parts.append(_Part(hosts, offset, rate, low, high))
    return parts, [_too_wide(problem, hosts, float(half[0, hosts[0]])) for hosts in near[1:]], {}


def _feasible(problem: _Problem, drift: Float) -> Float | None:
    """The tightest implied bounds; None where they contradict each other."""
    limits = _closure(problem.limits(drift))
    # A larger FIFO than NCCL's default buffers larger messages: without the rendezvous all may be well.
    return _closure(problem.limits(drift, rendezvous=False)) if limits is None else limits


def _apart_by_force(problem: _Problem, drift: Float) -> tuple[list[_Part], list[Notice]]:
    """Of hosts whose constraints contradict each other: each joins the first part that it bounds and does not
    contradict."""
    bound = problem.limits(drift, rendezvous=False)
    chosen: list[list[int]] = []
    closed: list[Float] = []
    for host in range(len(bound)):
        for i, part in enumerate(chosen):
            limits = _with_one_more(closed[i], bound[host, part], bound[part, host])
            if limits is not None:
                part.append(host)
                closed[i] = limits
                break
        else:
            chosen.append([host])
            closed.append(np.zeros((1, 1)))
    named = " | ".join(some([problem.texts[i] for i in part], 4) for part in chosen[:4]) + " | …" * (len(chosen) > 4)
    message = (
        f"the clocks of {named} are not aligned: messages would arrive before they were sent; times are compared "
        "within each of these parts only"
    )
    parts: list[_Part] = []
    notices = [Notice(_INFEASIBLE, message)]
    for hosts in map(np.array, chosen):
        found, said, _ = _solve(problem.of_hosts(hosts))
        parts.extend(replace(part, hosts=hosts[part.hosts]) for part in found)
        notices.extend(said)
    return parts, notices


def _with_one_more(limits: Float, to: Float, back: Float) -> Float | None:
    """Tightest bounds of hosts that have `limits`, and of one more: `to` bounds its x minus theirs, `back` theirs minus
    its. None where this contradicts them, or does not bound it from both sides."""
    to, back = (to[:, None] + limits).min(axis=0), (limits + back[None, :]).min(axis=1)
    if not np.isfinite(to + back).all() or (to + back).min() < 0:
        return None
    inner = np.minimum(limits, back[:, None] + to[None, :])
    result: Float = np.block([[inner, back[:, None]], [to[None, :], np.zeros((1, 1))]])
    return result


def _contradicting(problem: _Problem, drift: Float) -> dict[int, str]:
    """Steps that would have to be on other clocks than most steps of the same two hosts, and who these are. None where
    of some pair of hosts neither two nor half of the steps agree, or the rest is no better.

    Example: offsets of two hosts that steps 0 to 3 allow, us: -1 to 3, -2 to 2, 0 to 4, 900 to 950: step 3.
    """
    steps = problem.steps
    if len(steps) < 3 or len(steps) * len(drift) ** 2 > _MOST_BOUNDS:
        return {}
    for rendezvous in (True, False):
        high = np.stack([problem.of_step(s).limits(drift, rendezvous=rendezvous) for s in steps.tolist()])
        low = -high.transpose(0, 2, 1)
        found: dict[int, list[set[int]]] = {}
        for a, b in np.argwhere(np.triu(high.min(axis=0) < low.max(axis=0), 1)).tolist():
            agree = _agreeing(low[:, a, b], high[:, a, b])
            told = np.isfinite(high[:, a, b]) | np.isfinite(low[:, a, b])
            if (agree & told).sum() < max(2, told.sum() / 2):
                break
            for step in steps[told & ~agree].tolist():
                found.setdefault(step, []).append({a, b})
        else:
            rest = problem.without(found)
            if found and _feasible(rest, _drifts(rest)) is not None:
                return {step: _who(problem, pairs) for step, pairs in found.items()}
    return {}


def _who(problem: _Problem, pairs: list[set[int]]) -> str:
    """The hosts that all of these pairs have in common, else all of them."""
    hosts = set.intersection(*pairs) or set.union(*pairs)
    return some([problem.texts[i] for i in sorted(hosts)], 4)


def _agreeing(low: Float, high: Float) -> NDArray[np.bool_]:
    """Which of the intervals hold the point that lies in most of them."""
    ends = np.concatenate([low[np.isfinite(low)], high[np.isfinite(high)]])
    holds = (low <= ends[:, None]) & (ends[:, None] <= high)
    result: NDArray[np.bool_] = holds[holds.sum(axis=1).argmax()]
    return result


def _left_out(run: Run, wrong: dict[int, str]) -> Run:
    """Without the messages of steps that contradict the others, and with a Notice about these."""
    if not wrong:
        return run
    why = "the times of {} contradict those of other steps: messages would arrive before they were sent"
    details = dict(run.source.details)
    details["cut_steps"] = {**details.get("cut_steps", {}), **{step: why.format(who) for step, who in wrong.items()}}
    links = run.links
    keep = ~np.isin(run.spans.step[links.p2p[:, 0]], list(wrong))
    links = replace(links, p2p=links.p2p[keep], p2p_wait=links.p2p_wait[keep])
    who = some(sorted(set(wrong.values())), 4)
    message = (
        f"in {counted(len(wrong), 'step')} ({some(sorted(wrong))}) {why.format(who)}. A clock was set, or stamps are "
        "damaged: these steps are left out, and the clocks are those of the others"
    )
    run = replace(run, links=links, source=replace(run.source, details=details))
    return run.with_notices(Notice("clock-steps", message))


def _connected(problem: _Problem) -> list[Int]:
    """Hosts (by place) that bound each other's clock from both sides, each list ascending, the first host's first."""
    reach = np.isfinite(problem.limits(np.zeros(len(problem.hosts))))
    for k in range(len(reach)):
        reach |= reach[:, k, None] & reach[None, k, :]
    mutual = reach & reach.T
    return [np.flatnonzero(mutual[i]) for i in np.unique(mutual.argmax(axis=1)).tolist()]


def _near(half: Float, most: float) -> list[Int]:
    """Hosts in parts: the first that is left, and all whose offset from it is known to ±`most`."""
    left = np.arange(len(half))
    parts = []
    while len(left):
        near = half[left[0], left] <= most
        parts.append(left[near])
        left = left[~near]
    return parts


@dataclass(eq=False)
class _Problem:
    """Matched events between hosts (by place in `hosts`); times in ns since `origin`, as stamped.

    pairs: columns (sender host, receiver host, send start, send end, receive start, receive end, may be eager, step).
    groups: for every collective its (host, latest start, earliest end), one row per member host; group_step: beside it.
    """

    hosts: Int
    texts: list[str]
    origin: int
    span: float
    step_ns: float
    unknown: bool
    pairs: Float
    groups: list[Float]
    group_step: Int

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
            _pairs(run, of_rank, origin), *_groups(run, of_rank, origin),
        )  # fmt: skip

    @property
    def steps(self) -> Int:
        """Those that are known, of all events."""
        known = np.unique(np.concatenate([self.pairs[:, 7].astype(np.int64), self.group_step]))
        return known[known >= 0]

    def of_step(self, step: int) -> _Problem:
        """The same with the events of one step alone, and those of no step."""
        return self.without(self.steps[self.steps != step].tolist())

    def without(self, steps: Collection[int]) -> _Problem:
        """The same without the events of these steps."""
        return self._only(~np.isin(self.pairs[:, 7], list(steps)), ~np.isin(self.group_step, list(steps)))

    def _only(self, pairs: NDArray[np.bool_], groups: NDArray[np.bool_]) -> _Problem:
        chosen = [g for g, keep in zip(self.groups, groups.tolist(), strict=True) if keep]
        return replace(self, pairs=self.pairs[pairs], groups=chosen, group_step=self.group_step[groups])

    def of_hosts(self, hosts: Int) -> _Problem:
        """The same among some hosts (by place) alone."""
        place = np.full(len(self.hosts), -1.0)
        place[hosts] = np.arange(len(hosts))
        pairs = self.pairs.copy()
        pairs[:, :2] = place[pairs[:, :2].astype(int)]
        groups = [np.column_stack([place[g[:, 0].astype(int)], g[:, 1:]]) for g in self.groups]
        groups = [g[g[:, 0] >= 0] for g in groups]
        several = np.array([len(g) > 1 for g in groups], dtype=np.bool_)
        named = replace(
            self, hosts=self.hosts[hosts], texts=[self.texts[i] for i in hosts.tolist()], pairs=pairs, groups=groups
        )
        return named._only((pairs[:, 0] >= 0) & (pairs[:, 1] >= 0), several)

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
        return np.empty((0, 8))
    a = np.array([of_rank.get(int(r), -1) for r in spans.rank[p2p[:, 0]]])
    b = np.array([of_rank.get(int(r), -1) for r in spans.rank[p2p[:, 1]]])
    end_a = np.where(waits[:, 0] >= 0, spans.end_ns[waits[:, 0]], spans.end_ns[p2p[:, 0]])
    end_b = np.where(waits[:, 1] >= 0, spans.end_ns[waits[:, 1]], spans.end_ns[p2p[:, 1]])
    size = np.maximum(spans.bytes[p2p[:, 0]], spans.bytes[p2p[:, 1]])
    # A post that is not a kernel says nothing about when the transfer was over for the sender.
    eager = (size <= EAGER_BYTES) | (waits[:, 0] >= 0)
    times = np.stack([spans.start_ns[p2p[:, 0]], end_a, spans.start_ns[p2p[:, 1]], end_b], axis=1) - origin
    table: Float = np.column_stack([a, b, times, eager, spans.step[p2p[:, 0]]]).astype(np.float64)
    result: Float = table[(a >= 0) & (b >= 0) & (a != b)]
    return result


def _groups(run: Run, of_rank: dict[int, int], origin: int) -> tuple[list[Float], Int]:
    spans, links = run.spans, run.links.collective
    if len(links) == 0:
        return [], np.empty(0, dtype=np.int64)
    order = np.argsort(links[:, 0], kind="stable")
    links = links[order]
    out, steps = [], []
    for part in np.split(links[:, 1], np.flatnonzero(np.diff(links[:, 0])) + 1):
        host = np.array([of_rank.get(int(r), -1) for r in spans.rank[part]])
        rows = []
        for h in np.unique(host[host >= 0]).tolist():
            mine = part[host == h]
            rows.append((h, spans.start_ns[mine].max() - origin, spans.end_ns[mine].min() - origin))
        if len(rows) > 1:
            out.append(np.array(rows, dtype=np.float64))
            steps.append(int(spans.step[part[0]]))
    return out, np.array(steps, dtype=np.int64)


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
    """(host, host already reached) from the first host on, each over the pair that shares most operations; hosts that
    share nothing are left out."""
    n = len(problem.hosts)
    shared = np.zeros((n, n), dtype=np.int64)
    np.add.at(shared, tuple(problem.pairs[:, :2].astype(int).T), 1)
    for group in problem.groups:
        host = group[:, 0].astype(int)
        shared[np.ix_(host, host)] += 1
    shared += shared.T
    reached, left, edges = [0], list(range(1, n)), []
    while left:
        beside = shared[np.ix_(reached, left)]
        known, other = np.unravel_index(beside.argmax(), beside.shape)
        if beside[known, other] == 0:
            break
        edges.append((left.pop(int(other)), reached[int(known)]))
        reached.append(edges[-1][0])
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
    beside = dict(_tree(problem))
    for host in [*beside, *(h for h in range(1, len(offset)) if h not in beside)]:
        low = max(offset[k] - limits[k, host] for k in fixed)
        high = min(offset[k] + limits[host, k] for k in fixed)
        offset[host] = (low + high) / 2
        if host in beside:
            known = beside[host]
            wanted = _meeting(problem, host, known, drift, offset[host] - offset[known], (high - low) / 2)
            offset[host] = offset[host] if wanted is None else np.clip(offset[known] + wanted, low, high)
        fixed.append(host)
    return offset


def _meeting(problem: _Problem, a: int, b: int, drift: Float, guess: float, slack: float) -> float | None:
    """x_a - x_b at which operations end together that surely did: collectives, and messages whose receiver was
    waiting already (a buffered message may end earlier for its sender). None when there are none."""
    pairs = problem.pairs
    pairs = pairs[((pairs[:, 0] == a) & (pairs[:, 1] == b)) | ((pairs[:, 0] == b) & (pairs[:, 1] == a))]
    s, r = pairs[:, 0].astype(int), pairs[:, 1].astype(int)
    send, receive = pairs[:, 2:4] * (1 + drift[s])[:, None], pairs[:, 4:6] * (1 + drift[r])[:, None]
    waited = receive[:, 0] < send[:, 0] + np.where(s == a, guess, -guess) - slack
    # A send without length is a mark of where the message was made, derived by a reader: it does not end with the
    # receive.
    sure = waited & (send[:, 0] != send[:, 1])
    values = (np.where(s == a, 1.0, -1.0) * (receive[:, 1] - send[:, 1]))[sure].tolist()
    for group in problem.groups:
        mine, theirs = group[group[:, 0] == a], group[group[:, 0] == b]
        if len(mine) and len(theirs):
            values.append(float(theirs[0, 2] * (1 + drift[b]) - mine[0, 2] * (1 + drift[a])))
    return float(np.median(values)) if values else None


# --- result --------------------------------------------------------------------------------------------------


def _moved(run: Run, problem: _Problem, parts: list[_Part]) -> Run:
    hosts = [HostClock(text) for text in problem.texts]
    offset, drift = np.zeros(len(hosts)), np.zeros(len(hosts))
    for part in parts:
        offset[part.hosts], drift[part.hosts] = part.offset, part.drift
        for i, low, high in zip(part.hosts.tolist(), part.low, part.high, strict=True):
            first = int(part.hosts[0])
            hosts[i] = HostClock(hosts[i].host, round(offset[i]), float(drift[i]), round(low), round(high), first)
    how = _HOW if len(parts) == 1 else f"{len(parts)} parts, each by {_HOW}; no part against another"
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
    return replace(
        run, spans=spans.with_columns(start_ns=start, end_ns=end), clock=Clock(tuple(hosts), len(parts) == 1, how)
    )


def _apart(problem: _Problem, connected: list[Int]) -> Notice:
    named = [some([problem.texts[i] for i in hosts.tolist()], 4) for hosts in connected]
    message = (
        f"the clocks of {len(problem.hosts)} hosts are not aligned: neither messages nor collectives bound "
        f"{' | '.join(named[:4])}{' | …' if len(named) > 4 else ''} against each other; times are compared within each "
        "of these parts only"
    )
    return Notice("clock-unbounded", message)


def _too_wide(problem: _Problem, hosts: Int, half: float) -> Notice:
    """About the clocks of `hosts` against the first of the problem."""
    step_us = problem.step_ns / 1e3
    known = f"only known to ±{half / 1e3:.0f} us, more than 5 % of a step of {step_us:.0f} us"
    message = (
        f"the offset of {some([problem.texts[i] for i in hosts.tolist()], 4)} from {problem.texts[0]} is "
        f"{known if np.isfinite(half) else 'not bounded'}; their times are not compared"
    )
    return Notice("clock-too-wide" if np.isfinite(half) else "clock-unbounded", message)
