"""Traces of "Understanding Stragglers in Large Model Training" (OSDI'25; ByteDance-Seed/StragglerAnalysis).

One Parquet file per job: a row per operation of each recorded rank and sampled step, in seconds from the step's
start, with clocks already aligned. A recorded rank stands for its whole tensor-parallel group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.errors import InputError
from bubblescope.model import Clock, Kind, Lane, Layout, Links, Names, Notice, Run, Source, Spans

Int = NDArray[np.int64]
INTEGERS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id", "gmc")
COLUMNS = (*INTEGERS, "start_ts", "duration", "optype")
_FOOTER_LIMIT = 1 << 24

FORWARD, BACKWARD = "forward-compute", "backward-compute"
P2P = {
    "forward-send": (Kind.SEND, FORWARD, 1),
    "forward-recv": (Kind.RECV, FORWARD, -1),
    "backward-send": (Kind.SEND, BACKWARD, -1),
    "backward-recv": (Kind.RECV, BACKWARD, 1),
}
"""Operation → (kind, the compute it serves, where the peer's virtual stage lies)."""
DATA_PARALLEL = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
EMBEDDING, LAYERNORM, CLIP = "embedding-grads-all-reduce", "layernorm-grads-all-reduce", "optimizer-clip-main-grad"
KINDS: dict[str, tuple[Kind, Lane]] = {
    FORWARD: (Kind.FORWARD, Lane.COMPUTE),
    BACKWARD: (Kind.BACKWARD, Lane.COMPUTE),
    "optimizer": (Kind.OPTIMIZER, Lane.COMPUTE),
    "gc": (Kind.HOST, Lane.HOST),
    **{name: (kind, Lane.COMM) for name, (kind, _, _) in P2P.items()},
    **dict.fromkeys((*DATA_PARALLEL, EMBEDDING, LAYERNORM, CLIP), (Kind.COLLECTIVE, Lane.COMM)),
}


def can_read(path: Path) -> bool:
    """Whether `path` is such a Parquet file, or a folder that holds one. Needs no pyarrow: column names stand
    as plain text in a Parquet footer."""
    if path.is_dir():
        return any(can_read(inner) for inner in sorted(path.glob("*.parquet")))
    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        footer = _footer(path)
    except OSError:
        return False
    return all(name.encode() in footer for name in ("dp_rank", "optype", "start_ts", "duration", "seq_id", "gmc"))


def _footer(path: Path) -> bytes:
    """The metadata at the end of a Parquet file; empty when it is none."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > min(size - 8, _FOOTER_LIMIT):
            return b""
        file.seek(size - 8 - length)
        return file.read(length)


def read(paths: str | Path | Sequence[str | Path]) -> Run:
    """One trace as a `Run`: F and B as COMPUTE, P2P and collectives as COMM kernels with their links, one RANGE
    per rank and step. Steps, each recorded from 0, are laid one after the other.

    Raises InputError when pyarrow is missing, when there is not exactly one trace, or when the file is damaged.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(p) for p in paths]
    files = [f for p in given for f in (filter(can_read, sorted(p.glob("*.parquet"))) if p.is_dir() else [p])]
    if len(files) != 1:
        raise InputError(
            f"{len(files)} straggler traces were given; each is a job of its own",
            hint="name one trace-*.parquet file",
            where=str(given[0]) if given else "",
        )
    table = _load(files[0])
    meta = _meta(files[0])
    return _build(table, meta, files[0])


@dataclass(frozen=True, eq=False)
class Table:
    """The file's rows: integer columns by name, times in ns from the step's start, and the operation's code."""

    columns: Mapping[str, Int]
    start_ns: Int
    duration_ns: Int
    code: Int
    optypes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.code)

    def __getitem__(self, name: str) -> Int:
        return self.columns[name]

    def is_op(self, *names: str) -> NDArray[np.bool_]:
        return np.isin(self.code, [i for i, text in enumerate(self.optypes) if text in names])


def _load(path: Path) -> Table:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InputError(
            "reading a straggler trace needs pyarrow", hint="pip install 'bubblescope[parquet]'", where=str(path)
        ) from error
    try:
        found = parquet.read_table(str(path))
    except (OSError, ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the Parquet file cannot be read: {reason}", where=str(path)) from error
    missing = [c for c in COLUMNS if c not in found.column_names]
    if missing:
        raise InputError(f"the trace lacks the columns {', '.join(missing)}", where=str(path))
    return _table(found, path)


def _table(found: Any, path: Path) -> Table:
    integers = {c: np.asarray(found.column(c).to_numpy(), dtype=np.int64) for c in INTEGERS}
    times = {c: np.asarray(found.column(c).to_numpy(), dtype=np.float64) for c in ("start_ts", "duration")}
    bad = ~(np.isfinite(times["start_ts"]) & np.isfinite(times["duration"]) & (times["duration"] >= 0))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise InputError(
            f"{int(bad.sum())} operations have no time or a negative one, the first in row {row}", where=str(path)
        )
    if not len(bad):
        raise InputError("the trace has no rows", where=str(path))
    optypes, code = np.unique(
        found.column("optype").cast("string").to_numpy(zero_copy_only=False), return_inverse=True
    )
    ns = {c: np.rint(t * 1e9).astype(np.int64) for c, t in times.items()}
    return Table(integers, ns["start_ts"], ns["duration"], code.astype(np.int64), tuple(map(str, optypes)))


def _meta(path: Path) -> dict[str, str]:
    """The flat ``key: value`` lines of meta-NAME.yaml beside trace-NAME.parquet; empty when there is none."""
    beside = path.with_name(path.name.replace("trace-", "meta-", 1)).with_suffix(".yaml")
    if beside.name == path.name or not beside.is_file():
        return {}
    lines = beside.read_text(encoding="utf-8", errors="replace").splitlines()
    return {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value.strip()
    }


def _build(table: Table, meta: Mapping[str, str], path: Path) -> Run:
    names = Names()
    step_start, step_end = _step_edges(table)
    serves = _served_compute(table, path)
    spans = _spans(table, serves, step_start, names)
    markers = _markers(table, step_start, step_end, names)
    p2p, unmatched = _messages(table, serves)
    links = Links(p2p=p2p, p2p_wait=np.full_like(p2p, -1), collective=_collectives(table))
    return Run(
        spans=Spans.concat([spans, markers]),
        names=names,
        layout=_layout(table),
        links=links,
        clock=Clock(aligned=True, how="the trace's own clocks are aligned"),
        notices=tuple(_notices(table, meta, unmatched, str(path))),
        source=Source("straggler", (str(path),), "kernels", {"meta": dict(meta)}),
    )


def _step_edges(table: Table) -> tuple[Int, Int]:
    """By row: where its step starts and ends on the common time line, first step at 0."""
    steps, place = np.unique(table["step"], return_inverse=True)
    low = np.full(len(steps), np.iinfo(np.int64).max)
    high = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(low, place, table.start_ns)
    np.maximum.at(high, place, table.start_ns + table.duration_ns)
    ends = np.cumsum(high - low)
    starts = ends - (high - low)
    # A row's own time is counted from its step's earliest operation.
    return (starts - low)[place], ends[place]


def _served_compute(table: Table, path: Path) -> Int:
    """By row: the row of the compute operation that a send or receive serves; -1 elsewhere.

    The k-th send (receive) of a rank and step serves its k-th forward or backward. Where an interleaved schedule
    recorded one receive less than computes, it is the first, which has no sender.
    """
    serves = np.full(len(table), -1, dtype=np.int64)
    order = np.lexsort((table["seq_id"], table.code, table["rank"], table["step"]))
    key = np.stack((table["step"], table["rank"], table.code), axis=1)[order]
    first = np.flatnonzero(np.append(True, np.any(key[1:] != key[:-1], axis=1)))
    count = np.diff(np.append(first, len(order)))
    groups = {tuple(k): (int(f), int(c)) for k, f, c in zip(key[first].tolist(), first, count, strict=True)}
    codes = {text: i for i, text in enumerate(table.optypes)}
    for (step, rank, code), (begin, ops) in groups.items():
        served = P2P.get(table.optypes[code])
        if served is None:
            continue
        at, computes = groups.get((step, rank, codes.get(served[1], -1)), (0, 0))
        skipped = int(ops == computes - 1 and served[0] == Kind.RECV)
        if ops + skipped > computes:
            raise InputError(
                f"rank {rank} has {ops} {table.optypes[code]} but {computes} {served[1]} in step {step}",
                hint="each send and receive must belong to one forward or backward",
                where=str(path),
            )
        serves[order[begin : begin + ops]] = order[at + skipped : at + skipped + ops]
    return serves


def _peer_stage(table: Table, serves: Int) -> Int:
    """By row: the virtual stage at the other end of a message, -1 where there is none (an op that was not launched)."""
    shift = np.zeros(len(table), dtype=np.int64)
    for i, text in enumerate(table.optypes):
        shift[table.code == i] = P2P[text][2] if text in P2P else 0
    peer = table["gmc"][serves] + shift
    last = table["gmc"].max()
    return np.where((serves >= 0) & (peer >= 0) & (peer <= last), peer, -1)


def _spans(table: Table, serves: Int, step_start: Int, names: Names) -> Spans:
    kinds = [KINDS.get(text, (Kind.OTHER, Lane.RANGE)) for text in table.optypes]
    lane = np.array([int(lane) for _, lane in kinds])[table.code]
    own = np.where(serves >= 0, serves, np.arange(len(table)))
    peer_stage = _peer_stage(table, serves)
    idle_op = (serves >= 0) & (peer_stage < 0)
    lane = np.where(idle_op, int(Lane.RANGE), lane)
    start = table.start_ns + step_start
    compute = np.isin(lane, [int(Lane.COMPUTE), int(Lane.COMM)])
    stages = table["stage"].max() + 1
    peer = _rank_table(table)[table["dp_rank"], np.maximum(peer_stage, 0) % stages]
    return Spans.from_columns(
        len(table),
        rank=table["rank"],
        step=table["step"],
        lane=lane,
        kind=np.array([int(kind) for kind, _ in kinds])[table.code],
        device=np.where(compute, 0, -1),
        stream=np.where(lane == int(Lane.COMM), 1, 0),
        stage=np.where(table["gmc"][own] >= 0, table["gmc"][own], table["stage"]),
        chunk=np.where(table["mc"][own] >= 0, table["mc"][own], 0),
        microbatch=np.where(serves >= 0, table["mb_id"][own], np.where(lane == 0, table["mb_id"], -1)),
        start_ns=start,
        end_ns=start + table.duration_ns,
        name=np.array([names.intern(text) for text in table.optypes])[table.code],
        peer=np.where(peer_stage >= 0, peer, -1),
        group=_groups(table, names),
        seq=table["seq_id"],
    )


def _rank_table(table: Table) -> Int:
    """[replica, pipeline position] → rank, -1 where none was recorded."""
    ranks = np.full((int(table["dp_rank"].max()) + 1, int(table["stage"].max()) + 1), -1, dtype=np.int64)
    ranks[table["dp_rank"], table["stage"]] = table["rank"]
    return ranks


def _groups(table: Table, names: Names) -> Int:
    """By row: the name of its communicator."""
    group = np.zeros(len(table), dtype=np.int64)
    for stage in np.unique(table["stage"]):
        at = table["stage"] == stage
        group[at & table.is_op(*DATA_PARALLEL)] = names.intern(f"data-parallel, stage {stage}")
    for replica in np.unique(table["dp_rank"]):
        at = table["dp_rank"] == replica
        group[at & table.is_op(*P2P)] = names.intern(f"pipeline {replica}")
        group[at & table.is_op(EMBEDDING)] = names.intern(f"embedding, pipeline {replica}")
    group[table.is_op(LAYERNORM)] = names.intern("tensor-parallel")
    group[table.is_op(CLIP)] = names.intern("world")
    return group


def _markers(table: Table, step_start: Int, step_end: Int, names: Names) -> Spans:
    """One RANGE per rank and step, from the step's start to its end."""
    key = np.stack((table["rank"], table["step"]), axis=1)
    found, first = np.unique(key, axis=0, return_index=True)
    low = np.full(len(table), np.iinfo(np.int64).max)
    _, place = np.unique(table["step"], return_inverse=True)
    np.minimum.at(low, place, table.start_ns + step_start)
    return Spans.from_columns(
        len(found),
        rank=found[:, 0],
        step=found[:, 1],
        lane=int(Lane.RANGE),
        kind=int(Kind.STEP),
        start_ns=low[place[first]],
        end_ns=step_end[first],
        name=np.array([names.intern(f"step {step}") for step in found[:, 1]], dtype=np.int64),
    )


def _messages(table: Table, serves: Int) -> tuple[Int, int]:
    """(send row, receive row) of every message, and how many launched sends or receives found no other end."""
    peer = _peer_stage(table, serves)
    launched = np.flatnonzero(peer >= 0)
    own = serves[launched]
    sends = table.is_op("forward-send", "backward-send")[launched]
    forward = table.is_op("forward-send", "forward-recv")[launched]
    receiver = np.where(sends, peer[launched], table["gmc"][own])
    key = np.stack(
        (table["step"][launched], table["dp_rank"][launched], forward, receiver, table["mb_id"][own], ~sends),
        axis=1,
    ).astype(np.int64)
    order = np.lexsort(key.T[::-1])
    key = key[order]
    pair = np.flatnonzero(np.all(key[1:, :5] == key[:-1, :5], axis=1) & (key[:-1, 5] == 0) & (key[1:, 5] == 1))
    rows = launched[order]
    return np.stack((rows[pair], rows[pair + 1]), axis=1), len(launched) - 2 * len(pair)


def _collectives(table: Table) -> Int:
    """(instance, row) of every collective operation with members on more than one recorded rank."""
    none = np.full(len(table), -1, dtype=np.int64)
    member = table.is_op(*DATA_PARALLEL, EMBEDDING, CLIP)
    stage = np.where(table.is_op(*DATA_PARALLEL), table["stage"], none)
    replica = np.where(table.is_op(EMBEDDING), table["dp_rank"], none)
    rows = np.flatnonzero(member)
    key = np.stack((table["step"], table.code, stage, replica, table["seq_id"]), axis=1)[rows]
    instance = np.unique(key, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(instance, kind="stable")
    return np.stack((instance[order], rows[order]), axis=1).astype(np.int64)


def _layout(table: Table) -> Layout:
    ranks, first = np.unique(table["rank"], return_index=True)
    stage, replica = table["stage"][first], table["dp_rank"][first]
    pipeline = table.is_op(FORWARD, BACKWARD)
    positions = int(table["stage"].max()) + 1
    where = {
        (int(r), int(g)): int(rank)
        for rank, r, g in np.unique(
            np.stack((table["rank"], table["dp_rank"], table["gmc"]), axis=1)[pipeline], axis=0
        ).tolist()
    }
    columns = {"stages": "stage", "chunks": "mc", "microbatches": "mb_id", "data_parallel": "dp_rank"}
    return Layout(
        ranks=ranks,
        pp=stage,
        replica=replica,
        tp=np.zeros_like(ranks),
        host=np.zeros_like(ranks),
        world_size=len(ranks) if ranks[-1] == len(ranks) - 1 else None,
        stages=positions,
        chunks=int(table["mc"].max()) + 1,
        microbatches=int(table["mb_id"][pipeline].max(initial=-1)) + 1,
        data_parallel=int(table["dp_rank"].max()) + 1,
        device_type="cuda",
        stage_rank=where,
        inferred={field: f"the trace's column {column}" for field, column in columns.items()},
    )


def _notices(table: Table, meta: Mapping[str, str], unmatched: int, where: str) -> list[Notice]:
    found = [
        Notice(
            "steps-joined",
            f"{len(np.unique(table['step']))} sampled steps, each recorded from its own start, "
            "are shown one after the other",
            where,
        )
    ]
    ranks, world = len(np.unique(table["rank"])), meta.get("world_size", "")
    if world.isdigit() and int(world) > ranks:
        text = f"{ranks} recorded ranks stand for a job of {world} GPUs"
        found.append(Notice("ranks-represent-groups", text, where))
    unknown = [text for text in table.optypes if text not in KINDS]
    if unknown:
        rows = int(table.is_op(*unknown).sum())
        text = f"{rows} operations of unknown types are not counted: {', '.join(unknown)}"
        found.append(Notice("unknown-optype", text, where))
    if unmatched:
        found.append(
            Notice("p2p-unmatched", f"{unmatched} sends or receives have no other end in the trace", where)
        )
    return found
