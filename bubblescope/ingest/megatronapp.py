"""MegatronApp (MegaScan) traces: a Chrome list of begin and end marks, one process per pipeline rank.

Each rank's iteration is counted from its own start, so there is no clock across ranks: how far they can be shifted is
left to the alignment, which has only what each operation needs of the others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bubblescope.errors import InputError
from bubblescope.ingest.decompress import blocks
from bubblescope.ingest.oprecords import Job, Place, Record, build
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.ingest.parallel import Executor
from bubblescope.model import Kind, Lane, Notice, Run

_MARKS = (b'"pp_rank"', b'"iteration begin"')
_PEEK = 1 << 20
_SUFFIX = (".json", ".json.gz")

KINDS: dict[str, tuple[Lane, Kind]] = {
    "forward": (Lane.COMPUTE, Kind.FORWARD),
    "forward-warmup": (Lane.COMPUTE, Kind.FORWARD),
    "backward": (Lane.COMPUTE, Kind.BACKWARD),
    "backward-cooldown": (Lane.COMPUTE, Kind.BACKWARD),
    "optimizer": (Lane.COMPUTE, Kind.OPTIMIZER),
    "allreduce": (Lane.COMM, Kind.COLLECTIVE),
}
_MESSAGES = ("recv-", "send-", "exchange-")
# Two tracks of one rank are tensor-parallel ranks when they take equally long, to this share.
_LOCKSTEP = 0.02
_MOST_PLACES = 1 << 15
"""Of pipeline ranks, and of tensor-parallel ones in each: numbers from there on are damage."""


def looks_like(name: str) -> bool:
    """Whether a file in a folder is worth opening, by its name."""
    return name.lower().endswith(_SUFFIX)


def can_read(path: Path) -> bool:
    """Whether the file at `path` is such a trace."""
    return path.is_file() and looks_like(path.name) and sniff(str(path))


def sniff(path: str) -> bool:
    """As `can_read`, for any address."""
    try:
        start = next(iter(blocks(path, 1 << 40, [])), b"")[:_PEEK]
    except InputError:
        return False
    return start.lstrip().startswith(b"[") and any(mark in start for mark in _MARKS)


def read(paths: Sequence[str | Path], options: ReadOptions = DEFAULT, executor: Executor | None = None) -> Run:
    """One Run of one file. Raises InputError for several, and for what is no such trace."""
    files = [str(p) for p in paths]
    notices: list[Notice] = []
    _refuse_several(files)
    events = [e for path in files for e in _events(path, notices, options)]
    tracks = _tracks(events, files[0], notices)
    return build(_job(tracks, files, notices))


def _refuse_several(files: list[str]) -> None:
    if len(files) > 1:
        raise InputError(
            f"{len(files)} MegatronApp traces were given; each holds all ranks of a run of its own",
            hint="name one of them",
            where=str(Path(files[0]).parent),
        )


def _events(path: str, notices: list[Notice], options: ReadOptions) -> list[dict[str, Any]]:
    text = b"".join(blocks(path, options.max_bytes, notices)).decode("utf-8", "replace")
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        found = _prefix(text, path, notices)
    events = [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []
    if not events:
        raise InputError("no events in the trace", hint="a MegatronApp trace is a JSON list of events", where=path)
    if len(events) < len(found):
        notices.append(Notice("events-skipped", f"{len(found) - len(events)} entries that are no events", path))
    return events


def _prefix(text: str, path: str, notices: list[Notice]) -> list[Any]:
    """The events before the place at which the JSON breaks."""
    decoder, at, out = json.JSONDecoder(strict=False), text.find("[") + 1, []
    while at > 0:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        out.append(event)
    message = f"the JSON breaks at character {at}; the {len(out)} events before it are used"
    notices.append(Notice("trace-truncated", message, path))
    return out


@dataclass(eq=False)
class _Track:
    """One (pid, tid): its marks by iteration."""

    pid: int
    tid: int
    pp: int = -1
    iterations: dict[int, list[tuple[str, int, int, dict[str, Any]]]] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    reduces: dict[int, int] = field(default_factory=dict)

    def order(self) -> list[tuple[str, Any, Any]]:
        marks = (mark for iteration in self.whole() for mark in self.iterations[iteration])
        return [(name, args.get("microbatch"), args.get("model_chunk")) for name, _, _, args in marks]

    def length(self) -> int:
        return sum(self.limits(i)[1] - self.limits(i)[0] for i in self.whole())

    def whole(self) -> list[int]:
        return [i for i in self.iterations if i not in self.cut()]

    def cut(self) -> set[int]:
        """Iterations without their begin or their end, where the trace marks these."""
        if not self.begins and not self.ends:
            return set()
        return (self.iterations.keys() | self.begins.keys()) - (self.begins.keys() & self.ends.keys())

    def limits(self, iteration: int) -> tuple[int, int]:
        ops = self.iterations[iteration]
        low = self.begins.get(iteration, min(o[1] for o in ops))
        high = self.ends.get(iteration, max(o[2] for o in ops))
        return min(low, *(o[1] for o in ops)), max(high, *(o[2] for o in ops))


def _tracks(events: list[dict[str, Any]], path: str, notices: list[Notice]) -> list[_Track]:
    out: dict[tuple[int, int], _Track] = {}
    open_: dict[tuple[int, int, str], tuple[int, dict[str, Any]]] = {}
    lost: Counter[str] = Counter()
    for event in events:
        pid, tid, ts = _place(event.get("pid")), _place(event.get("tid"), 0), _whole(event.get("ts"))
        name, phase = str(event.get("name", "")), event.get("ph")
        given = event.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        iteration = _whole(args.get("iteration"))
        if pid is None or ts is None or iteration is None:
            lost["no usable pid, time or iteration"] += 1
            continue
        track = out.setdefault((pid, tid), _Track(pid, tid))
        if phase == "B":
            open_[(pid, tid, name)] = (ts * 1000, args)
        elif phase == "E":
            began = open_.pop((pid, tid, name), None)
            if began is None or ts * 1000 < began[0]:
                lost["end without a begin"] += 1
                continue
            track.iterations.setdefault(iteration, []).append((name, began[0], ts * 1000, {**began[1], **args}))
            track.pp = _place(args.get("pp_rank"), track.pp)
        elif name in ("iteration begin", "iteration end", "reduce"):
            where = {"iteration begin": track.begins, "iteration end": track.ends, "reduce": track.reduces}[name]
            where[iteration] = ts * 1000
    lost["begin without an end"] += len(open_)
    tracks = [out[k] for k in sorted(out) if out[k].iterations or out[k].begins]
    why = ", ".join(f"{n} × {reason}" for reason, n in sorted(lost.items()) if n)
    if not any(track.iterations for track in tracks):
        reason = f" ({why})" if why else ""
        raise InputError(f"no operation of any rank ends in the trace{reason}", hint="is the file whole?", where=path)
    if why:
        notices.append(Notice("events-dropped", f"{lost.total()} events dropped: {why}", path))
    return tracks


def _whole(value: Any, otherwise: Any = None) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 50:
        return otherwise
    return int(value)


def _place(value: Any, otherwise: Any = None) -> Any:
    """A number of a rank, or of a place among them."""
    number = _whole(value)
    return number if number is not None and 0 <= number < _MOST_PLACES else otherwise


def _job(tracks: list[_Track], files: list[str], notices: list[Notice]) -> Job:
    """Tracks of a rank are tensor-parallel ranks when they run alike, else recordings of their own."""
    alike = _alike(tracks)
    width = 1 + max(t.tid for t in tracks) if alike else 1
    rank_of = {id(t): t.pid * width + (t.tid if alike else 0) for t in tracks}
    tids = sorted({t.tid for t in tracks})
    if not alike and len(tids) > 1:
        message = (
            f"the tracks of a rank ({len(tids)}) are not of one iteration: they are read as {len(tids)} recordings of "
            "the same ranks, one after the other"
        )
        notices.append(Notice("steps-joined", message, files[0]))
    records: list[Record] = []
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    groups: list[tuple[int, int]] = []
    cut: dict[int, str] = {}
    at, number = 0, 0
    batches = [tracks] if alike else [[t for t in tracks if t.tid == tid] for tid in tids]
    for batch in (b for b in batches if any(t.iterations for t in b)):
        numbers = {it: number + i for i, it in enumerate(sorted({it for t in batch for it in t.iterations}))}
        cut |= {numbers[it]: _why_cut(batch, it) for it in numbers if any(it in t.cut() for t in batch)}
        low = min(t.limits(it)[0] for t in batch for it in t.iterations)
        for track in batch:
            for iteration in track.iterations:
                step = numbers[iteration] if numbers[iteration] not in cut else -1
                _iteration(track, iteration, rank_of[id(track)], step, at - low, records, steps, groups)
        at += max(t.limits(it)[1] for t in batch for it in t.iterations) - low
        number += len(numbers)
    notices.extend(Notice("step-cut", f"step {step} is in no figure: {why}", files[0]) for step, why in cut.items())
    places = _places([t for t in tracks if t.iterations], rank_of, width)
    uneven = _uneven(places)
    if uneven:
        notices.append(Notice("stages-unclear", uneven, files[0]))
    else:
        _place_stages(records, places)
    _unmarked(records, groups, notices, files[0])
    return Job(
        "megatronapp", tuple(files), records, places, steps, "megatron", groups, notices, cut_steps=cut
    )  # fmt: skip


def _why_cut(batch: list[_Track], iteration: int) -> str:
    ranks = ", ".join(str(t.pid) for t in batch if iteration in t.cut())
    return f"iteration {iteration} is cut, without a mark of its begin or its end on rank {ranks}"


def _alike(tracks: list[_Track]) -> bool:
    """Whether all tracks of each pid run the same operations in the same time."""
    by_pid: dict[int, list[_Track]] = {}
    for track in tracks:
        by_pid.setdefault(track.pid, []).append(track)
    for group in by_pid.values():
        lengths = [t.length() for t in group]
        if max(lengths) - min(lengths) > _LOCKSTEP * max(lengths) or any(t.order() != group[0].order() for t in group):
            return False
    return True


def _iteration(
    track: _Track, iteration: int, rank: int, step: int, shift: int,
    records: list[Record], steps: dict[tuple[int, int], tuple[int, int]], groups: list[tuple[int, int]],
) -> None:  # fmt: skip
    low, high = track.limits(iteration)
    if step >= 0:
        steps[(rank, step)] = (low + shift, high + shift)
    for name, start, end, args in track.iterations[iteration]:
        lane, kind = KINDS.get(name, (Lane.RANGE, Kind.OTHER))
        if name.startswith(_MESSAGES):
            lane, kind = Lane.COMM, Kind.OTHER
        marked = kind in (Kind.FORWARD, Kind.BACKWARD)
        records.append(
            Record(
                rank, step, lane, kind, start + shift, end + shift, name,
                chunk=_place(args.get("model_chunk", 0), -1) if marked else -1,
                microbatch=_place(args.get("microbatch"), -1) if marked else -1,
            )
        )  # fmt: skip
    reduce = track.reduces.get(iteration)
    if reduce is not None and reduce < high and step >= 0:
        groups.append((step, len(records)))
        limits = (reduce + shift, high + shift)
        records.append(Record(rank, step, Lane.WAIT, Kind.COLLECTIVE, *limits, "reduce", group="iteration end"))


def _places(tracks: list[_Track], rank_of: dict[int, int], width: int) -> dict[int, Place]:
    seen: Counter[tuple[int, int]] = Counter()
    out: dict[int, Place] = {}
    for track in sorted(tracks, key=lambda t: rank_of[id(t)]):
        rank = rank_of[id(track)]
        if rank in out:
            continue
        pp, tp = max(track.pp, 0), rank % width
        out[rank] = Place(pp, seen[(pp, tp)] * width + tp, tp, f"rank {rank} (iterations from 0)")
        seen[(pp, tp)] += 1
    return out


def _uneven(places: dict[int, Place]) -> str:
    """Why it cannot be told which pipeline a rank is of: of some position fewer ranks are there than of others."""
    count = Counter(place.pp for place in places.values())
    positions = range(max(count) + 1)
    if len({count[pp] for pp in positions if count[pp]}) <= 1:
        return ""
    listed = ", ".join(f"{count[pp]} of position {pp}" for pp in positions[:8])
    return f"ranks have no trace ({listed}): which of the pipelines a rank is of, and so its stage, is not known"


def _place_stages(records: list[Record], places: dict[int, Place]) -> None:
    """Megatron's interleaving: chunk c of position d is stage c·p + d."""
    p = max(place.pp for place in places.values()) + 1
    for i, r in enumerate(records):
        if r.kind in (Kind.FORWARD, Kind.BACKWARD) and r.chunk >= 0:
            records[i] = replace(r, stage=r.chunk * p + places[r.rank].pp)


def _unmarked(records: list[Record], groups: list[tuple[int, int]], notices: list[Notice], path: str) -> None:
    lengths = list(_lengths(records, groups))
    if lengths:
        message = (
            f"between the mark 'reduce' and the end of the iteration ({min(lengths) / 1e6:.1f} to "
            f"{max(lengths) / 1e6:.1f} ms) nothing is marked: gradient reduction and optimizer count as one collective"
        )
        notices.append(Notice("tail-unmarked", message, path))


def _lengths(records: list[Record], groups: list[tuple[int, int]]) -> Iterator[int]:
    return (records[row].end_ns - records[row].start_ns for _, row in groups)
