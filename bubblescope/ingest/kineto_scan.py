"""Bytes of a Kineto (Chrome) trace -> event columns, in chunks, whatever is wrong with the file.

The ladder for what does not parse (each rung leaves a Notice): typed msgspec over a chunk; byte repair and the
same again; event by event; stdlib json with ``strict=False``; else the event is skipped and counted. A file cut
short gives its complete prefix.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np

from bubblescope.errors import InputError
from bubblescope.ingest import jsonrepair
from bubblescope.ingest.decompress import blocks
from bubblescope.ingest.events import CATEGORIES, Cat, CommArgs, Events, Int, Scan
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.model import Names, Notice

CHUNK = 4 << 20
_MAX_EVENT = 16 << 20
_MAX_HEAD = 64 << 20
_OPEN = re.compile(rb'"traceEvents"\s*:\s*\[')
_CLOSE = re.compile(rb"\}\s*\](?=\s*(?:[,}]|\Z))")
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,9})')
# Above this many microseconds a float64 no longer holds the nearest nanosecond.
_EXACT_US = float(1 << 43)
_INT64 = 1 << 62


class Args(msgspec.Struct, gc=False):
    """The few arguments that are used; every one may have any JSON type."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    name: Any = None
    labels: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    fwd_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    rank: Any = msgspec.field(default=None, name="Rank")
    src: Any = msgspec.field(default=None, name="Src Rank")
    dst: Any = msgspec.field(default=None, name="Dst Rank")
    seq: Any = msgspec.field(default=None, name="Seq")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    bytes: Any = None


class Event(msgspec.Struct, gc=False):
    """One trace event; times in microseconds, whatever they are written as."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """`Event` with decimal times, for stamps that a float64 cannot hold to the nanosecond."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


_FAST = msgspec.json.Decoder(list[Event])
_EXACT = msgspec.json.Decoder(list[ExactEvent])
_ONE = msgspec.json.Decoder(Event)
_PARSE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, InvalidOperation, OverflowError)


def scan(path: str, options: ReadOptions = DEFAULT) -> Scan:
    """Read one trace file. Raises InputError when it is not a trace or breaks a limit of `options`."""
    notices: list[Notice] = []
    return scan_blocks(blocks(path, options.max_bytes, notices), path, options, notices)


def scan_blocks(
    source: Iterable[bytes], path: str, options: ReadOptions = DEFAULT, notices: list[Notice] | None = None
) -> Scan:
    """As `scan`, for plain bytes that come in blocks."""
    columns = _Columns(path, options)
    reader = _Reader(columns, path)
    for block in source:
        reader.feed(block)
    reader.finish()
    result = columns.build(reader.head)
    result.notices = [*(notices or []), *reader.notices()]
    result.file_ranks = reader.file_ranks
    result.base_ns = _integer(reader.head.get("baseTimeNanoseconds"), 0)
    return result


class _Reader:
    """Cuts the stream between events, decodes each chunk, and keeps count of what went wrong."""

    def __init__(self, columns: _Columns, path: str) -> None:
        self.columns = columns
        self.path = path
        self.head: dict[str, Any] = {}
        self.file_ranks: set[int] = set()
        self.repairs: Counter[str] = Counter()
        self.skipped = 0
        self.first_skipped = -1
        self.truncated = False
        self.trailing = 0
        self.offset = 0
        self._buffer = b""
        self._before: bytes | None = None
        self._gap: re.Pattern[bytes] | None = None

    def feed(self, block: bytes) -> None:
        self._buffer = self._buffer + block if self._buffer else block
        if len(self._buffer) < CHUNK:
            return
        if self._before is None and not self._open():
            return
        self._cut()

    def finish(self) -> None:
        if self._before is None and not self._open(final=True):
            return
        self._last(self._buffer)
        self.head = _head(self._before or b"", self._after, self.repairs)
        self._note_ranks(self._before or b"")
        self._note_ranks(self._after)

    _after = b""

    def _open(self, final: bool = False) -> bool:
        """Find where the events begin; False while more bytes may be needed."""
        text = self._buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
        if text.startswith(b"["):
            self._before, self._buffer = b"", text[1:]
            return True
        match = _OPEN.search(self._buffer)
        if match is None:
            if final or len(self._buffer) > _MAX_HEAD:
                raise _not_a_trace(self._buffer, self.path)
            return False
        self._before = self._buffer[: match.start()]
        self._buffer = self._buffer[match.end() :]
        return True

    def _pattern(self) -> re.Pattern[bytes]:
        if self._gap is None:
            self._gap = jsonrepair.event_gap(self._buffer[:256])
        return self._gap

    def _cut(self) -> None:
        """Decode all but the last, perhaps incomplete, event of the buffer."""
        low = max(0, len(self._buffer) - CHUNK // 4)
        last = _last_match(self._pattern(), self._buffer, low) or _last_match(self._pattern(), self._buffer, 0)
        if last is None:
            last = _last_match(jsonrepair.ANY_GAP, self._buffer, 0)
        if last is not None:
            self._decode(self._buffer[: last.start() + 1])
            self._buffer = self._buffer[last.end() :]
        elif len(self._buffer) > _MAX_EVENT:
            raise InputError(
                f"one event is longer than {_MAX_EVENT:,} bytes", hint="is this a trace at all?", where=self.path
            )

    def _last(self, rest: bytes) -> None:
        """The end of the stream: last events, the closing bracket, and the keys that follow it."""
        if re.match(rb"\s*\]", rest):
            self._after = rest
            return
        for match in _closings(rest):
            events = _try(_FAST, rest[: match.start() + 1])
            if events is not None:
                self._add(events, rest[: match.start() + 1])
                self._after = rest[match.end() - 1 :]
                self._check_trailing()
                return
        self._damaged_end(rest)

    def _damaged_end(self, rest: bytes) -> None:
        """No closing bracket leaves a sound list: take event by event, and what follows the last one."""
        last = 0
        for match in self._pattern().finditer(rest):
            last = match.end()
        if last:
            self._decode(rest[:last].rstrip().rstrip(b","))
        tail = rest[last:]
        end = jsonrepair.value_end(tail, 0) if tail.lstrip().startswith(b"{") else None
        if end is None:
            self.truncated = True
            return
        self._decode(tail[:end])
        self._after = tail[end:]
        if not re.match(rb"\s*\]", self._after):
            self.truncated = True
        else:
            self._check_trailing()

    def _check_trailing(self) -> None:
        """What follows the end of the document: another rank's file, or the rest of a longer one."""
        if self._before == b"":
            extra = self._after.strip()[1:].strip()
        else:
            end = jsonrepair.value_end(b"{" + self._after.lstrip()[1:].lstrip(b", \r\n\t"), 0)
            extra = self._after[end:].strip() if end is not None and end < len(self._after) else b""
            if end is None:
                self.truncated = True
        if len(extra) > 8:
            self.trailing = len(extra)

    def _decode(self, text: bytes) -> None:
        """Add the events of ``{…}, {…}``; the ladder."""
        events = _try(_FAST, text)
        if events is None:
            counts: Counter[str] = Counter()
            cleaned = jsonrepair.clean(text, counts)
            events = _try(_FAST, cleaned)
            if events is None:
                self._one_by_one(text)
                return
            text = cleaned
            self.repairs += counts
        self._add(events, text)

    def _add(self, events: list[Any], text: bytes) -> None:
        if _needs_exact(events):
            exact = _try(_EXACT, text)
            events = exact if exact is not None else events
        self.columns.add(events)

    def _one_by_one(self, text: bytes) -> None:
        self._note_ranks(text)
        pieces = jsonrepair.split_events(text, self._pattern())
        at = 0
        while at < len(pieces):
            # A border inside an event (objects in a list of its args) cuts it; its parts belong together.
            for width in (1, 2, 3):
                piece = pieces[at] if width == 1 else b",".join(pieces[at : at + width])
                event = self._one(piece)
                if event is not None or at + width >= len(pieces):
                    break
            if event is None:
                self._by_any_key(pieces[at])
                width = 1
            else:
                self._add([event], piece)
            at += width

    def _by_any_key(self, piece: bytes) -> None:
        """A piece that is no event: perhaps several, of which some begin with another key."""
        parts = jsonrepair.split_events(piece, jsonrepair.ANY_GAP)
        for part in parts:
            event = self._one(part) if len(parts) > 1 else None
            if event is None:
                self._skip()
            else:
                self._add([event], part)

    def _one(self, piece: bytes) -> Event | None:
        """One event from damaged bytes, or None."""
        try:
            return _ONE.decode(piece)
        except _PARSE_ERRORS:
            pass
        counts: Counter[str] = Counter()
        cleaned = jsonrepair.clean(piece, counts)
        for parse in (_ONE.decode, _lenient):
            try:
                event = parse(cleaned)
            except (*_PARSE_ERRORS, ValueError):
                continue
            self.repairs += counts
            if parse is _lenient:
                self.repairs["lenient parse"] += 1
            return event
        return None

    def _skip(self) -> None:
        if self.first_skipped < 0:
            self.first_skipped = self.columns.seen
        self.skipped += 1

    def _note_ranks(self, text: bytes) -> None:
        self.file_ranks.update(int(match[1]) for match in _RANK.finditer(text))

    def notices(self) -> list[Notice]:
        out = []
        if self.repairs:
            what = ", ".join(f"{n} × {kind}" for kind, n in sorted(self.repairs.items()))
            out.append(Notice("json-repaired", f"the JSON was repaired: {what}", self.path))
        if self.skipped:
            out.append(
                Notice(
                    "events-skipped",
                    f"{self.skipped} unreadable events were skipped, the first after event {self.first_skipped}",
                    self.path,
                )
            )
        if self.truncated:
            out.append(
                Notice(
                    "trace-truncated",
                    f"the file ends early; its {self.columns.seen} complete events are used, "
                    f"the last at {self.columns.last_us()} us",
                    self.path,
                )
            )
        if self.trailing:
            out.append(
                Notice(
                    "trailing-bytes",
                    f"{self.trailing:,} bytes follow the end of the trace and are not used; "
                    "did two ranks write one file?",
                    self.path,
                )
            )
        out.extend(self.columns.notices())
        return out


def _last_match(gap: re.Pattern[bytes], text: bytes, low: int) -> re.Match[bytes] | None:
    last = None
    for match in gap.finditer(text, low):
        last = match
    return last


def _closings(rest: bytes) -> Iterator[re.Match[bytes]]:
    """Places where the list of events may close: the first few and the last few."""
    found = list(_CLOSE.finditer(rest))
    yield from found[-8:] if len(found) > 16 else found
    if len(found) > 16:
        yield from found[:8]


def _not_a_trace(text: bytes, path: str) -> InputError:
    if not text.strip(b"\0 \t\r\n"):
        return InputError(
            "the file is empty (a profiler that was killed leaves such files)", hint="remove it", where=path
        )
    return InputError(
        "no traceEvents: this is not a Kineto/Chrome trace, or it is cut before its first event",
        hint="record with torch.profiler and export_chrome_trace or tensorboard_trace_handler",
        where=path,
    )


def _try(decoder: msgspec.json.Decoder[Any], events: bytes) -> list[Any] | None:
    try:
        decoded: list[Any] = decoder.decode(b"[" + events + b"]")
    except _PARSE_ERRORS:
        return None
    return decoded


def _lenient(text: bytes) -> Event:
    return msgspec.convert(json.loads(text, strict=False), Event)


def _head(before: bytes, after: bytes, repairs: Counter[str]) -> dict[str, Any]:
    """The keys around ``traceEvents``; those that do not parse are left out, and counted."""
    out: dict[str, Any] = {}
    opened = before.lstrip(b"\xef\xbb\xbf \t\r\n")
    if opened.strip():
        out.update(_object(opened.rstrip(b", \t\r\n") + b"}", repairs))
    follows = after.lstrip()[1:].lstrip(b", \t\r\n")
    if follows.startswith(b'"'):
        text = b"{" + follows
        end = jsonrepair.value_end(text, 0)
        out.update(_object(text[:end] if end else text.rstrip(b", \t\r\n") + b"}", repairs))
    return out


def _object(text: bytes, repairs: Counter[str]) -> dict[str, Any]:
    for candidate in (text, jsonrepair.clean(text, Counter())):
        try:
            decoded = msgspec.json.decode(candidate)
        except _PARSE_ERRORS:
            continue
        return decoded if isinstance(decoded, dict) else {}
    repairs["unreadable header"] += 1
    return {}


def _needs_exact(events: list[Any]) -> bool:
    return any(type(e.ts) is float and abs(e.ts) >= _EXACT_US for e in events)


def _integer(value: Any, otherwise: int = -1) -> int:
    """`value` as an int64, `otherwise` when it is none. Unsigned 64-bit ids are folded, not lost."""
    kind = type(value)
    try:
        if kind is int:
            number: int = value
        elif kind is str:
            text = value.strip()
            number = int(text, 16) if text[:2].lower() == "0x" else int(text)
        elif kind is float and value == value and abs(value) < 2**63:
            number = int(value)
        else:
            return otherwise
    except ValueError:
        return otherwise
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def nanoseconds(us: Any) -> int | None:
    """Microseconds as written -> integer nanoseconds; None when it is no finite number.

    >>> nanoseconds(4458676416788.066), nanoseconds("1712195495502094.531"), nanoseconds(float("nan"))
    (4458676416788066, 1712195495502094531, None)
    """
    kind = type(us)
    if kind is int:
        ns = us * 1000
    elif kind is float:
        if us != us or abs(us) > _INT64 / 1000:
            return None
        whole = us // 1.0
        ns = int(whole) * 1000 + round((us - whole) * 1000)
    elif kind is str or kind is Decimal:
        try:
            number = Decimal(us.strip()) if kind is str else us
            if not number.is_finite() or number.adjusted() > 20:
                return None
            ns = int((number * 1000).to_integral_value())
        except (InvalidOperation, ValueError):
            return None
    else:
        return None
    return ns if -_INT64 < ns < _INT64 else None


_COLUMNS = ("cat", "start_ns", "end_ns", "name", "pid", "tid", "device", "stream", "corr", "external",
            "sequence", "fwd_thread", "comm")  # fmt: skip
_TYPES: dict[str, Any] = {"cat": np.int8, "name": np.int32, "comm": np.int32}
_PACK = 1 << 16


class _Columns:
    """Event objects -> columns. Rows collect in lists and are packed into arrays every `_PACK` events."""

    def __init__(self, path: str, options: ReadOptions) -> None:
        self.path = path
        self.max_events = options.max_events
        self.names = Names()
        self.comms: list[CommArgs] = []
        self.processes: dict[int, str] = {}
        self.seen = 0
        self.kept = 0
        self.dropped: Counter[str] = Counter()
        self._comm_index: dict[CommArgs, int] = {}
        self._threads: dict[str, int] = {}
        self._categories: dict[str, Cat | None] = {}
        self._rows: list[tuple[int, ...]] = []
        self._packed: list[Int] = []

    def add(self, events: list[Any]) -> None:
        for event in events:
            self.seen += 1
            if event.ph == "X":
                cat = self._category(event.cat)
                if cat is not None:
                    self._complete(event, cat)
            elif event.ph == "M":
                self._metadata(event)
        if len(self._rows) >= _PACK:
            self._pack()
        if self.kept > self.max_events:
            raise InputError(
                f"more than {self.max_events:,} events",
                hint="raise the limit (max_events) if you trust the file, or record fewer steps",
                where=self.path,
            )

    def last_us(self) -> int:
        self._pack()
        return max((int(p[:, 1].max()) // 1000 for p in self._packed if len(p)), default=0)

    def _category(self, text: Any) -> Cat | None:
        if not isinstance(text, str):
            return Cat.BARE if text is None else None
        if text not in self._categories:
            self._categories[text] = CATEGORIES.get(text.lower())
        return self._categories[text]

    def _complete(self, event: Any, cat: Cat) -> None:
        start = nanoseconds(event.ts)
        length = nanoseconds(event.dur)
        if start is None or length is None:
            self.dropped["no finite time"] += 1
            return
        if length < 0:
            self.dropped["negative duration"] += 1
            return
        self.kept += 1
        name = event.name if isinstance(event.name, str) else str(event.name or "")
        args = event.args
        pid, tid = self._thread(event.pid), self._thread(event.tid)
        if args is None:
            tail = (-1, -1, -1, -1, -1, -1, -1)
        else:
            tail = (
                -1 if args.device is None else _integer(args.device),
                -1 if args.stream is None else self._thread(args.stream),
                -1 if args.correlation is None else _integer(args.correlation),
                -1 if args.external is None else _integer(args.external),
                -1 if args.sequence is None else _integer(args.sequence),
                -1 if args.fwd_thread is None else _integer(args.fwd_thread),
                -1 if args.collective is None and args.group is None else self._comm(args),
            )
        self._rows.append((cat, start, start + length, self.names.intern(name), pid, tid, *tail))

    def _thread(self, value: Any) -> int:
        """A number as it is ("7", "0x1f" too); any other text gets a negative stand-in of its own."""
        if type(value) is int and -_INT64 < value < _INT64:
            return value
        number = _integer(value, -_INT64)
        if number != -_INT64:
            return number
        return self._threads.setdefault(str(value), -2 - len(self._threads))

    def _comm(self, args: Args) -> int:
        made = _comm_args(args)
        found = self._comm_index.get(made)
        if found is None:
            found = self._comm_index[made] = len(self.comms)
            self.comms.append(made)
        return found

    def _metadata(self, event: Any) -> None:
        if event.name in ("process_name", "process_labels") and event.args is not None:
            pid = self._thread(event.pid)
            text = event.args.name if event.name == "process_name" else event.args.labels
            self.processes[pid] = f"{self.processes.get(pid, '')} {text}".strip()

    def _pack(self) -> None:
        if self._rows:
            self._packed.append(np.array(self._rows, dtype=np.int64))
            self._rows = []

    def build(self, head: dict[str, Any]) -> Scan:
        self._pack()
        table = np.concatenate(self._packed) if self._packed else np.empty((0, len(_COLUMNS)), np.int64)
        self._packed = []
        columns = {c: np.ascontiguousarray(table[:, i]).astype(_TYPES.get(c, np.int64), copy=False)
                   for i, c in enumerate(_COLUMNS)}  # fmt: skip
        return Scan(self.path, Events(**columns), self.names, self.comms, head, self.processes)

    def notices(self) -> list[Notice]:
        return [
            Notice("events-dropped", f"{n} events dropped: {why}", self.path) for why, n in sorted(self.dropped.items())
        ]


_DTYPE_BYTES = {
    "double": 8, "long": 8, "float64": 8, "int64": 8, "float": 4, "int": 4, "float32": 4, "int32": 4,
    "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "int16": 2, "byte": 1, "char": 1, "bool": 1,
    "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def _comm_args(args: Args) -> CommArgs:
    members = _members(args.members)
    size = _integer(args.bytes)
    if size < 0:
        elements = max(_integer(args.elements_in), _integer(args.elements_out))
        width = _DTYPE_BYTES.get(str(args.dtype or "").lower(), 0)
        size = elements * width if elements >= 0 and width else -1
    return CommArgs(
        collective=str(args.collective or "").lower(),
        group=str(args.group if args.group is not None else ""),
        group_text=str(args.members) if not members and args.members else "",
        members=members,
        rank=_integer(args.rank),
        src=_integer(args.src),
        dst=_integer(args.dst),
        seq=_integer(args.seq),
        bytes=size if size < _INT64 else -1,
    )


def _members(value: Any) -> tuple[int, ...]:
    """``"[0, 1, 2]"`` or a list -> ranks. Kineto shortens long lists with "..."; those are not usable.

    >>> _members("[0, 8]"), _members([3]), _members("[0, 1, ...]")
    ((0, 8), (3,), ())
    """
    if isinstance(value, str):
        body = value.strip().strip("[]()")
        parts: list[Any] = [p.strip() for p in body.split(",") if p.strip()]
    elif isinstance(value, list):
        parts = value
    else:
        return ()
    ranks = tuple(_integer(p, -1) for p in parts)
    return ranks if all(0 <= r < 1 << 31 for r in ranks) else ()
