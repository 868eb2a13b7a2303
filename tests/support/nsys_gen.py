"""Nsight Systems exports of the job that `kineto_gen` describes: the same truth in nsys' own tables."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

# Tables with the columns and types of nsys' own exports (schema 3.25); columns that nobody reads are left out.
DDL = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "ENUM_NSYS_EVENT_TYPE": "id INTEGER, name TEXT, label TEXT",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, "
    "category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, "
    "domainId INTEGER, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
    "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "graphId INTEGER, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, idx INTEGER NOT NULL, "
    "flags INTEGER, type INTEGER, name TEXT, description TEXT, arrayOrUnionDetail INTEGER, offset INTEGER",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, "
    "nameEnum INTEGER NOT NULL, value TEXT NOT NULL",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INTEGER, cudaId INTEGER, pid INTEGER, uuid TEXT",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "META_DATA_CAPTURE": "name TEXT NOT NULL, value TEXT",
}
SID = 16777216
_SEND = ((18, "NCCL communicator ID", None), (22, "Message size [bytes]", 8), (5, "Peer rank", 16))
_INIT = ((18, "NCCL communicator ID", None), (5, "No. of ranks", 8), (5, "Rank", 12), (5, "CUDA device", 16))
SCHEMAS = {SID + 9: _SEND, SID + 10: _SEND, SID + 11: _INIT}
COMMUNICATOR = 0xC0FFEE123456789A


@dataclass(frozen=True)
class Export:
    """How the file looks. blobs: NCCL payloads are there. init: the communicator was seen being made. start_end:
    ranges as start/end instead of push/pop. epoch_ns: UTC at the start of the session. host: ''=no host."""

    blobs: bool = True
    init: bool = True
    start_end: bool = False
    normalized: bool = False
    epoch_ns: int = 1_779_787_126_655_288_414
    host: str = "node0"
    graph_mode: bool = False
    lacking: tuple[str, ...] = ()
    old_schema: bool = False


def write(path: Path, documents: dict[int, Json], export: Export = Export()) -> Path:
    """One export that holds the processes of `documents` (rank -> Kineto document of `kineto_gen`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    _Writer(connection, documents, export).write()
    connection.commit()
    connection.close()
    return path


class _Writer:
    def __init__(self, connection: sqlite3.Connection, documents: dict[int, Json], export: Export) -> None:
        self.sql = connection
        self.documents = documents
        self.export = export
        self.strings: dict[str, int] = {}
        for table, columns in DDL.items():
            if table in export.lacking:
                continue
            if export.old_schema and table == "NVTX_EVENTS":
                columns = columns.replace(", jsonTextId INTEGER, jsonText TEXT, binaryData TEXT", "")
            self.sql.execute(f"CREATE TABLE {table} ({columns})")

    def write(self) -> None:
        for rank, document in self.documents.items():
            self._process(rank, document)
        self._meta()
        self._insert("StringIds", [{"id": i, "value": text} for text, i in self.strings.items()])

    def _insert(self, table: str, rows: Iterable[Json]) -> None:
        if table in self.export.lacking:
            return
        there = [row[1] for row in self.sql.execute(f"PRAGMA table_info({table})")]
        for row in rows:
            names = [c for c in there if c in row]
            marks = ", ".join("?" for _ in names)
            self.sql.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", [row[n] for n in names])

    def _string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def _process(self, rank: int, document: Json) -> None:
        pid = 4000 + rank
        base = document.get("baseTimeNanoseconds", 0)
        process = (1 << 48) | (pid << 24)
        runtime = {e["args"]["correlation"]: e for e in document["traceEvents"] if e.get("cat") == "cuda_runtime"}
        self._insert("TARGET_INFO_CUDA_DEVICE", [{"gpuId": rank, "cudaId": 0, "pid": pid, "uuid": f"GPU-{rank}"}])
        if self.export.init:
            payload = struct.pack("<Qiiii", COMMUNICATOR, len(self.documents), rank, 0, 0)
            self._nvtx("ncclCommInitRankConfig", 10, 20, process, 1, payload, SID + 11)
        for event in document["traceEvents"]:
            if event["ph"] != "X":
                continue
            start = round(event["ts"] * 1000) + base
            end = start + round(event["dur"] * 1000)
            if event["cat"] == "kernel":
                self._kernel(event, start, end, process)
                launch = runtime.get(event["args"]["correlation"])
                if "Collective name" in event["args"] and launch:
                    self._nccl(event["args"], round(launch["ts"] * 1000) + base, process, launch["tid"])
            elif event["cat"] == "cuda_runtime":
                self._runtime(event, start, end, process)
            else:
                self._nvtx(event["name"], start, end, process, event["tid"])

    def _kernel(self, event: Json, start: int, end: int, process: int) -> None:
        name = event["name"]
        self._insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            [{
                "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": event["args"]["stream"],
                "correlationId": event["args"]["correlation"], "globalPid": process,
                "demangledName": self._string(name), "shortName": self._string(name.partition("(")[0]),
            }],
        )  # fmt: skip

    def _runtime(self, event: Json, start: int, end: int, process: int) -> None:
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            [{
                "start": start, "end": end, "eventClass": 0, "globalTid": process | event["tid"],
                "correlationId": event["args"]["correlation"], "nameId": self._string(event["name"] + "_v7000"),
                "returnValue": 0,
            }],
        )  # fmt: skip

    def _nccl(self, args: Json, launch: int, process: int, tid: int) -> None:
        """As NCCL and torch do: the call inside a group, the launch when the group ends."""
        sends = args["Collective name"] == "send"
        members = [int(m) for m in args["Process Group Ranks"].strip("[]").split(",")]
        peer = members.index(args["Dst Rank" if sends else "Src Rank"])
        payload = struct.pack("<QQi", COMMUNICATOR, args["In msg nelems"] * 2, peer)
        self._nvtx("ncclGroupStart", launch - 100, launch - 95, process, tid)
        schema = SID + (9 if sends else 10)
        self._nvtx("ncclSend" if sends else "ncclRecv", launch - 90, launch - 40, process, tid, payload, schema)
        self._nvtx("ncclGroupEnd", launch - 30, launch + 60, process, tid)

    def _nvtx(
        self, text: str, start: int, end: int, process: int, tid: int, payload: bytes = b"", schema: int = 0
    ) -> None:
        nccl = text.startswith("nccl")
        row: Json = {
            "start": start, "end": end, "eventType": 60 if self.export.start_end else 59,
            "globalTid": process | tid, "domainId": 1 if nccl else 0,
        }  # fmt: skip
        # Registered strings are ids, others are written out.
        if nccl:
            row["textId"] = self._string(text)
        else:
            row["text"] = text
        if payload and self.export.blobs:
            row["binaryData"] = struct.pack("<4Q", 1, schema, len(payload), 32) + payload
        self._insert("NVTX_EVENTS", [row])

    def _meta(self) -> None:
        e = self.export
        self._insert("ENUM_NSYS_EVENT_TYPE", [
            {"id": 59, "name": "NvtxPushPopRange"}, {"id": 60, "name": "NvtxStartEndRange"},
            {"id": 75, "name": "NvtxDomainCreate"},
        ])  # fmt: skip
        for schema, entries in SCHEMAS.items():
            for i, (kind, name, offset) in enumerate(entries):
                row = {"domainId": 1, "schemaId": schema, "idx": i, "type": kind, "name": name, "offset": offset}
                self._insert("NVTX_PAYLOAD_SCHEMA_ENTRIES", [row])
        self._insert("TARGET_INFO_SESSION_START_TIME", [{"utcEpochNs": e.epoch_ns}])
        if e.host:
            row = {"devStateName": "", "name": "Hostname", "nameEnum": 0, "value": e.host}
            self._insert("TARGET_INFO_SYSTEM_ENV", [row])
        export = {
            "EXPORT_SCHEMA_VERSION": "3.25.0", "EXPORT_PARAM_TIME_SHIFT": "0",
            "EXPORT_PARAM_TIME_NORMALIZE": "true" if e.normalized else "false",
        }  # fmt: skip
        self._insert("META_DATA_EXPORT", [{"name": k, "value": v} for k, v in export.items()])
        if e.graph_mode:
            self._insert("META_DATA_CAPTURE", [{"name": "CUDA_GRAPH_TRACE_OPTIONS:MODE", "value": "Graph"}])
