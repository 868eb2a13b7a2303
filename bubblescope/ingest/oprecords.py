"""Records of operations without kernels (MegatronApp, ndtimeline) -> Run.

Where a trace marks forwards and backwards only, the messages between them are derived from what each operation needs:
a send where its producer ended, a receive that waits from the end of the operation before until the consumer begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bubblescope.algebra.stats import usual
from bubblescope.errors import InputError
from bubblescope.ingest.part import missing
from bubblescope.model import Clock, Kind, Lane, Layout, Links, Names, Notice, Run, Source, SpanBuilder

_INPUT = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class Record:
    """One marked interval; -1 where the trace does not say. Times in ns. stage: global (virtual) stage."""

    rank: int
    step: int
    lane: Lane
    kind: Kind
    start_ns: int
    end_ns: int
    name: str = ""
    stage: int = -1
    chunk: int = -1
    microbatch: int = -1
    peer: int = -1
    group: str = ""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: position in the pipeline, number of its replica, name of its host's clock."""

    pp: int
    replica: int = 0
    tp: int = 0
    host: str = ""


@dataclass(eq=False)
class Job:
    """What a reader found. steps: (rank, step) -> its limits; those of `cut_steps` are not whole, and why.
    collectives: (instance number, place in `records`)."""

    format: str
    files: tuple[str, ...]
    records: list[Record]
    places: Mapping[int, Place]
    steps: Mapping[tuple[int, int], tuple[int, int]]
    framework: str
    collectives: Sequence[tuple[int, int]] = ()
    notices: list[Notice] = field(default_factory=list)
    inferred: Mapping[str, str] = field(default_factory=dict)
    cut_steps: Mapping[int, str] = field(default_factory=dict)


def build(job: Job) -> Run:
    """The Run, messages derived where the records have none. Raises InputError without any operation."""
    work = [r for r in job.records if r.kind in _INPUT]
    if not work:
        raise InputError(
            "no forward and no backward is marked in the records",
            hint="record the pipeline schedule's operations",
            where=", ".join(job.files[:3]),
        )
    names, rows = Names(), SpanBuilder()
    for record in job.records:
        _add(rows, names, record)
    for (rank, step), (start, end) in sorted(job.steps.items()):
        mark = Record(rank, step, Lane.RANGE, Kind.STEP, start, end, f"step {step}")
        _add(rows, names, mark)
    notices = list(job.notices)
    links = Links(collective=np.array(list(job.collectives), dtype=np.int64).reshape(-1, 2))
    messages = [r for r in job.records if r.kind in (Kind.SEND, Kind.RECV) and r.peer >= 0]
    if not messages and all(r.stage >= 0 for r in work):
        links, count = _derived(job, rows, names, links)
        notices.extend(_derived_notice(count))
    layout = _layout(job, work, names)
    notices.extend(missing(layout))
    return Run(
        spans=rows.build(),
        names=names,
        layout=layout,
        links=links,
        clock=Clock(),
        notices=tuple(notices),
        source=Source(job.format, job.files, "events", {"cut_steps": dict(job.cut_steps)}),
    )


def _add(rows: SpanBuilder, names: Names, record: Record) -> int:
    on_device = record.lane in (Lane.COMPUTE, Lane.COMM, Lane.WAIT, Lane.POST, Lane.COPY)
    rows.add(
        rank=record.rank, step=record.step, lane=record.lane, kind=record.kind, device=0 if on_device else -1,
        stream=int(record.lane == Lane.COMM), stage=record.stage, chunk=record.chunk, microbatch=record.microbatch,
        start_ns=record.start_ns, end_ns=max(record.end_ns, record.start_ns), name=names.intern(record.name),
        peer=record.peer, group=names.intern(record.group),
    )  # fmt: skip
    return len(rows) - 1


def _derived(job: Job, rows: SpanBuilder, names: Names, links: Links) -> tuple[Links, int]:
    """Posts, waits and their links for every operation whose input comes from another rank.

    Example: rank 1 ends F0 at 10 and F1 begins at 14, while rank 0 ended F1 at 13: a send of rank 0 at 13, and a
    receive of rank 1 that waits [10, 14).
    """
    made, before = _produced(job), _free_since(job)
    last = max(r.stage for r in job.records if r.kind in _INPUT)
    pairs, waits = [], []
    for record in job.records:
        forward = record.kind == Kind.FORWARD
        source = record.stage + (-1 if forward else 1)
        if record.kind not in _INPUT or not 0 <= source <= last or record.step < 0:
            continue
        replica = job.places[record.rank].replica
        producer = made.get((replica, record.step, forward, source, record.microbatch))
        if producer is None or producer.rank == record.rank:
            continue
        name = "activation (derived)" if forward else "gradient (derived)"
        sent = Record(producer.rank, record.step, Lane.POST, Kind.SEND, producer.end_ns, producer.end_ns, name,
                      producer.stage, producer.chunk, record.microbatch, record.rank)  # fmt: skip
        since = before[id(record)]
        posted = Record(record.rank, record.step, Lane.POST, Kind.RECV, since, since, name,
                        record.stage, record.chunk, record.microbatch, producer.rank)  # fmt: skip
        waited = Record(record.rank, record.step, Lane.WAIT, Kind.RECV, since, record.start_ns, name,
                        record.stage, record.chunk, record.microbatch, producer.rank)  # fmt: skip
        pairs.append((_add(rows, names, sent), _add(rows, names, posted)))
        waits.append((-1, _add(rows, names, waited)))
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    beside = np.array(waits, dtype=np.int64).reshape(-1, 2)
    return Links(p2p=table, p2p_wait=beside, collective=links.collective), len(pairs)


def _produced(job: Job) -> dict[tuple[int, int, bool, int, int], Record]:
    """(replica, step, forward, stage, micro-batch) -> the operation that makes this output."""
    return {
        (job.places[r.rank].replica, r.step, r.kind == Kind.FORWARD, r.stage, r.microbatch): r
        for r in job.records
        if r.kind in _INPUT
    }


def _free_since(job: Job) -> dict[int, int]:
    """id of each operation -> when its rank had nothing else to do before it."""
    out: dict[int, int] = {}
    reach: dict[tuple[int, int], int] = {}
    work = (r for r in job.records if r.lane == Lane.COMPUTE and r.step >= 0)
    for record in sorted(work, key=lambda r: (r.rank, r.start_ns, r.end_ns)):
        key = (record.rank, record.step)
        free = reach.get(key, job.steps[key][0])
        out[id(record)] = min(free, record.start_ns)
        reach[key] = max(free, record.end_ns)
    return out


def _derived_notice(count: int) -> list[Notice]:
    if not count:
        return []
    message = (
        f"the records have no messages; {count} were derived from what each operation needs. Transfer cannot be told "
        "from a late launch of the operation that waited, and is booked together as p2p_transfer"
    )
    return [Notice("messages-derived", message)]


def _layout(job: Job, work: list[Record], names: Names) -> Layout:
    ranks = sorted(job.places)
    places = [job.places[r] for r in ranks]
    held = {(job.places[r.rank].replica, r.stage): r.rank for r in work if r.stage >= 0}
    per_rank = Counter(rank for rank, _ in {(r.rank, r.stage) for r in work if r.stage >= 0})
    numbered = {(r.rank, r.step, r.microbatch) for r in work if r.microbatch >= 0}
    per_step = Counter((rank, step) for rank, step, _ in numbered)
    stages = max(p.pp for p in places) + 1
    return Layout(
        ranks=np.array(ranks, dtype=np.int64),
        pp=np.array([p.pp for p in places], dtype=np.int64),
        replica=np.array([p.replica for p in places], dtype=np.int64),
        tp=np.array([p.tp for p in places], dtype=np.int64),
        host=np.array([names.intern(p.host or f"rank {r} (host unknown)") for r, p in zip(ranks, places, strict=True)]),
        stages=stages if held else None,
        chunks=max(per_rank.values()) if per_rank else None,
        microbatches=usual(np.array(list(per_step.values()))) if per_step else None,
        data_parallel=max(p.replica for p in places) + 1,
        framework=job.framework,
        device_type="cuda",
        stage_rank=held,
        inferred=dict(job.inferred),
    )
