"""Bytes of a Kineto (Chrome) trace -> event columns, in chunks, whatever is wrong with the file.

The ladder for what does not parse (each rung leaves a Notice): typed msgspec over a chunk; byte repair and the
same again; event by event; stdlib json with ``strict=False``; else the event is skipped and counted. A file cut
short gives its complete prefix.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import InvalidOperation
from typing import Any

import msgspec

from bubblescope.errors import InputError
from bubblescope.ingest import jsonrepair
from bubblescope.ingest.decompress import ahead, blocks
from bubblescope.ingest.events import Scan
from bubblescope.ingest.kineto_columns import Columns
from bubblescope.ingest.kineto_structs import EXACT, LAX, NUMBERED, ONE, RAW, STRICT, Event
from bubblescope.ingest.kineto_values import EXACT_US, MAX_NS, integer
from bubblescope.ingest.native.scanner import open_scanner
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.model import Notice

CHUNK = 1 << 20
_MAX_EVENT = 16 << 20
_MAX_HEAD = 64 << 20
_TAIL = 1 << 13
_HOPELESS = 1 << 12
"""Repairs of single events in vain, for each that helps, after which no more are tried."""
_BARE_LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_OPEN = re.compile(rb'"traceEvents"\s*:\s*\[')
_CLOSE = re.compile(rb"\}\s*\](?=\s*(?:[,}]|\Z))")
_BRACKET = re.compile(rb"\}\s*\]")
_GOES_ON = re.compile(rb"\]\s*,\s*\{")
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,9})')
_PARSE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, InvalidOperation, OverflowError)


def scan(path: str, options: ReadOptions = DEFAULT) -> Scan:
    """Read one trace file. Raises InputError when it is not a trace or breaks a limit of `options`."""
    notices: list[Notice] = []
    return scan_blocks(ahead(blocks(path, options.max_bytes, notices)), path, options, notices)


def scan_blocks(
    source: Iterable[bytes], path: str, options: ReadOptions = DEFAULT, notices: list[Notice] | None = None
) -> Scan:
    """As `scan`, for plain bytes that come in blocks."""
    notices = [] if notices is None else notices
    columns = Columns(path, options)
    reader = _Reader(columns, path, notices)
    with _collector_off():
        for block in source:
            reader.feed(block)
        reader.finish()
    result = columns.build(reader.head)
    result.notices = [*notices, *reader.notices()]
    result.file_ranks = reader.file_ranks
    base = reader.head.get("baseTimeNanoseconds") or 0
    result.base_lost = reader.truncated and "baseTimeNanoseconds" not in reader.head
    result.base_ns = integer(base)
    if not 0 <= result.base_ns < MAX_NS or (type(base) is int and base != result.base_ns):
        message = f"baseTimeNanoseconds is {str(base)[:40]!r}, which is no time: this rank's clock is not the others'"
        result.notices.append(Notice("base-time-unusable", message, path))
        result.base_ns = 0
    return result


@contextmanager
def _collector_off() -> Iterator[None]:
    """Nothing made while parsing has cycles, and a collection walks all that was made so far."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Reader:
    """Cuts the stream between events, decodes each chunk, and keeps count of what went wrong.

    unpacking: what is wrong with the packed file, which is known when its last bytes have come.
    """

    def __init__(self, columns: Columns, path: str, unpacking: list[Notice]) -> None:
        self.columns = columns
        self.path = path
        self.unpacking = unpacking
        self.native = open_scanner(columns)
        self.head: dict[str, Any] = {}
        self.file_ranks: set[int] = set()
        self.repairs: Counter[str] = Counter()
        self.skipped = 0
        self.first_skipped = -1
        self.truncated = False
        self.trailing = 0
        self._kept: list[Event] = []
        # Damaged events that repairs could help, and others.
        self._helped = self._in_vain = 0
        # One buffer for the whole file: a "[" in front, then what is not decoded yet, up to `_end`.
        self._buffer = bytearray(b"[") + bytearray(2 * CHUNK)
        self._end = 1
        self._before: bytes | None = None
        # How far, and to which depth, the head was looked through for the list of events.
        self._looked = [1, 0]
        self._after = b""
        self._gap: re.Pattern[bytes] | None = None
        # The list of events has ended; of what follows the first bytes stay in the buffer, the others are counted.
        self._closed = False
        self._beyond = 0

    def feed(self, block: bytes) -> None:
        """The next bytes of the file."""
        for at in range(0, len(block), CHUNK):
            if self._closed and self._end > 3 * CHUNK:
                self._beyond += len(block) - at
                return
            self._append(block[at : at + CHUNK] if len(block) > CHUNK else block)
            if self._end > CHUNK and not self._closed and (self._before is not None or self._open()):
                self._cut()

    def finish(self) -> None:
        """No more bytes will come."""
        if self._before is None and not self._open(final=True):
            return
        self._last(self._rest())
        if self.native is not None:
            self.native.flush()
        self.head = _head(self._before or b"", self._after, self.repairs)
        self._note_ranks(self._before or b"")

    def _append(self, block: bytes) -> None:
        end = self._end + len(block)
        if end >= len(self._buffer):
            self._buffer = self._buffer + bytearray(end)
        self._buffer[self._end : end] = block
        self._end = end

    def _rest(self) -> bytes:
        return bytes(memoryview(self._buffer)[1 : self._end])

    def _forget(self, upto: int) -> None:
        """Move what stands from `upto` on to the front."""
        left = self._end - upto
        self._buffer[1 : 1 + left] = self._buffer[upto : self._end]
        self._end = 1 + left

    def _open(self, final: bool = False) -> bool:
        """Find where the events begin; False while more bytes may be needed."""
        bare = _BARE_LIST.match(self._buffer, 1, self._end)
        if bare is not None:
            self._before = b""
            self._forget(bare.end())
            return True
        match, *self._looked = _top_list(self._buffer, self._end, *self._looked)
        if match is None:
            if not final and self._end <= _MAX_HEAD:
                return False
            match = _OPEN.search(self._buffer, 1, self._end)
        if match is None:
            raise _not_a_trace(self._rest(), self.path, self.unpacking)
        self._before = bytes(self._buffer[1 : match.start()])
        self._forget(match.end())
        return True

    def _pattern(self) -> re.Pattern[bytes]:
        if self._gap is None:
            self._gap = jsonrepair.event_gap(bytes(self._buffer[1 : min(self._end, 257)]))
        return self._gap

    def _cut(self) -> None:
        """Decode all but the last, perhaps incomplete, event of the buffer."""
        gap = self._gap_between()
        if gap is not None:
            if self._decode_front(gap[0]):
                self._forget(gap[1])
        elif self._end > _MAX_EVENT:
            raise InputError(
                f"one event is longer than {_MAX_EVENT:,} bytes", hint="is this a trace at all?", where=self.path
            )

    def _gap_between(self) -> tuple[int, int] | None:
        """Where the last whole event of the buffer ends, and where the next begins."""
        for pattern, low in ((self._pattern(), self._end - _TAIL), (self._pattern(), 1), (jsonrepair.ANY_GAP, 1)):
            last = None
            for match in pattern.finditer(self._buffer, max(low, 1), self._end):
                last = match
            if last is not None:
                return last.start() + 1, last.end()
        return None

    def _decode_front(self, end: int) -> bool:
        """Decode the events that end at `end`, where they stand; False, and nothing done, where the list has closed."""
        kept = self._buffer[end]
        self._buffer[end] = ord("]")
        done = self._take(memoryview(self._buffer)[: end + 1])
        self._buffer[end] = kept
        if not done:
            text = bytes(memoryview(self._buffer)[1:end])
            self._closed = _closes_in(text) is not None
            if not self._closed:
                self._repair(text)
        return not self._closed

    def _last(self, rest: bytes) -> None:
        """The end of the stream: last events, the closing bracket, and the keys that follow it."""
        if re.match(rb"\s*\]", rest):
            self._end_list(rest.lstrip())
            return
        for match in _closings(rest):
            if self._take(b"[" + rest[: match.start() + 1] + b"]"):
                self._end_list(rest[match.end() - 1 :])
                return
        close = self._closing(rest)
        if close is None:
            self._damaged_end(rest)
            return
        events = rest[:close].rstrip()
        if events.endswith(b","):
            self.repairs["comma before the closing bracket"] += 1
        self._decode(events.rstrip(b","))
        self._end_list(rest[close:])

    def _closing(self, rest: bytes) -> int | None:
        """Where the list closes that holds entries which are no events, or damaged ones, or that something follows: the
        bracket that matches, else the last one that leaves a sound end of the document."""
        place = _closes_in(rest)
        if place is not None:
            return place
        end = jsonrepair.value_end(b"[" + rest, 0)
        places = [end - 2] if end is not None else []
        places += [match.end() - 1 for match in _closings(rest)]
        opened = b"[" if self._before == b"" else b'{"":['
        return next((place for place in places if _is_sound(opened + rest[place:])), None)

    def _damaged_end(self, rest: bytes) -> None:
        """No closing bracket ends the list: take event by event, and what follows the last one."""
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
        if re.match(rb"\s*\]", tail[end:]):
            self._end_list(tail[end:].lstrip())
        else:
            self.truncated = True

    def _end_list(self, after: bytes) -> None:
        """Take what follows the list of events, from its bracket on: the last keys of the document. And then perhaps
        another rank's file, the rest of a longer one, or a second list of events."""
        self._note_ranks(after)
        end: int | None = 1
        if self._before != b"":
            keys = after[1:].lstrip(b", \r\n\t")
            end = jsonrepair.value_end(b"{" + keys, 0)
            end = None if end is None else len(after) - len(keys) + end - 1
            second, *_ = _top_list(after, len(after), 1, 1)
            if second is not None and (end is None or second.start() < end):
                end = second.start()
        self.truncated = self.truncated or end is None
        self._after = after[:end]
        extra = len(after[len(self._after) :].strip()) + self._beyond
        self.trailing = extra

    def _decode(self, text: bytes) -> None:
        """Add the events of ``{…}, {…}``; the ladder."""
        if not self._take(b"[" + text + b"]"):
            self._repair(text)

    def _repair(self, text: bytes) -> None:
        counts: Counter[str] = Counter()
        cleaned = jsonrepair.clean(text, counts)
        if self._take(b"[" + cleaned + b"]"):
            self.repairs += counts
            return
        entries = _try(RAW, b"[" + cleaned + b"]")
        if entries is None:
            self._one_by_one(text)
            return
        self.repairs += counts
        for entry in entries:
            self._keep_or_skip(bytes(entry))
        self._add_kept()

    def _take(self, array: bytes | memoryview) -> bool:
        """Add the events of a sound JSON array; False, and nothing added, when it is not."""
        if self.native is not None:
            if self.native.take(array):
                return True
            self.native.flush()
        events = _try(NUMBERED if self.columns.numbered else STRICT, array)
        if events is not None and self.columns.add_strict(events):
            return True
        events = _try(LAX, array)
        if events is None:
            return False
        self._add_lax(events, array)
        return True

    def _add_lax(self, events: list[Any], array: bytes | memoryview) -> None:
        if any(type(e.ts) is float and abs(e.ts) >= EXACT_US for e in events):
            exact = _try(EXACT, array) or events
            events = [x if type(e.ts) is float and abs(e.ts) >= EXACT_US else e
                      for e, x in zip(events, exact, strict=True)]  # fmt: skip
        self.columns.add_lax(events)

    def _one_by_one(self, text: bytes) -> None:
        self._note_ranks(text)
        pieces = jsonrepair.split_events(text, self._pattern())
        at = 0
        while at < len(pieces):
            # A border inside an event (objects in a list of its args) cuts it; its parts belong together.
            for width in (1, 2, 3):
                piece = pieces[at] if width == 1 else b",".join(pieces[at : at + width])
                event = self._one(piece)
                if event is not None or at + width >= len(pieces) or jsonrepair.depth(piece, 0, len(piece)) <= 0:
                    break
            if event is None:
                self._by_any_key(pieces[at])
                width = 1
            else:
                self._keep(event, piece)
            at += width
        self._add_kept()

    def _by_any_key(self, piece: bytes) -> None:
        """A piece that is no event: perhaps several, of which some begin with another key, or stand beside entries
        that are none."""
        parts = jsonrepair.split_events(piece, jsonrepair.ANY_GAP)
        for part in parts:
            event = self._one(part) if len(parts) > 1 else None
            if event is None:
                for value in jsonrepair.values(part):
                    self._skip() if value == piece else self._keep_or_skip(value)
            else:
                self._keep(event, part)

    def _keep_or_skip(self, entry: bytes) -> None:
        event = self._one(entry)
        if event is None:
            self._skip()
        else:
            self._keep(event, entry)

    def _keep(self, event: Event, piece: bytes) -> None:
        """Add it, together with those that follow."""
        if type(event.ts) is float and abs(event.ts) >= EXACT_US:
            event = (_try(EXACT, b"[" + piece + b"]") or [event])[0]
        self._kept.append(event)

    def _add_kept(self) -> None:
        kept, self._kept = self._kept, []
        self.columns.add_lax(kept)

    def _one(self, piece: bytes) -> Event | None:
        """One event from damaged bytes, or None. Where repairs help next to never they are given up, so that a large
        file of damaged events is read, and these are counted, in seconds."""
        try:
            return ONE.decode(piece)
        except _PARSE_ERRORS:
            pass
        if self._in_vain > _HOPELESS * (1 + self._helped):
            return None
        event = self._repaired(piece)
        self._helped += event is not None
        self._in_vain += event is None
        return event

    def _repaired(self, piece: bytes) -> Event | None:
        counts: Counter[str] = Counter()
        cleaned = jsonrepair.clean(piece, counts)
        for parse in (ONE.decode, _lenient):
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
            self.first_skipped = self.columns.seen + len(self._kept)
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


def _top_list(text: bytes | bytearray, end: int, start: int, depth: int) -> tuple[re.Match[bytes] | None, int, int]:
    """The list of events that is no part of another value of the document; and how far, and to which depth, it was
    looked for. `depth`: that of `start`."""
    for match in _OPEN.finditer(text, start, end):
        depth += jsonrepair.depth(text, start, match.start())
        start = match.start()
        if depth <= 1:
            return match, start, depth
    return None, start, depth


def _closings(rest: bytes) -> Iterator[re.Match[bytes]]:
    """Places where the list of events may close: the first few and the last few."""
    found = list(_CLOSE.finditer(rest))
    yield from found[-8:] if len(found) > 16 else found
    if len(found) > 16:
        yield from found[:8]


def _closes_in(text: bytes) -> int | None:
    """Where the list of these events closes, all of them sound: not before another event."""
    end = jsonrepair.value_end(b"[" + text, 0) if _BRACKET.search(text) else None
    if end is None or _GOES_ON.match(text, end - 2) or _try(RAW, b"[" + text[: end - 1]) is None:
        return None
    return end - 2


def _not_a_trace(text: bytes, path: str, unpacking: list[Notice]) -> InputError:
    damage = [notice.message for notice in unpacking if notice.code != "trailing-bytes"]
    if damage:
        return InputError(
            f"no event of this file could be read: {damage[0]}",
            hint="copy it again from where it was recorded, or record again",
            where=path,
        )
    if not text.strip(b"\0 \t\r\n"):
        return InputError(
            "the file is empty (a profiler that was killed leaves such files)", hint="remove it", where=path
        )
    return InputError(
        "no traceEvents: this is not a Kineto/Chrome trace, or it is cut before its first event",
        hint="record with torch.profiler and export_chrome_trace or tensorboard_trace_handler",
        where=path,
    )


def _is_sound(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except _PARSE_ERRORS:
        return False
    return True


def _try(decoder: msgspec.json.Decoder[Any], array: bytes | memoryview) -> list[Any] | None:
    try:
        decoded: list[Any] = decoder.decode(array)
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
