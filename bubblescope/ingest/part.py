"""One rank's share of a Run, and how shares become one Run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.errors import InputError
from bubblescope.ingest.steps import MARKS
from bubblescope.model import Clock, Kind, Lane, Layout, Links, Names, Notice, Run, Source, Spans
from bubblescope.model.notice import some_of_all
from bubblescope.model.spans import is_one_value

Int = NDArray[np.int64]
_INSIDE = 0.9
_NEAR = 0.25
"""So far from where a step begins, in repetitions of the kernels, one of these still begins it."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one file says. `timing`: "kernels", "host", or "" for a rank whose device was not recorded.

    launch: rows (host launch, device row) into `spans`. groups: communicator name -> (description, ranks). other_rank:
    what else than ``distributedInfo`` tells, -1 nothing. base_ns: what was added to the times; None: the file is cut
    before the place where it may have stood.
    """

    path: str
    rank: int
    rank_how: str
    spans: Spans
    names: Names
    launch: Int
    timing: str
    steps_how: str
    world_size: int | None = None
    host: str = ""
    backend: str = ""
    events: int = 0
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    other_rank: int = -1
    other_how: str = ""
    base_ns: int | None = 0


def merge(parts: list[Part], notices: list[Notice], source_format: str) -> Run:
    """Parts of different ranks -> one Run, spans sorted by rank and time. Two parts of a rank: the fuller one.

    Takes the parts out of the list, so that their spans are not held beside the run's. Raises InputError when no part
    has device (or CPU) time to look at, or when the parts are of several jobs.
    """
    given, (parts, strangers) = parts, _one_job(parts)
    parts, based = _with_base(parts)
    parts, copies = _without_copies(parts)
    parts, moved = _not_all_one_rank(parts)
    parts, said = _one_per_rank(parts)
    notices = [*notices, *(n for p in parts for n in p.notices), *strangers, *based, *copies, *moved, *said]
    seen = [p.rank for p in parts]
    parts, unmarked = _alike_in_steps(parts)
    notices.extend(unmarked)
    if not any(p.timing for p in parts):
        raise _nothing_timed(parts)
    names = Names()
    offsets = np.cumsum([0, *(len(p.spans) for p in parts)])
    launch = np.concatenate([p.launch + offset for p, offset in zip(parts, offsets, strict=False)])
    pieces = [_renamed(p, names) for p in parts]
    given.clear()
    parts = [replace(p, spans=Spans.empty()) for p in parts]
    spans = Spans.moved(pieces)
    order, launch = _order(spans, launch)
    columns = spans.columns()
    del spans
    spans = Spans.remade(columns, lambda _, column: column if is_one_value(column) else column[order])
    layout = _layout(parts, names, seen)
    notices.extend(missing(layout))
    spans, agreed = _agree_on_steps(spans, parts)
    timings = {p.timing for p in parts}
    return Run(
        spans=spans,
        names=names,
        layout=layout,
        links=Links(launch=launch),
        clock=Clock(),
        notices=tuple(dict.fromkeys([*notices, *agreed])),
        source=Source(
            format=source_format,
            files=tuple(dict.fromkeys(p.path for p in parts)),
            timing="kernels" if "kernels" in timings else "host",
            details={
                "backend": sorted({p.backend for p in parts if p.backend}),
                "groups": _groups(parts),
                "untimed_ranks": [p.rank for p in parts if not p.timing],
                "warmup_steps": _half_seen(parts, spans),
            },
        ),
    )


def _one_job(parts: list[Part]) -> tuple[list[Part], list[Notice]]:
    """Parts of one job: those whose world size is that of most files; the others are left out and named.

    Raises InputError when no job has more than half of the files that state a world size.
    """
    sizes = Counter(p.world_size for p in parts if p.world_size is not None)
    if len(sizes) <= 1:
        return parts, []
    size, count = sizes.most_common(1)[0]
    if 2 * count <= sum(sizes.values()):
        raise InputError(
            f"the files are of different jobs (world sizes {', '.join(str(w) for w in sorted(sizes))})",
            hint="name the files of one job",
            where=parts[0].path,
        )
    out = [p for p in parts if p.world_size in (None, size)]
    return out, [
        Notice("other-job", f"a world size of {p.world_size}, where most files have {size}; left out", p.path)
        for p in parts
        if p.world_size not in (None, size)
    ]


def _with_base(parts: list[Part]) -> tuple[list[Part], list[Notice]]:
    """Parts whose base time is lost get that of the others, where these have one and the same: a profiler takes it from
    the calendar."""
    bases = {p.base_ns for p in parts if p.base_ns}
    if not bases or all(p.base_ns is not None for p in parts):
        return parts, []
    out, notices = [], []
    for part in parts:
        if part.base_ns is not None:
            out.append(part)
            continue
        what = "its end, where baseTimeNanoseconds stands, is lost; "
        if len(bases) == 1:
            base = max(bases)
            what += "that of the other files is taken"
            spans = part.spans
            part = replace(part, spans=spans.with_columns(start_ns=spans.start_ns + base, end_ns=spans.end_ns + base))
        else:
            what += "the other files have different ones, so this rank's clock is not the others'"
        out.append(part)
        notices.append(Notice("base-time-lost", what, part.path))
    return out, notices


def _without_copies(parts: list[Part]) -> tuple[list[Part], list[Notice]]:
    """Of files whose name alone says their rank and that hold the same events, threads and all, only the first."""
    seen: dict[tuple[int, int, int], list[Part]] = {}
    out, notices = [], []
    for part in parts:
        if part.rank_how == "file name" and len(part.spans):
            ends = (len(part.spans), int(part.spans.start_ns[0]), int(part.spans.end_ns[-1]))
            alike = seen.setdefault(ends, [])
            original = next((p for p in alike if _same_events(p.spans, part.spans)), None)
            if original is not None:
                message = f"the same events as in {original.path}: a copy, which is no rank of its own and is left out"
                notices.append(Notice("rank-duplicate", message, part.path))
                continue
            alike.append(part)
        out.append(part)
    return out, notices


def _same_events(a: Spans, b: Spans) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("start_ns", "end_ns", "stream"))


def _not_all_one_rank(parts: list[Part]) -> tuple[list[Part], list[Notice]]:
    """Where ``distributedInfo`` of several files that were recorded at one time names the same rank, those of which
    something else names a rank that is not taken are of that rank, and named.

    Example: rank0.json … rank3.json all say rank 0: they are of ranks 0 to 3, as their names say.
    """
    claims: dict[int, list[Part]] = {}
    for part in parts:
        claims.setdefault(part.rank, []).append(part)
    taken = claims.keys() | {rank for rank, n in Counter(p.other_rank for p in parts).items() if n > 1}
    out, notices = [], []
    for part in parts:
        beside = [p for p in claims[part.rank] if p is not part and _at_one_time(p.spans, part.spans)]
        free = part.other_rank >= 0 and part.other_rank not in taken
        if not beside or not free or part.rank_how != "distributedInfo" or _same_events(beside[0].spans, part.spans):
            out.append(part)
            continue
        message = (
            f"distributedInfo says rank {part.rank}, as that of {beside[0].path} does; rank {part.other_rank} is what "
            f"the {part.other_how} says"
        )
        notices.append(Notice("rank-not-believed", message, part.path))
        out.append(replace(part, rank=part.other_rank, rank_how=part.other_how))
    return out, notices


def _at_one_time(a: Spans, b: Spans) -> bool:
    """Whether most of the shorter one lies within the other."""
    if not len(a) or not len(b):
        return False
    low, high = max(a.start_ns.min(), b.start_ns.min()), min(a.end_ns.max(), b.end_ns.max())
    shorter = min(int(s.end_ns.max() - s.start_ns.min()) for s in (a, b))
    return bool(high - low > shorter // 2)


def _one_per_rank(parts: list[Part]) -> tuple[list[Part], list[Notice]]:
    chosen: dict[int, Part] = {}
    notices = []
    for part in sorted(parts, key=_fuller_first):
        kept = chosen.setdefault(part.rank, part)
        if kept is not part:
            why = f"{kept.events} events against {part.events}"
            if kept.timing and not part.timing:
                why = "this one has no GPU events"
            message = f"rank {part.rank} is claimed by two files; {kept.path} is used ({why})"
            notices.append(Notice("rank-duplicate", message, part.path))
    return [chosen[rank] for rank in sorted(chosen)], notices


def _fuller_first(part: Part) -> tuple[int, bool, bool, int, str]:
    """Of the parts of a rank: with GPU events, not of another rank by something else, with more events."""
    return part.rank, not part.timing, part.other_rank not in (-1, part.rank), -part.events, part.path


def _alike_in_steps(parts: list[Part]) -> tuple[list[Part], list[Notice]]:
    """Parts whose steps have the same numbers: most ranks' are found by the same marks, or without any; the steps of
    the others, which count from elsewhere, get the numbers of those in whose time they lie. A rank whose steps lie in
    the time of several, or of none, is left out and named."""
    ways = Counter(_way(p) for p in parts if p.timing and p.steps_how)
    if len(ways) <= 1:
        return parts, []
    way = max(ways, key=lambda w: (ways[w], w in MARKS))
    alike = [p for p in parts if p.timing and p.steps_how and _way(p) == way]
    index, borders = _common_steps([p.spans for p in alike])
    how = ", ".join(sorted({p.steps_how for p in alike}))
    out, notices = [], []
    for part in parts:
        if not part.timing or not part.steps_how or _way(part) == way:
            out.append(part)
            continue
        known = f"the steps of rank {part.rank} were found another way ({part.steps_how}) than those of others ({how})"
        step = None if not len(index) else _steps_by_time(part.spans, index, borders)
        if step is None:
            message = f"{known} and do not fall into the time of single ones of them; this rank is left out"
            notices.append(Notice("steps-differ", message, part.path))
            continue
        message = f"{known}; each has the number of that one of them in whose time it lies"
        notices.append(Notice("steps-by-time", message, part.path))
        out.append(replace(part, spans=_regrouped(part.spans, step), steps_how=f"{part.steps_how} by time"))
    return out, notices


def _way(part: Part) -> str:
    return part.steps_how if part.steps_how in MARKS else ""


def _extents(spans: list[Spans]) -> tuple[Int, Int, Int]:
    """(step, first begin, last end) of the work of each step, all `spans` together."""
    rows = [s.take(s.where(lane=Lane.COMPUTE) & (s.step >= 0)) for s in spans]
    step, start, end = (np.concatenate([getattr(r, name) for r in rows]) for name in ("step", "start_ns", "end_ns"))
    index, at = np.unique(step, return_inverse=True)
    first, last = np.full(len(index), np.iinfo(np.int64).max), np.full(len(index), np.iinfo(np.int64).min)
    np.minimum.at(first, at, start)
    np.maximum.at(last, at, end)
    return index.astype(np.int64), first, last


def _common_steps(spans: list[Spans]) -> tuple[Int, Int]:
    """The steps in which these ranks work, and the borders of their time: halfway between one's work and the next's;
    before the first and after the last, half a step away."""
    index, first, last = _extents(spans)
    order = np.argsort(first, kind="stable")
    index, first, last = index[order], first[order], last[order]
    half = (last - first) // 2
    inner = last[:-1] + (first[1:] - last[:-1]) // 2
    return index, np.concatenate([first[:1] - half[:1], inner, last[-1:] + half[-1:]])


def _steps_by_time(spans: Spans, index: Int, borders: Int) -> Int | None:
    """For each row of one rank its step among those of `_common_steps`, -1 outside them all; None where one of its own
    steps lies in several, or all lie outside."""
    own, at = np.unique(spans.step, return_inverse=True)
    found = np.full(len(own), -1, dtype=np.int64)
    for step, begin, end in zip(*(column.tolist() for column in _extents([spans])), strict=True):
        shared = np.minimum(end, borders[1:]) - np.maximum(begin, borders[:-1])
        best = int(shared.argmax())
        if shared[best] >= _INSIDE * (end - begin):
            found[np.searchsorted(own, step)] = index[best]
        elif shared[best] > 0:
            return None
    result: Int = found[at]
    return result if (found >= 0).any() else None


def _nothing_timed(parts: list[Part]) -> InputError:
    ranks = ", ".join(str(p.rank) for p in parts[:8])
    return InputError(
        f"no GPU events in the trace of any rank ({ranks}): how long the devices were idle cannot be known",
        hint="record with ProfilerActivity.CUDA; a CPU run is read when its process group is gloo",
        where=parts[0].path if parts else "",
    )


def _renamed(part: Part, names: Names) -> Spans:
    to = part.names.mapping_to(names)
    return part.spans.with_columns(
        name=to[part.spans.name],
        group=to[part.spans.group],
        rank=np.broadcast_to(np.int32(part.rank), len(part.spans)),
    )


def _order(spans: Spans, launch: Int) -> tuple[Int, Int]:
    """The rows by rank and time, and `launch` in these places."""
    order = np.lexsort((spans.end_ns, spans.start_ns, spans.rank)).astype(np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return order, place[launch] if len(launch) else launch


def _layout(parts: list[Part], names: Names, seen: list[int]) -> Layout:
    """`seen`: the ranks that have a file, of which some may not be among `parts`."""
    ranks = np.array([p.rank for p in parts], dtype=np.int64)
    unknown = np.full(len(parts), -1, dtype=np.int64)
    host = np.array([names.intern(p.host or f"rank {p.rank} (host unknown)") for p in parts], dtype=np.int64)
    worlds = Counter(p.world_size for p in parts if p.world_size is not None)
    world = max(worlds, key=lambda w: (worlds[w], w)) if worlds else None
    if world is not None or len(seen) > len(parts):
        world = max(world or 0, max(seen) + 1)
    inferred = {}
    hows = sorted({p.rank_how for p in parts if p.rank_how != "distributedInfo"})
    if hows:
        inferred["ranks"] = ", ".join(hows)
    step_hows = sorted({p.steps_how for p in parts if p.steps_how})
    if step_hows:
        inferred["steps"] = ", ".join(step_hows)
    return Layout(
        ranks=ranks, pp=unknown, replica=unknown, tp=unknown, host=host, world_size=world,
        device_type="cpu" if all(p.timing == "host" for p in parts if p.timing) else "cuda",
        inferred=inferred,
    )  # fmt: skip


def missing(layout: Layout) -> list[Notice]:
    """A Notice about ranks without a trace."""
    lacking = layout.missing_ranks
    if not lacking:
        return []
    shown = some_of_all(lacking)
    of = f"{layout.world_size}" if layout.world_size is not None else f"at least {int(layout.ranks.max()) + 1}"
    message = f"{len(lacking)} of {of} ranks have no trace: {shown}; what waits for them cannot be split into causes"
    return [Notice("rank-missing", message)]


def _agree_on_steps(spans: Spans, parts: list[Part]) -> tuple[Spans, list[Notice]]:
    """Steps found from a period must be equally many on every rank.

    A rank may repeat within the step (the last stage of 1F1B: forward, backward, forward, …); as many make a step as
    take the time of one on the rank that repeats least. Where that is no whole number of them everything is one step.
    This is said, as is what lies in no whole step.
    """
    if not any(p.steps_how == "period" for p in parts):
        return spans, []
    counts = {p.rank: int(spans.step[spans.rank == p.rank].max(initial=-1)) + 1 for p in parts if p.timing}
    if len(set(counts.values())) <= 1:
        return spans, _in_no_step(spans, spans.step)
    fewest = min(counts.values())
    marks = np.flatnonzero(spans.where(kind=Kind.STEP, lane=Lane.RANGE))
    starts = {r: np.sort(spans.start_ns[marks[spans.rank[marks] == r]]) for r in counts}
    took = next(int(starts[r][-1] - starts[r][0]) for r, n in counts.items() if n == fewest) if fewest > 1 else 0
    each = {r: _repetitions(starts[r], took, fewest) for r in counts}
    notices = []
    if not all(each.values()):
        message = (
            "there is no ProfilerStep and no optimizer in the traces, and the ranks repeat differently "
            f"({sorted(set(counts.values()))} times); everything is taken as one step"
        )
        fewest, each, notices = 1, counts, [Notice("steps-not-found", message)]
    step = spans.step.astype(np.int64)
    for rank, repetitions in each.items():
        mine = (spans.rank == rank) & (step >= 0)
        step[mine] //= max(1, repetitions)
    step[step >= fewest] = -1
    return _regrouped(spans, step), [*notices, *_in_no_step(spans, step)]


def _repetitions(start: Int, took: int, steps: int) -> int:
    """How many of the repetitions that begin at `start` make a step, where the first ones of all `steps` lie `took` ns
    apart; 0 where none begins then.

    >>> _repetitions(np.array([0, 10, 20, 50, 60, 70, 100, 110, 120]), 100, 3)
    3
    """
    if steps < 2:
        return len(start)
    found = int(np.argmin(np.abs(start - start[0] - took)))
    whole = found > 0 and found % (steps - 1) == 0 and len(start) >= steps * found // (steps - 1)
    near = abs(int(start[found] - start[0]) - took) <= _NEAR * took / max(found, 1)
    return found // (steps - 1) if whole and near else 0


def _in_no_step(spans: Spans, step: NDArray[np.integer]) -> list[Notice]:
    """A Notice about kernels in none of the steps that were found from the period of the kernels."""
    count = int(np.sum(spans.where(lane=Lane.COMPUTE) & (step < 0)))
    if not count:
        return []
    message = f"steps are the repetitions of the kernels; {count} kernels that are in no whole one are left out"
    return [Notice("steps-cut", message)]


def _regrouped(spans: Spans, step: Int) -> Spans:
    """With these steps. Rows keep their places, so that links keep their meaning: the first mark of those that become
    one step of a rank grows to its end, the others, and those outside all steps, become plain ranges."""
    end, kind = spans.end_ns.copy(), spans.kind.copy()
    marks = np.flatnonzero(spans.where(kind=Kind.STEP, lane=Lane.RANGE))
    kind[marks[step[marks] < 0]] = Kind.OTHER
    marks = marks[step[marks] >= 0]
    marks = marks[np.lexsort((spans.start_ns[marks], step[marks], spans.rank[marks]))]
    new = (np.diff(step[marks], prepend=-1) != 0) | (np.diff(spans.rank[marks], prepend=-1) != 0)
    first = np.flatnonzero(new)
    if len(marks):
        end[marks[first]] = np.maximum.reduceat(spans.end_ns[marks], first)
    kind[marks[~new]] = Kind.OTHER
    return spans.with_columns(step=step, end_ns=end, kind=kind)


def _half_seen(parts: list[Part], spans: Spans) -> list[int]:
    """The first step, where steps are known by their ends only: it began before, or with, the recording."""
    by_end = any(p.steps_how in ("optimizer", "optimizer kernels") for p in parts)
    steps = np.unique(spans.step[spans.step >= 0])
    return [int(steps[0])] if by_end and len(steps) > 1 else []


def _groups(parts: list[Part]) -> dict[str, tuple[str, tuple[int, ...]]]:
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, value in part.groups.items():
            known = out.get(name)
            if known is None or (value[1] and not known[1]):
                out[name] = value
    return out
