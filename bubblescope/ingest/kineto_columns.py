"""Decoded trace events -> the columns of `Events`, chunk by chunk.

Three ways in, one result: strict events (whole columns at once), lax ones (row by row, any type anywhere), and
blocks of finished columns from the native scanner.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.ingest.arrows import CATEGORIES as ARROWS
from bubblescope.ingest.events import AUTOGRAD, CATEGORIES, DEVICE, Cat, CommArgs, Events, Int, Scan
from bubblescope.ingest.kineto_structs import Arrow, ArrowBegin, Begin, Complete, Metadata
from bubblescope.ingest.kineto_values import EXACT_US, INT64, MAX_NS, comm_args, integer, nanoseconds
from bubblescope.ingest.options import NameRule, ReadOptions, beyond_limit
from bubblescope.ingest.steps import STEP_NAME
from bubblescope.model import Names, Notice

COLUMNS = ("cat", "start_ns", "end_ns", "name", "pid", "tid", "device", "stream", "corr", "sequence", "comm")
_TYPES: dict[str, Any] = {"cat": np.int8, "start_ns": np.int64, "end_ns": np.int64, "name": np.int32, "comm": np.int32}
_NARROW = np.iinfo(np.int32)
_NOT_KEPT = -1
_NO_TIME = "no usable time"
_NEGATIVE = "negative duration"
_PAIR = "begin and end in two events (ph B and E), which are not read"
_DEVICE_SEEN = (*DEVICE, Cat.RUNTIME)
# Operators that mean something by their name alone; others only with a sequence number or NCCL metadata.
_USEFUL = (AUTOGRAD, "nccl:", "gloo:", "c10d::", "record_param_comms", "ProfilerStep")

Block = dict[str, NDArray[Any]]
"""Some rows of every column."""


class _Interned(dict[str, int]):
    """text -> index in `names`, filled as it is asked."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self._intern = names.intern

    def __missing__(self, text: str) -> int:
        index = self[text] = self._intern(text)
        return index


class _Codes(dict[str, int]):
    """Category as written -> `Cat`, or `_NOT_KEPT`."""

    def __missing__(self, text: str) -> int:
        code = self[text] = int(CATEGORIES.get(text.lower(), _NOT_KEPT))
        return code


class _Held:
    """Rows of every column, in arrays that grow: memory holds them once, and in 32 bits as long as these are enough."""

    def __init__(self) -> None:
        self._rows = 0
        self._arrays: Block = {name: np.empty(0, dtype=_TYPES.get(name, np.int32)) for name in COLUMNS}

    def add(self, block: Block) -> None:
        upto = self._rows + len(block["cat"])
        for name, values in block.items():
            self._room(name, upto, np.int64 if name not in _TYPES and not _fits(values) else self._arrays[name].dtype)
            self._arrays[name][self._rows : upto] = values
        self._rows = upto

    def _room(self, name: str, rows: int, kind: Any) -> None:
        old = self._arrays[name]
        if rows > len(old) or kind != old.dtype:
            self._arrays[name] = np.empty(max(rows, len(old), self._rows + self._rows // 4), dtype=kind)
            self._arrays[name][: self._rows] = old[: self._rows]

    def columns(self) -> Block:
        """All rows."""
        return {name: array[: self._rows] for name, array in self._arrays.items()}

    def given_up(self) -> Block:
        """All rows, without room for more; nothing remains here."""
        return {name: _trimmed(name, self._arrays.pop(name)[: self._rows]) for name in COLUMNS}

    def keep(self, block: Block) -> None:
        """Only these rows of `columns()` remain."""
        self._arrays, self._rows = block, len(block["cat"])


class Columns:
    """Collects blocks. `seen`: all events; `kept`: complete ones of a known category.

    Once the file has shown that a device was recorded, and that operators have sequence numbers, those of the host that
    nothing reads (no sequence number, no NCCL metadata, no telling name) are left out, unless
    `ReadOptions.keep_cpu_ops`. Without sequence numbers they stay where arrows may number them.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        self.path = path
        self.max_events = options.max_events
        self.names = Names()
        self.comms: list[CommArgs] = []
        self.processes: dict[int, str] = {}
        self.seen = 0
        self.kept = 0
        self.dropped: Counter[str] = Counter()
        self.lost = 0
        self._examples: dict[str, str] = {}
        self.on_device = False
        self.numbered = False
        self._arrows: list[tuple[int, int, int, int]] = []
        self._keep_ops = options.keep_cpu_ops
        self._last_ns = 0
        self._interned = _Interned(self.names)
        self._codes = _Codes()
        self._patterns: tuple[re.Pattern[str] | NameRule, ...] = (STEP_NAME, *options.range_rules())
        self._tells = np.zeros(0, dtype=np.bool_)
        self._comm_index: dict[CommArgs, int] = {}
        self._threads: dict[str, int] = {}
        self._held = _Held()

    # --- ways in ---------------------------------------------------------------------------------------------

    def add_strict(self, events: list[Any]) -> bool:
        """Events of `kineto_structs.STRICT`. False, and nothing done, when the lax way must read them."""
        complete = [e for e in events if type(e) is Complete]
        cat = np.fromiter(map(self._codes.__getitem__, map(_CAT, complete)), np.int8, len(complete))
        rows = list(compress(complete, (cat >= 0).tolist()))
        cat = cat[cat >= 0]
        start = _strict_ns([e.ts for e in rows])
        length = _strict_ns([e.dur for e in rows])
        if start is None or length is None:
            return False
        endless = (start == INT64) | (length == INT64)
        sound = ~endless & (length >= 0)
        bad = [(_NO_TIME if endless[i] else _NEGATIVE, int(cat[i]), rows[i]) for i in np.flatnonzero(~sound).tolist()]
        if bad:
            cat, start, length, rows = cat[sound], start[sound], length[sound], list(compress(rows, sound.tolist()))
        args = [e.args for e in rows]
        ids = _strict_ids(rows, args)
        if ids is None:
            return False
        self.seen += len(events)
        for why, code, event in bad:
            self._drop(why, code, event)
        names = np.fromiter(map(self._interned.__getitem__, [e.name for e in rows]), np.int32, len(rows))
        comm = np.full(len(rows), -1, dtype=np.int32)
        for i in [i for i, a in enumerate(args) if a.group is not None or a.collective is not None]:
            comm[i] = self.comm(args[i])
        block: Block = {"cat": cat, "start_ns": start, "end_ns": start + length, "name": names, "comm": comm, **ids}
        self.add_block(block, len(rows))
        if len(complete) < len(events):
            for event in events:
                if type(event) is Metadata:
                    self.add_metadata(event)
                elif type(event) is Begin:
                    self.add_begin(event)
                elif not self.numbered and isinstance(event, Arrow):
                    self.add_arrow(event, begins=type(event) is ArrowBegin)
        return True

    def add_lax(self, events: Iterable[Any]) -> None:
        """`kineto_structs.Event` (or `ExactEvent`) objects, in which every value may be anything."""
        rows: list[tuple[int, ...]] = []
        for event in events:
            self.seen += 1
            if event.ph == "X":
                cat = self._category(event.cat)
                row = None if cat == _NOT_KEPT else self._row(event, cat)
                if row is not None:
                    rows.append(row)
            elif event.ph == "M":
                self.add_metadata(event)
            elif event.ph == "B":
                self.add_begin(event)
            elif event.ph in ("s", "f"):
                self.add_arrow(event, begins=event.ph == "s")
        if rows:
            table = np.array(rows, dtype=np.int64)
            self.add_block({c: table[:, i] for i, c in enumerate(COLUMNS)}, len(rows))

    def add_block(self, block: Block, kept: int) -> None:
        """Finished columns; `kept`: how many rows of the file they stand for."""
        self.kept += kept
        if self.kept > self.max_events:
            raise beyond_limit(f"more than {self.max_events:,} events", "events", self.path)
        if kept == 0:
            return
        self._last_ns = max(self._last_ns, int(block["start_ns"].max()))
        decided = self.on_device and self.numbered
        self.on_device = self.on_device or bool(np.isin(block["cat"], _DEVICE_SEEN).any())
        self.numbered = self.numbered or bool((block["sequence"] >= 0).any())
        if self.on_device and self.numbered and not decided:
            self._held.keep(self._used(self._held.columns()))
        used = self._used(block) if self.on_device and self.numbered else block
        if len(used["cat"]):
            self._held.add(used)

    def add_metadata(self, event: Any) -> None:
        """Names and labels of processes."""
        if event.name in ("process_name", "process_labels") and event.args is not None:
            pid = self.thread(event.pid)
            text = event.args.name if event.name == "process_name" else event.args.labels
            self.processes[pid] = f"{self.processes.get(pid, '')} {text}".strip()

    def add_begin(self, event: Any) -> None:
        """The begin of a pair. No profiler of GPUs writes its events so: they are counted, not read."""
        cat = self._category(event.cat)
        if cat in DEVICE:
            self._drop(_PAIR, cat, event)

    def add_arrow(self, event: Any, *, begins: bool) -> None:
        """One end of an arrow; those from forward to backward are kept as long as no event has a sequence number."""
        if self.numbered or event.cat not in ARROWS:
            return
        exact = type(event.ts) is Decimal
        number, thread = integer(event.id, -INT64), integer(event.tid, -INT64)
        when = nanoseconds(float(event.ts) if exact else event.ts)
        if number != -INT64 and thread != -INT64 and when is not None:
            self._arrows.append((number, int(begins), thread, when))

    # --- out -------------------------------------------------------------------------------------------------

    def last_us(self) -> int:
        return self._last_ns // 1000

    def build(self, head: dict[str, Any]) -> Scan:
        """All that was collected."""
        arrows = [] if self.numbered else self._arrows
        if self.on_device and not self.numbered and not arrows:
            self._held.keep(self._used(self._held.columns()))
        scan = Scan(self.path, Events(**self._held.given_up()), self.names, self.comms, head, self.processes)
        scan.dropped, scan.lost = self._reasons(), self.lost
        scan.arrows = np.array(arrows, dtype=np.int64).reshape(-1, 4)
        return scan

    def notices(self) -> list[Notice]:
        reasons = sorted(self._reasons().items())
        return [Notice("events-dropped", f"{n} events dropped: {why}", self.path) for why, n in reasons]

    def _reasons(self) -> Counter[str]:
        return Counter({f"{why} ({self._examples[why]})": n for why, n in self.dropped.items()})

    # --- lax -------------------------------------------------------------------------------------------------

    def _drop(self, why: str, cat: int, event: Any) -> None:
        self.dropped[why] += 1
        self.lost += cat in DEVICE
        self._examples.setdefault(why, f"for example ts {_shown(event.ts)}, dur {_shown(event.dur)}")

    def _category(self, text: Any) -> int:
        if not isinstance(text, str):
            return int(Cat.BARE) if text is None else _NOT_KEPT
        return self._codes[text]

    def _row(self, event: Any, cat: int) -> tuple[int, ...] | None:
        start = nanoseconds(event.ts)
        length = nanoseconds(event.dur)
        if start is None or length is None:
            self._drop(_NO_TIME, cat, event)
            return None
        if length < 0:
            self._drop(_NEGATIVE, cat, event)
            return None
        name = event.name if isinstance(event.name, str) else str(event.name or "")
        args = event.args
        pid, tid = self.thread(event.pid), self.thread(event.tid)
        if args is None:
            tail = (-1, -1, -1, -1, -1)
        else:
            tail = (
                -1 if args.device is None else integer(args.device),
                -1 if args.stream is None else self.thread(args.stream),
                -1 if args.correlation is None else integer(args.correlation),
                -1 if args.sequence is None else integer(args.sequence),
                -1 if args.collective is None and args.group is None else self.comm(args),
            )
        return (cat, start, start + length, self._interned[name], pid, tid, *tail)

    # --- shared ----------------------------------------------------------------------------------------------

    def thread(self, value: Any) -> int:
        """A number as it is ("7", "0x1f" too); any other text gets a negative stand-in of its own."""
        if type(value) is int and -INT64 < value < INT64:
            return value
        number = integer(value, -INT64)
        if number != -INT64:
            return number
        return self._threads.setdefault(str(value), -2 - len(self._threads))

    def comm(self, args: Any) -> int:
        """The index of this NCCL metadata in `comms`."""
        made = comm_args(args)
        found = self._comm_index.get(made)
        if found is None:
            found = self._comm_index[made] = len(self.comms)
            self.comms.append(made)
        return found

    def _used(self, block: Block) -> Block:
        if self._keep_ops:
            return block
        idle = (block["cat"] == Cat.CPU_OP) & (block["sequence"] < 0) & (block["comm"] < 0)
        keep = ~idle | self._telling()[block["name"]]
        return block if keep.all() else {name: column[keep] for name, column in block.items()}

    def _telling(self) -> NDArray[np.bool_]:
        """For every name: whether an operator is kept for it."""
        known = len(self._tells)
        if known < len(self.names):
            more = [self._useful(text) for text in self.names.texts[known:]]
            self._tells = np.concatenate([self._tells, np.array(more, dtype=np.bool_)])
        return self._tells

    def _useful(self, name: str) -> bool:
        return name.startswith(_USEFUL) or any(p.search(name) for p in self._patterns)


_CAT = attrgetter("cat")


def _shown(time: Any) -> str:
    text = repr(time) if isinstance(time, str) else str(time)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _strict_ids(rows: list[Any], args: list[Any]) -> Block | None:
    """The columns of numbers. None when a thread has a name in place of a number."""
    columns = {
        "pid": [e.pid for e in rows],
        "tid": [e.tid for e in rows],
        "device": [a.device for a in args],
        "stream": [a.stream for a in args],
        "corr": [a.correlation for a in args],
        "sequence": [a.sequence for a in args],
    }
    out = {name: _numbers(values) for name, values in columns.items()}
    return None if any(column is None for column in out.values()) else {n: c for n, c in out.items() if c is not None}


def _numbers(values: list[Any]) -> Int | None:
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        pass
    found = [integer(v, -INT64) for v in values]
    return None if -INT64 in found else np.array(found, dtype=np.int64)


def _strict_ns(us: list[Any]) -> Int | None:
    """Microseconds -> nanoseconds, as `nanoseconds` does; `INT64` for what is out of reach.

    None when some are floats that may have lost their last digits.
    """
    try:
        values = np.fromiter(us, np.float64, len(us))
    except OverflowError:
        return None
    largest = float(np.abs(values).max(initial=0.0))
    if largest >= EXACT_US:
        return _large_ns(us)
    whole = np.floor(values)
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)


def _large_ns(us: list[Any]) -> Int | None:
    if any(type(v) is float for v in us):
        return None
    found = [v * 1000 for v in us]
    return np.array([ns if -MAX_NS < ns < MAX_NS else INT64 for ns in found], dtype=np.int64)


def _fits(values: NDArray[Any]) -> bool:
    """Whether 32 bits hold all of `values`."""
    return bool(values.min(initial=0) >= _NARROW.min and values.max(initial=0) <= _NARROW.max)


def _trimmed(name: str, column: NDArray[Any]) -> NDArray[Any]:
    """A copy of its own, in 32 bits where these hold what is left of a column that had wider values once."""
    wider = name not in _TYPES and column.dtype != np.int32
    return column.astype(np.int32 if wider and _fits(column) else column.dtype)
