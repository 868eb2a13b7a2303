"""ndtimeline (veScale) records -> Run: its Chrome traces, and its records as JSON, one a line or a list of them.

A record names what was done, by which rank of which step, and for how long; micro-batches are counted: the k-th
forward of a step is micro-batch k.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from bubblescope.errors import InputError
from bubblescope.ingest.decompress import blocks
from bubblescope.ingest.oprecords import Job, Place, Record, build
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.ingest.parallel import Executor
from bubblescope.model import Kind, Lane, Notice, Run

_METRIC = b'"forward-compute"'
_OTHER = b'"backward-compute"'
_PEEK = 1 << 20

COMPUTE = {"forward-compute": Kind.FORWARD, "backward-compute": Kind.BACKWARD, "optimizer": Kind.OPTIMIZER}
COLLECTIVES = (
    "embedding-grads-all-reduce", "grads-reduce-scatter", "params-all-gather", "separate-grads-all-reduce",
    "grads-reduce-scatter-nonoverlapping", "params-all-gather-nonoverlapping", "tp-allreduce", "tp-allgather",
    "tp-reducescatter", "layernorm-grads-all-reduce", "unshard-all-gather", "grad-reduce-scatter", "grad-all-reduce",
)  # fmt: skip
# Each half of a message's name: what it does, and how many stages ahead its other end is.
_HALVES = {
    "forward-send": (Kind.SEND, 1), "forward-recv": (Kind.RECV, -1),
    "backward-send": (Kind.SEND, -1), "backward-recv": (Kind.RECV, 1),
}  # fmt: skip


_NAME = re.compile(r"\.(jsonl?|log)(\.gz)?$|^trace_step\d+_\d+$", re.IGNORECASE)


def looks_like(name: str) -> bool:
    """Whether a file in a folder is worth opening, by its name (ndtimeline's own have no suffix)."""
    return _NAME.search(PurePosixPath(name).name) is not None


def can_read(path: Path) -> bool:
    """Whether the file at `path` holds such records."""
    return path.is_file() and sniff(str(path))


def sniff(path: str) -> bool:
    """As `can_read`, for any address."""
    try:
        start = next(iter(blocks(path, 1 << 40, [])), b"")[:_PEEK]
    except InputError:
        return False
    rank = b'"pp"' in start or b'"stage"' in start
    return start.lstrip()[:1] in (b"[", b"{") and (_METRIC in start or _OTHER in start) and rank


def read(paths: Sequence[str | Path], options: ReadOptions = DEFAULT, executor: Executor | None = None) -> Run:
    """One Run of all files, which are one job. Raises InputError for what is no such trace."""
    files = [str(p) for p in paths]
    notices: list[Notice] = []
    items = [item for path in files for item in _items(path, notices, options)]
    if not items:
        said = "".join(f" ({notice.message})" for notice in notices)
        raise InputError(f"no records of operations in the trace{said}", hint="see docs/traces.md", where=files[0])
    places = _places(items)
    records = _numbered([r for item in items for r in _records(item, places)])
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for record in records:
        low, high = steps.get((record.rank, record.step), (record.start_ns, record.end_ns))
        steps[(record.rank, record.step)] = (min(low, record.start_ns), max(high, record.end_ns))
    records = _staged(records, places, notices, files[0])
    inferred = {"microbatch": "operations counted per step"}
    return build(Job("ndtimeline", tuple(files), records, places, steps, "veScale", (), notices, inferred))


@dataclass(frozen=True)
class _Item:
    rank: int
    step: int
    pp: int
    dp: int
    tp: int
    host: str
    metric: str
    start_ns: int
    end_ns: int


def _items(path: str, notices: list[Notice], options: ReadOptions) -> Iterator[_Item]:
    bad = 0
    for raw in _documents(b"".join(blocks(path, options.max_bytes, notices))):
        found = _of_event(raw) if "ph" in raw else _of_record(raw)
        if found is None:
            bad += "ph" not in raw or raw["ph"] == "X"
            continue
        yield from found
    if bad:
        notices.append(Notice("events-dropped", f"{bad} records without usable rank, step or times were dropped", path))


def _documents(text: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, else of JSON lines; empty ones for what is no object."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = [_line(line) for line in text.splitlines() if line.strip()]
    items = found if isinstance(found, list) else [found]
    return (item if isinstance(item, dict) else {} for item in items)


def _line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", "replace").strip().rstrip(","), strict=False)
    except (ValueError, RecursionError):
        return {}


def _of_event(raw: dict[str, Any]) -> list[_Item] | None:
    """A Chrome event: microseconds, ranks in its arguments, the data-parallel rank as its process."""
    args = raw.get("args")
    if raw.get("ph") != "X" or not isinstance(args, dict):
        return None
    numbers = [_number(args.get(k)) for k in ("rank", "step", "pp")]
    start, length = _time(raw.get("ts"), 1e3), _time(raw.get("dur"), 1e3)
    if min(numbers) < 0 or start is None or length is None or length < 0:
        return None
    rank, step, pp = numbers
    dp, tp = max(_number(raw.get("pid")), 0), max(_number(args.get("tp")), 0)
    return [_Item(rank, step, pp, dp, tp, "", str(raw.get("name", "")), start, start + length)]


def _of_record(raw: dict[str, Any]) -> list[_Item] | None:
    """A record of several operations of one kind: seconds, in lists."""
    numbers = [_number(raw.get(k)) for k in ("rank", "step", "stage")]
    starts, lengths = raw.get("start_ts"), raw.get("duration")
    if min(numbers) < 0 or not isinstance(starts, list) or not isinstance(lengths, list) or len(starts) != len(lengths):
        return None
    rank, step, pp = numbers
    out = []
    for s, d in zip(starts, lengths, strict=True):
        start, length = _time(s, 1e9), _time(d, 1e9)
        if start is None or length is None or length < 0:
            return None
        dp, tp = max(_number(raw.get("dp_rank")), 0), max(_number(raw.get("tp_rank")), 0)
        host = str(raw.get("ip") or "")
        out.append(_Item(rank, step, pp, dp, tp, host, str(raw.get("metric", "")), start, start + length))
    return out


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 30 else -1


def _time(value: Any, to_ns: float) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value * to_ns) < 1 << 62:
        return None
    return round(value * to_ns)


def _places(items: list[_Item]) -> dict[int, Place]:
    """Tensor-parallel ranks run alike and count as pipelines of their own, beside the data-parallel ones."""
    width = 1 + max(i.tp for i in items)
    return {i.rank: Place(i.pp, i.dp * width + i.tp, i.tp, i.host) for i in items}


def _records(item: _Item, places: dict[int, Place]) -> Iterator[Record]:
    rank_at = {(place.replica, place.pp): rank for rank, place in places.items()}
    plain = Record(item.rank, item.step, Lane.COMM, Kind.COLLECTIVE, item.start_ns, item.end_ns, item.metric)
    if item.metric in COMPUTE:
        yield replace(plain, lane=Lane.COMPUTE, kind=COMPUTE[item.metric])
    elif item.metric in COLLECTIVES:
        yield replace(plain, group=item.metric)
    for half, (kind, ahead) in _HALVES.items():
        if half in item.metric:
            place = places[item.rank]
            peer = rank_at.get((place.replica, place.pp + ahead), -1)
            yield replace(plain, kind=kind, name=half, peer=peer)


def _numbered(records: list[Record]) -> list[Record]:
    """Micro-batches: the k-th of its name and rank in a step."""
    seen: dict[tuple[int, int, str], int] = {}
    out = []
    for record in sorted(records, key=lambda r: (r.start_ns, r.end_ns)):
        counted = record.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.SEND, Kind.RECV)
        key = (record.rank, record.step, record.name)
        number = seen.get(key, 0)
        seen[key] = number + 1
        out.append(replace(record, microbatch=number if counted else -1))
    return out


def _staged(records: list[Record], places: dict[int, Place], notices: list[Notice], path: str) -> list[Record]:
    """Stage = position of the rank. Where the last rank passes activations on, several stages share a rank, and the
    records do not say which one an operation was of: then stage and micro-batch stay open."""
    last = max(place.pp for place in places.values())
    wraps = any(r.name == "forward-send" and places[r.rank].pp == last for r in records)
    if wraps:
        message = (
            "the last pipeline rank sends activations, so the schedule is interleaved, and the records do not say of "
            "which chunk an operation is: stages and micro-batches are not known"
        )
        notices.append(Notice("chunks-unknown", message, path))
        return [replace(r, microbatch=-1) for r in records]
    counted = (Kind.FORWARD, Kind.BACKWARD, Kind.SEND, Kind.RECV)
    return [replace(r, stage=places[r.rank].pp, chunk=0) if r.kind in counted else r for r in records]
