"""Which ranks can have been stamped by one clock: an equal host name ("localhost") is no proof of it.

What happened on one clock is possible on it: nothing arrives before it was sent, every member of a collective begins
before any ends, and ranks of one job run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.intervals import rows_by
from bubblescope.align.match import arrival, match
from bubblescope.errors import InputError
from bubblescope.model import Layout, Links, Notice, Run
from bubblescope.model.notice import some

Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

SLACK_NS = 10_000
"""Stamps of two GPUs of one host may be this far apart."""
_MOST = 0.5
_FAR = 10
"""In lengths of the longest recording."""
_OTHER_UNIT = 100


def in_one_unit(run: Run) -> Run:
    """Without the ranks whose times are in another unit: their steps, and all they did, are more than 100 times as long
    or as short as those of most ranks. A pipeline's ranks step together, so no offset mends that. Raises InputError
    where half of the ranks or more are such.

    Worked example: steps of ranks 0, 1 and 3 last 45.8 ms, of rank 2 45.8 s: it has nanoseconds for microseconds.
    """
    rows = np.flatnonzero((run.spans.device >= 0) & (run.spans.step >= 0))
    if run.clock.aligned or not len(rows):
        return run
    ranks, step_ns, all_ns = _lengths(run, rows)
    middle = (len(ranks) - 1) // 2
    factor = step_ns / np.sort(step_ns)[middle]
    out = _far(factor) & _far(all_ns / np.sort(all_ns)[middle])
    if not out.any():
        return run
    if 2 * out.sum() >= len(ranks):
        raise InputError(
            f"the steps of {_ranks(ranks[out].tolist())} last {factor[out].max():.4g} times those of "
            f"{_ranks(ranks[~out].tolist())}: times are in several units, or damaged, and none is that of most ranks",
            hint="give the files of one unit only",
            where=run.source.files[0] if run.source.files else "",
        )
    notices = [
        Notice(
            "rank-other-unit",
            f"rank {rank} is left out: its steps last {times:.4g} times those of most ranks, so its times are in "
            "another unit or damaged; what waits for it cannot be split into causes",
        )
        for rank, times in zip(ranks[out].tolist(), factor[out].tolist(), strict=True)
    ]
    return _without(run, ranks[out]).with_notices(*notices)


def matched(run: Run) -> Run:
    """`match`, and of hosts whose ranks cannot have shared a clock every rank is a host of its own.

    Worked example: all ranks say "localhost", and on their stamps rank 2 receives 350 us before rank 1 sends: the hosts
    are "localhost (rank 0)", "localhost (rank 1)" and so on, to be aligned by their messages as any others.
    """
    found = match(run)
    layout = run.layout
    if run.clock.aligned or len(np.unique(layout.host)) == len(layout.ranks):
        return found
    impossible = {**_times_apart(found), **_collectives(found), **_messages(found)}
    # What the false clock had a say in is matched anew.
    return match(apart(run, impossible)) if impossible else found


def apart(run: Run, why: dict[int, str]) -> Run:
    """Every rank of these hosts a host of its own, with a Notice that says `why`."""
    layout = run.layout
    host, notices = layout.host.copy(), []
    for name, reason in sorted(why.items()):
        text, places = run.names[name], np.flatnonzero(layout.host == name)
        host[places] = [run.names.intern(f"{text} (rank {rank})") for rank in layout.ranks[places].tolist()]
        message = f"the host name {text!r} is no proof of one clock here: {reason}; each of its ranks is aligned as a "
        notices.append(Notice("host-not-believed", message + "host of its own"))
    return replace(run, layout=replace(layout, host=host)).with_notices(*notices)


# --- on one clock? By host: what cannot have happened if its ranks share one -----------------------------------


def _host(run: Run, rows: Int) -> Int:
    layout = run.layout
    result: Int = layout.host[np.searchsorted(layout.ranks, run.spans.rank[rows])]
    return result


@dataclass(frozen=True)
class _Route:
    """Messages of one direction: how much later they arrive than they were sent, at least; how many arrive earlier."""

    least_ns: int
    early: int
    count: int


def _messages(run: Run) -> dict[int, str]:
    spans, p2p = run.spans, run.links.p2p
    host = _host(run, p2p[:, 0])
    inside = host == _host(run, p2p[:, 1])
    (send, receive), host = p2p[inside].T, host[inside]
    later = arrival(run, receive) - spans.start_ns[send]
    width = int(spans.rank.max(initial=0)) + 1
    routes: dict[int, dict[tuple[int, int], _Route]] = {}
    for key, own in rows_by(spans.rank[send].astype(np.int64) * width + spans.rank[receive]):
        route = _Route(int(later[own].min()), int((later[own] < -SLACK_NS).sum()), len(own))
        routes.setdefault(int(host[own[0]]), {})[divmod(key, width)] = route
    found = {name: _worst(mine) for name, mine in routes.items()}
    return {name: why for name, why in found.items() if why}


def _worst(routes: dict[tuple[int, int], _Route]) -> str:
    wrong = {(a, b): route for (a, b), route in routes.items() if _of_clocks(route, routes.get((b, a)))}
    if not wrong:
        return ""
    (a, b), worst = min(wrong.items(), key=lambda item: item[1].least_ns)
    differ = sorted(set.intersection(*map(set, wrong)) or set.union(*map(set, wrong)))
    return (
        f"{worst.early} of {worst.count} messages from rank {a} reach rank {b} before they are sent, by up to "
        f"{_time(-worst.least_ns)}, so that the clock of {_ranks(differ)} differs"
    )


def _of_clocks(route: _Route, back: _Route | None) -> bool:
    """Whether messages that arrive early show two clocks: most do, or one offset mends all of both directions. A few
    that none mends are matched wrongly."""
    if not route.early:
        return False
    return route.early >= _MOST * route.count or (back is not None and route.least_ns + back.least_ns >= 0)


def _collectives(run: Run) -> dict[int, str]:
    """By communicator: most of its operations end on one rank before they begin on another."""
    spans, links = run.spans, run.links.collective
    host = _host(run, links[:, 1]).astype(np.int64)
    instance = np.unique(links[:, 0], return_inverse=True)[1].reshape(-1)
    members = [links[own, 1] for _, own in rows_by(instance * (len(run.names) + 1) + host) if len(own) > 1]
    if not members:
        return {}
    last = np.array([rows[np.argmax(spans.start_ns[rows])] for rows in members])
    first = np.array([rows[np.argmin(spans.end_ns[rows])] for rows in members])
    early = spans.start_ns[last] - spans.end_ns[first]
    out: dict[int, str] = {}
    for _, own in rows_by(_host(run, last).astype(np.int64) * (len(run.names) + 1) + spans.group[last]):
        wrong = own[early[own] > SLACK_NS]
        if len(wrong) >= _MOST * len(own):
            worst = wrong[np.argmax(early[wrong])]
            out[int(_host(run, last[[worst]])[0])] = (
                f"{len(wrong)} of {len(own)} collectives end on rank {spans.rank[first[worst]]} before they begin on "
                f"rank {spans.rank[last[worst]]}, by up to {_time(int(early[worst]))}"
            )
    return out


def _times_apart(run: Run) -> dict[int, str]:
    """Far more time without any of the ranks than any of them was recorded for."""
    spans = run.spans
    rows = np.flatnonzero((spans.device >= 0) & (spans.step >= 0))
    ranks, start, end = _extents(spans.rank[rows], spans.start_ns[rows], spans.end_ns[rows])
    layout = run.layout
    out = {}
    for name, own in rows_by(layout.host[np.searchsorted(layout.ranks, ranks)]):
        own = own[np.argsort(start[own], kind="stable")]
        gap = start[own[1:]] - np.maximum.accumulate(end[own])[:-1]
        if len(gap) and gap.max() > _FAR * (end - start)[own].max():
            cut = int(np.argmax(gap)) + 1
            fewer = sorted(ranks[min(own[:cut], own[cut:], key=len)].tolist())
            between = f"{_time(int(gap.max()))} lie between the times"
            out[name] = f"{between} of {_ranks(fewer)} and those of its other ranks"
    return out


def _extents(key: NDArray[np.integer], start: Int, end: Int) -> tuple[Int, Int, Int]:
    """The distinct keys, ascending, and for each the earliest start and the latest end."""
    keys, where = np.unique(key, return_inverse=True)
    low, high = np.full(len(keys), np.iinfo(np.int64).max), np.full(len(keys), np.iinfo(np.int64).min)
    np.minimum.at(low, where.reshape(-1), start)
    np.maximum.at(high, where.reshape(-1), end)
    return keys.astype(np.int64), low, high


def _time(ns: int) -> str:
    return f"{ns / 1e9:,.3f} s" if ns >= 1_000_000_000 else f"{ns / 1e3:,.0f} us"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {some(ranks)}"


# --- in one unit ---------------------------------------------------------------------------------------------


def _lengths(run: Run, rows: Int) -> tuple[Int, Int, Int]:
    """Ranks; their median step and all their steps together, ns."""
    spans = run.spans
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    width = int(spans.step.max()) + 1
    pairs, low, high = _extents(spans.rank[rows].astype(np.int64) * width + spans.step[rows], start, end)
    steps = [np.median((high - low)[own]) for _, own in rows_by(pairs // width)]
    ranks, low, high = _extents(spans.rank[rows], start, end)
    return ranks, np.maximum(np.array(steps), 1).astype(np.int64), np.maximum(high - low, 1)


def _far(factor: NDArray[np.float64]) -> Mask:
    result: Mask = np.abs(np.log(factor)) > np.log(_OTHER_UNIT)
    return result


def _without(run: Run, ranks: Int) -> Run:
    keep = ~np.isin(run.spans.rank, ranks)
    place = np.append(np.where(keep, np.cumsum(keep) - 1, -1), -1)
    links = run.links
    p2p = keep[links.p2p].all(axis=1)
    kept = Links(
        p2p=place[links.p2p[p2p]],
        p2p_wait=place[links.p2p_wait[p2p]],
        collective=np.column_stack([links.collective[:, 0], place[links.collective[:, 1]]])[
            keep[links.collective[:, 1]]
        ],
        launch=place[links.launch[keep[links.launch].all(axis=1)]],
    )
    return replace(run, spans=run.spans.take(keep), layout=_layout_without(run.layout, ranks), links=kept)


def _layout_without(layout: Layout, ranks: Int) -> Layout:
    seen = ~np.isin(layout.ranks, ranks)
    columns = {name: getattr(layout, name)[seen] for name in ("ranks", "pp", "replica", "tp", "host")}
    stage_rank = {place: rank for place, rank in layout.stage_rank.items() if rank not in ranks}
    return replace(layout, stage_rank=stage_rank, **columns)
