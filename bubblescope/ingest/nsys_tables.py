"""The tables of one Nsight Systems SQLite export -> event columns of every process that used a GPU.

Tables and columns come and go with the version of nsys and with what was captured, so each is looked up before it is
asked for; nothing depends on a product version.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from bubblescope.errors import InputError
from bubblescope.ingest.events import DEVICE, Cat, CommArgs, Events, Int, Scan
from bubblescope.ingest.kineto_values import MAX_NS
from bubblescope.ingest.nccl_payload import Call, Payloads, call_of
from bubblescope.ingest.nvtx_names import Domains, split_operator
from bubblescope.ingest.options import ReadOptions, beyond_limit
from bubblescope.model import Names, Notice

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": (Cat.MEMCPY, "Memcpy"), "CUPTI_ACTIVITY_KIND_MEMSET": (Cat.MEMSET, "Memset")}
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
OURS = (KERNELS, NVTX, RUNTIME, "StringIds", "META_DATA_EXPORT", "TARGET_INFO_SESSION_START_TIME")
"""An export has one of these tables."""
_RANGES = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxtPushPopRange": 70, "NvtxtStartEndRange": 71}
_DOMAIN = {"NvtxDomainCreate": 75}
SQL_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What SQLite raises of a damaged file; the latter where its own message quotes bytes of the file."""
_CHUNK = 1 << 16
_STRAY = 0.05


@dataclass(eq=False)
class Process:
    """One process of one file. key: the serialised id, host part included. calls: NCCL calls beside the rows of
    `scan.comms`. iter_rank: the rank that zero-bubble's own ranges name. comms_joined: (communicator, size, rank)."""

    key: int
    gpu: int
    scan: Scan
    calls: list[Call] = field(default_factory=list)
    iter_rank: int = -1
    comms_joined: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.key & 0xFFFFFF

    def is_copy_of(self, other: Process) -> bool:
        """Whether both hold the same events of the same process of the same session."""
        mine, theirs = self.scan, other.scan
        return (self.key, mine.base_ns, mine.head) == (other.key, theirs.base_ns, theirs.head) and all(
            np.array_equal(getattr(mine.events, name), getattr(theirs.events, name)) for name in ("start_ns", "end_ns")
        )


def processes(connection: sqlite3.Connection, path: str, options: ReadOptions) -> tuple[list[Process], list[Notice]]:
    """Processes with GPU events, and what was found wrong with the file. Raises InputError when it is no export, or
    breaks a limit."""
    file = _File(connection, path)
    if not any(table in file.tables for table in OURS):
        raise InputError(
            "the SQLite file is no Nsight Systems export (no StringIds, no CUPTI or NVTX tables)",
            hint="export a report: nsys export --type sqlite --include-blobs=true REPORT.nsys-rep",
            where=path,
        )
    count = sum(file.count(t) for t in (KERNELS, *COPIES, GRAPHS, RUNTIME, NVTX))
    if count > options.max_events:
        raise beyond_limit(f"more than {options.max_events:,} events", "events", path)
    device = [file.kernels(), *(file.copies(t) for t in COPIES), file.graphs()]
    untimed = {key for key, _ in file.untimed}
    host = file.runtime()
    ranges = file.nvtx()
    device = _owned(file, device, {*np.unique(host[:, 0]).tolist(), *(tid >> 24 for tid, *_ in ranges)})
    keys = sorted({int(k) for t in device for k in np.unique(t[:, 0])} | untimed)
    gpus = file.gpus()
    return [_Builder(file, key).build([*device, host], ranges, gpus) for key in keys], file.notices


def _owned(file: _File, device: list[Int], others: set[int]) -> list[Int]:
    """Device rows with their process. Those that name none are the only process's; of several processes a few are left
    out, with a Notice. Raises InputError where these are more than a few: together they would be one GPU."""
    orphans = sum(int((t[:, 0] <= 0).sum()) for t in device)
    if not orphans:
        return device
    known = {key for key in others | {int(k) for t in device for k in np.unique(t[:, 0])} if key > 0}
    if len(known) <= 1:
        own = next(iter(known), 0)
        return [np.column_stack([np.where(t[:, 0] > 0, t[:, 0], own), t[:, 1:]]) for t in device]
    what = f"{orphans} GPU events name none of the {len(known)} processes in the file"
    if orphans > _STRAY * sum(map(len, device)):
        raise InputError(
            f"{what}: whose they are cannot be told",
            hint="export it again with another version of nsys, or record every process into a file of its own",
            where=file.path,
        )
    file.notices.append(Notice("events-dropped", f"{what}; they are not used", file.path))
    return [t[t[:, 0] > 0] for t in device]


# --- SQL -----------------------------------------------------------------------------------------------------

# Columns of a device or host row: process, category, start, end, name, thread or -1, device, stream, correlation.
_WIDTH = 9


class _File:
    """One open export: what it has, and its rows as integer arrays."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self.sql = connection
        self.path = path
        self.notices: list[Notice] = []
        self.names = Names()
        self.untimed: Counter[tuple[int, str]] = Counter()
        found = self.sql.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {str(name): self._columns(str(name)) for (name,) in found}
        self.texts = {i: text for i, text in self.rows("StringIds", ("id", "value")) if isinstance(text, str)}
        self.event_types = {
            text: i for i, text in self.rows("ENUM_NSYS_EVENT_TYPE", ("id", "name")) if isinstance(i, int)
        }
        export = dict(self.rows("META_DATA_EXPORT", ("name", "value")))
        self.capture = dict(self.rows("META_DATA_CAPTURE", ("name", "value")))
        self.host = next(
            (v for n, v in self.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")) if n == "Hostname" and v),
            f"{PurePosixPath(path).name} (host unknown)",
        )
        self.base_ns = self._base(export)

    def _columns(self, table: str) -> dict[str, str]:
        quoted = table.replace('"', '""')
        return {str(row[1]).lower(): str(row[1]) for row in self.sql.execute(f'PRAGMA table_info("{quoted}")')}

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and all(c.lower() in self.tables[table] for c in columns)

    def count(self, table: str) -> int:
        if table not in self.tables:
            return 0
        with contextlib.suppress(*SQL_ERRORS):
            return int(self.sql.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])
        return 0

    def rows(self, table: str, columns: Sequence[str], where: str = "") -> Iterator[tuple[Any, ...]]:
        """The rows of a table, NULL for columns that it lacks; none without the table. A damaged page ends them."""
        if table not in self.tables:
            return
        there = self.tables[table]
        wanted = ", ".join(f'"{there[c.lower()]}"' if c.lower() in there else "NULL" for c in columns)
        got = 0
        try:
            cursor = self.sql.execute(f'SELECT {wanted} FROM "{table}" {where}')
            while chunk := cursor.fetchmany(_CHUNK):
                got += len(chunk)
                yield from chunk
        except SQL_ERRORS as error:
            message = f"table {table} is damaged ({error}); {got} of its rows are used"
            self.notices.append(Notice("table-damaged", message, self.path))

    def _base(self, export: dict[Any, Any]) -> int:
        """What to add to event times for UTC: they count from the start of the session, unless normalised."""
        if str(export.get("EXPORT_PARAM_TIME_NORMALIZE", "")).lower() == "true":
            return 0
        start = next((v for (v,) in self.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))), None)
        shift = sum(_whole(export.get(k), 0) for k in ("EXPORT_PARAM_TIME_SHIFT", "EXPORT_CONFIG_TIME_SHIFT"))
        base = _whole(start, 0) - shift
        if abs(base) < MAX_NS:
            return base
        message = f"the session starts at {base} ns, which is no time: its clock is not that of other files"
        self.notices.append(Notice("base-time-unusable", message, self.path))
        return 0

    def name(self, *ids: Any) -> int:
        text = next((self.texts[i] for i in ids if i in self.texts), "")
        return self.names.intern(text)

    def kernels(self) -> Int:
        columns = ("globalPid", "start", "end", "deviceId", "streamId", "correlationId", "demangledName", "shortName")
        rows = self.rows(KERNELS, columns)
        return self._device(KERNELS, ((*r[:6], self.name(r[6], r[7]), Cat.KERNEL) for r in rows))

    def copies(self, table: str) -> Int:
        cat, title = COPIES[table]
        name = self.names.intern(title)
        columns = ("globalPid", "start", "end", "deviceId", "streamId", "correlationId")
        return self._device(table, ((*r, name, cat) for r in self.rows(table, columns)))

    def graphs(self) -> Int:
        """CUDA graphs that were traced as a whole stand for the kernels inside them."""
        name = self.names.intern("CUDA graph")
        columns = ("globalPid", "start", "end", "deviceId", "streamId", "correlationId")
        found = self._device(GRAPHS, ((*r, name, Cat.KERNEL) for r in self.rows(GRAPHS, columns)))
        if len(found):
            message = (
                f"{len(found)} CUDA graph launches were traced as a whole: communication inside a graph counts as "
                "busy, and forward and backward inside one are not told apart; record with --cuda-graph-trace=node"
            )
            self.notices.append(Notice("cuda-graphs-whole", message, self.path))
        return found

    def _device(self, table: str, rows: Iterator[tuple[Any, ...]]) -> Int:
        made = (
            (_whole(pid, 0) >> 24, cat, start, end, name, -1, _whole(device), _whole(stream), _whole(corr))
            for pid, start, end, device, stream, corr, name, cat in rows
        )
        return _array(self._timed(table, made))

    def _timed(self, table: str, rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """The rows that have times; the others are counted."""
        for row in rows:
            if _is_time(row[2]) and _is_time(row[3]):
                yield row
            else:
                self.untimed[row[0], table] += 1

    def runtime(self) -> Int:
        rows = self.rows(RUNTIME, ("globalTid", "start", "end", "correlationId", "nameId"))
        made = (
            (_whole(tid, 0) >> 24, Cat.RUNTIME, start, end, self.name(name), _whole(tid, 0) & 0xFFFFFF, -1, -1, c)
            for tid, start, end, corr, name in rows
            if (c := _whole(corr)) >= 0
        )
        found = _array(self._timed(RUNTIME, made))
        self._graph_launches(found)
        return found

    def _graph_launches(self, runtime: Int) -> None:
        """Launches of graphs whose device time is nowhere."""
        calls = ("cudaGraphLaunch", "cuGraphLaunch")
        launches = [i for i, text in enumerate(self.names.texts) if text.startswith(calls)]
        count = int(np.isin(runtime[:, 4], launches).sum())
        if count and not self.count(GRAPHS) and self.capture.get("CUDA_GRAPH_TRACE_OPTIONS:MODE") == "Graph":
            message = f"{count} CUDA graph launches have no device events: their work looks idle here"
            self.notices.append(Notice("cuda-graphs-missing", message, self.path))

    def types(self, known: dict[str, int]) -> tuple[int, ...]:
        return tuple(self.event_types.get(name, number) for name, number in known.items())

    def nvtx(self) -> list[tuple[Any, ...]]:
        """(thread id, start, end, name, domain, blob) of ranges that ended."""
        wanted = ",".join(map(str, self.types(_RANGES)))
        columns = ("globalTid", "start", "end", "text", "textId", "domainId", "binaryData")
        out, open_ranges = [], 0
        for tid, start, end, text, text_id, domain, blob in self.rows(NVTX, columns, f"WHERE eventType IN ({wanted})"):
            if end is None and _is_time(start):
                open_ranges += 1
                continue
            if not _is_time(start) or not _is_time(end):
                self.untimed[_whole(tid, 0) >> 24, NVTX] += 1
                continue
            said = text if isinstance(text, str) and text else self.texts.get(text_id, "")
            out.append((_whole(tid, 0), start, end, said, _whole(domain, 0), blob))
        if open_ranges:
            message = f"{open_ranges} NVTX ranges have no end and are not used"
            self.notices.append(Notice("ranges-open", message, self.path))
        return out

    def domains(self) -> Domains:
        wanted = ",".join(map(str, self.types(_DOMAIN)))
        rows = self.rows(NVTX, ("globalTid", "domainId", "text", "textId"), f"WHERE eventType IN ({wanted})")
        return Domains(
            {
                (_whole(tid, 0) >> 24, _whole(domain, 0)): text if isinstance(text, str) else self.texts.get(i, "")
                for tid, domain, text, i in rows
            }
        )

    def payloads(self) -> Payloads:
        columns = ("domainId", "schemaId", "type", "name", "offset")
        return Payloads.of(self.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", columns))

    def gpus(self) -> dict[tuple[int, int], int]:
        """(pid, a device as the process counts them) -> the machine's GPU."""
        rows = self.rows("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId"))
        return {(_whole(pid), _whole(cuda)): _whole(gpu) for pid, cuda, gpu in rows}


def _is_time(value: Any) -> bool:
    return type(value) is int and -MAX_NS < value < MAX_NS


def _whole(value: Any, otherwise: int = -1) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str) and value.strip().lstrip("-").isdigit() and len(value) < 20:
        return int(value)
    return otherwise


def _array(rows: Iterator[tuple[Any, ...]]) -> Int:
    parts: list[Int] = []
    chunk: list[tuple[Any, ...]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) >= _CHUNK:
            parts.append(np.array(chunk, dtype=np.int64))
            chunk = []
    parts.append(np.array(chunk, dtype=np.int64).reshape(-1, _WIDTH))
    return np.concatenate(parts)


# --- per process ---------------------------------------------------------------------------------------------


class _Builder:
    """Event columns of one process."""

    def __init__(self, file: _File, key: int) -> None:
        self.file = file
        self.key = key
        self.calls: list[Call] = []
        self.joined: list[tuple[str, int, int]] = []
        self.iter_rank = -1

    def build(self, tables: list[Int], ranges: list[tuple[Any, ...]], gpus: dict[tuple[int, int], int]) -> Process:
        rows = np.concatenate([t[t[:, 0] == self.key] for t in tables])
        # Launch order: what a kernel's launch belongs to is looked for in it.
        rows = rows[np.lexsort((rows[:, 2], rows[:, 8]))]
        host = self._ranges(ranges)
        n, m = len(rows), len(host)
        table = np.concatenate([rows[:, 1:], host[:, :8]]) if m else rows[:, 1:]
        extra = np.full((n + m, 2), -1, dtype=np.int64)
        extra[n:] = host[:, 8:]
        good = table[:, 2] >= table[:, 1]
        events = Events(
            cat=table[:, 0].astype(np.int8), start_ns=table[:, 1], end_ns=table[:, 2],
            name=table[:, 3].astype(np.int32), pid=np.full(n + m, self.key & 0xFFFFFF), tid=table[:, 4],
            device=table[:, 5], stream=table[:, 6], corr=table[:, 7], sequence=extra[:, 0],
            comm=extra[:, 1].astype(np.int32),
        ).take(good)  # fmt: skip
        scan = Scan(
            self.file.path, events, self.file.names, [CommArgs(c.what) for c in self.calls], base_ns=self.file.base_ns
        )
        scan.head = {"host_name": self.file.host}
        scan.lost = int((~good & np.isin(table[:, 0], DEVICE)).sum())
        scan.lost += sum(self.file.untimed[self.key, t] for t in (KERNELS, *COPIES, GRAPHS))
        scan.dropped["negative duration"] = int((~good).sum())
        for t in (KERNELS, *COPIES, GRAPHS, RUNTIME, NVTX):
            scan.dropped[f"no usable time in table {t}"] = self.file.untimed[self.key, t]
        scan.dropped = +scan.dropped
        for why, number in scan.dropped.items():
            scan.notices.append(Notice("events-dropped", f"{number} events dropped: {why}", self.file.path))
        return Process(self.key, self._gpu(events, gpus), scan, self.calls, self.iter_rank, self.joined)

    def _gpu(self, events: Events, gpus: dict[tuple[int, int], int]) -> int:
        """The GPU on which most of the kernels' time was spent; without kernels the lowest that the process sees."""
        pid = self.key & 0xFFFFFF
        devices = events.time_by_device((events.cat == Cat.KERNEL) & (events.device >= 0))
        if not devices:
            return min((gpu for (owner, _), gpu in gpus.items() if owner == pid), default=-1)
        own, _ = devices[0]
        return gpus.get((pid, own), own)

    def _ranges(self, ranges: list[tuple[Any, ...]]) -> Int:
        """Rows (category, start, end, name, thread, -1, -1, -1, sequence, comm) of this process's NVTX ranges."""
        domains, payloads = self.file.domains(), self.file.payloads()
        out: list[tuple[int, ...]] = []
        for tid, start, end, text, domain, blob in ranges:
            if tid >> 24 != self.key:
                continue
            thread = tid & 0xFFFFFF
            call = call_of(text, domains.is_nccl(self.key, domain), payloads.read(domain, blob))
            if call is not None:
                self._note(call)
                if call.what:
                    self.calls.append(call)
                    name = self.file.names.intern(f"nccl:{call.what}")
                    out.append((Cat.RANGE, start, end, name, thread, -1, -1, -1, -1, len(self.calls) - 1))
                continue
            plain, sequence, operator = split_operator(text)
            cat = Cat.CPU_OP if operator else Cat.RANGE
            out.append((cat, start, end, self.file.names.intern(plain), thread, -1, -1, -1, sequence, -1))
            if plain.startswith("iter_"):
                self._note_rank(plain)
        return np.array(out, dtype=np.int64).reshape(-1, 10)

    def _note(self, call: Call) -> None:
        if call.size > 0 and call.rank >= 0:
            self.joined.append((call.communicator, call.size, call.rank))

    def _note_rank(self, text: str) -> None:
        parts = text.split("_")
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() and len(parts[1]) < 8:
            self.iter_rank = int(parts[1])
