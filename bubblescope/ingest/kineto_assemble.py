"""Event columns of one Kineto file -> that rank's spans. Facts only: what a kernel is for is said in `label`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.errors import InputError
from bubblescope.ingest import steps as step_finder
from bubblescope.ingest.arrows import numbered
from bubblescope.ingest.commnames import Comm, CommNames
from bubblescope.ingest.events import AUTOGRAD, DEVICE, Cat, CommArgs, Events, Int, Scan
from bubblescope.ingest.identity import Identity, identify, ranks_in_one_group
from bubblescope.ingest.options import DEFAULT, NameRule, ReadOptions
from bubblescope.ingest.part import Part
from bubblescope.ingest.quarantine import quarantine, repeated
from bubblescope.ingest.steps import Steps
from bubblescope.ingest.usernames import USER_STEPS
from bubblescope.model import Kind, Lane, Names, Notice, Spans, checks
from bubblescope.model.notice import some
from bubblescope.model.spans import joined

Mask = NDArray[np.bool_]
_LOST = 0.02
_STRAY = 0.05
_ACCELERATOR_PROCESSES = ("ascend hardware",)
_OPERATIONS = ("nccl:", "c10d::", "record_param_comms")
"""How the names of host operations of communication begin."""
_COLLECTIVES = ("all_to_all", "alltoall", "all_reduce", "allreduce", "gather", "scatter", "broadcast", "barrier")


def assemble(scan: Scan, options: ReadOptions = DEFAULT) -> Part:
    """Spans, launches and identity of one scanned file. Raises InputError when it cannot be one rank's trace.

    Gives the events up on the way, so that memory does not hold a large file twice: `scan.events` is empty then.
    """
    who, count = identify(scan), len(scan.events)
    _refuse_two_ranks(scan)
    _refuse_unusable_times(scan)
    events, said = _sound(scan)
    if who.doubt:
        said.append(Notice("rank-not-believed", who.doubt, scan.path))
    _refuse_nameless(scan, events)
    names = Names()
    steps_named = tuple(r for r in options.range_rules() if r.kind is None)
    table = _Table(scan, events, CommNames.of(options), who, names, steps_named)
    pieces, timing, notices = _pieces(table)
    marked = _profiler_steps(table)
    del table, events
    scan.events = scan.events.take(np.empty(0, dtype=np.int64))
    spans = Spans.moved(pieces)
    launch = _launch_links(spans)
    steps = marked or _found_steps(spans, launch, names)
    spans = _stepped(spans, steps, launch, all_host=timing != "kernels")
    marks, columns = _step_rows(steps, names), spans.columns()
    del spans

    def finished(name: str, column: NDArray[Any]) -> NDArray[Any]:
        whole = joined([column, getattr(marks, name)])
        return whole + scan.base_ns if name in ("start_ns", "end_ns") else whole

    spans = Spans.remade(columns, finished)
    return Part(
        path=scan.path,
        rank=-1 if who.rank is None else who.rank,
        rank_how=who.how,
        other_rank=-1 if who.other_rank is None else who.other_rank,
        other_how=who.other_how,
        spans=spans,
        names=names,
        launch=launch,
        timing=timing,
        steps_how=steps.how if steps is not None else "",
        world_size=who.world_size,
        host=who.host,
        backend=who.backend,
        events=count,
        groups=who.groups,
        notices=(*scan.notices, *said, *notices),
        base_ns=None if scan.base_lost else scan.base_ns,
    )


def _refuse_two_ranks(scan: Scan) -> None:
    claimed = scan.file_ranks if len(scan.file_ranks) > 1 else ranks_in_one_group(scan.comms)
    if len(claimed) > 1:
        raise InputError(
            f"two ranks wrote into one file (ranks {', '.join(map(str, sorted(claimed)[:8]))})",
            hint="give every rank a file name of its own, with the rank in it",
            where=scan.path,
        )


def _refuse_unusable_times(scan: Scan) -> None:
    """Raise InputError where more of the device's events are unusable than usable, or none of the file is left."""
    kept = int(np.isin(scan.events.cat, DEVICE).sum())
    if scan.lost > kept:
        what = f"{scan.lost} of {scan.lost + kept} GPU events"
    elif scan.dropped and not len(scan.events):
        what = "all events"
    else:
        return
    raise InputError(
        f"{what} cannot be used: {'; '.join(f'{n} have {why}' for why, n in sorted(scan.dropped.items()))}",
        hint="record or export it again, as complete events (ph X) whose times are numbers that count microseconds, "
        "none of them after the year 2042",
        where=scan.path,
    )


def _refuse_nameless(scan: Scan, events: Events) -> None:
    """Raise InputError where kernels without a name take a good part of all kernels' time: any of them may be
    communication, which is no work, unless NCCL's metadata tells which kernels are."""
    nameless = np.array([not text.strip() for text in scan.names.texts], dtype=np.bool_)
    kernel, length = events.cat == Cat.KERNEL, events.end_ns - events.start_ns
    if (events.comm[kernel] >= 0).any():
        return
    unknown = int(length[kernel & nameless[events.name]].sum())
    if unknown > _STRAY * int(length[kernel].sum()):
        raise InputError(
            f"kernels of {unknown / 1e6:.3f} ms have no name: communication cannot be told from work",
            hint="export or record it again, with the names of kernels",
            where=scan.path,
        )


def _sound(scan: Scan) -> tuple[Events, list[Notice]]:
    keep, notices = quarantine(scan.events, scan.names, scan.path)
    again, twice = repeated(scan.events, scan.path)
    keep &= ~again
    notices += twice
    events = scan.events if keep.all() else scan.events.take(keep)
    if not len(scan.arrows):
        return events, notices
    events = numbered(events, scan.names, scan.arrows)
    message = (
        f"no operator has a sequence number; the profiler's {len(scan.arrows) // 2} arrows from forward to backward "
        "stand for them"
    )
    return events, [*notices, Notice("numbered-by-arrows", message, scan.path)]


@dataclass(eq=False)
class _Table:
    """The events of one file with what is asked of them again and again."""

    scan: Scan
    events: Events
    comm_names: CommNames
    who: Identity
    names: Names
    step_rules: tuple[NameRule, ...] = ()

    def __post_init__(self) -> None:
        self.to_run = self.scan.names.mapping_to(self.names)
        texts = self.scan.names.texts
        self.comm_of_name = np.array([self.comm_names.what(t) for t in texts], dtype=np.int8)

    def starts_with(self, *prefixes: str) -> Mask:
        """Rows whose name begins with one of `prefixes`."""
        hit = np.array([t.startswith(prefixes) for t in self.scan.names.texts], dtype=np.bool_)
        result: Mask = hit[self.events.name]
        return result

    def contains(self, part: str) -> Mask:
        hit = np.array([part in t for t in self.scan.names.texts], dtype=np.bool_)
        result: Mask = hit[self.events.name]
        return result

    def named(self, *patterns: re.Pattern[str] | NameRule) -> Mask:
        """Rows whose name one of `patterns` finds."""
        hit = np.array([any(p.search(t) for p in patterns) for t in self.scan.names.texts], dtype=np.bool_)
        result: Mask = hit[self.events.name]
        return result

    def text(self, row: int) -> str:
        return self.scan.names[int(self.events.name[row])]

    def cat(self, *wanted: Cat) -> Mask:
        result: Mask = np.logical_or.reduce([self.events.cat == cat for cat in wanted])
        return result

    def device_rows(self) -> Mask:
        bare = [p for p, t in self.scan.processes.items() if t.lower().startswith(_ACCELERATOR_PROCESSES)]
        result: Mask = self.cat(*DEVICE) | (self.cat(Cat.BARE) & np.isin(self.events.pid, bare))
        return result

    def columns(self, rows: Int | Mask, **more: Any) -> Spans:
        """Spans of these rows: times, name, stream = thread, and whatever is given."""
        e = self.events
        given = {
            "start_ns": e.start_ns[rows], "end_ns": e.end_ns[rows], "name": self.to_run[e.name[rows]],
            "stream": _narrow(e.tid[rows]), **more,
        }  # fmt: skip
        return Spans.from_columns(len(given["start_ns"]), **given)


def _narrow(values: Int) -> Int:
    """Thread and stream ids are for display; those beyond 31 bits are folded."""
    if values.dtype == np.int32:
        return values
    return np.where(np.abs(values) < 1 << 31, values, values & 0x7FFFFFFF).astype(np.int64)


def _pieces(table: _Table) -> tuple[list[Spans], str, list[Notice]]:
    recorded = table.device_rows()
    if recorded.any():
        device, said = _of_one_device(table, recorded)
        device_spans, told = _device_spans(table, device)
        pieces = [*device_spans, *_host_spans(table, device)]
        return pieces, "kernels", [*said, *told, *_lost_kernels(table, recorded)]
    if _is_cpu_rank(table):
        notice = Notice(
            "cpu-rank",
            "no device events, and the process group is gloo: busy is the time of host operators",
            table.scan.path,
        )
        return [*_cpu_spans(table), _ranges(table)], "host", [notice]
    notice = Notice(
        "no-device-events",
        f"no GPU events of rank {table.who.rank}: its idle time is unavailable (record with ProfilerActivity.CUDA)",
        table.scan.path,
    )
    return [_ranges(table)], "", [notice]


def _of_one_device(table: _Table, device: Mask) -> tuple[Mask, list[Notice]]:
    """The device rows of the device with most kernel time, and a Notice for those of others.

    A rank drives one device; the little that it does on another (a context is set up, a buffer is copied) is no part
    of its time. Raises InputError when the kernels of another device take more than `_STRAY` of the time of its own:
    then two ranks' devices are in one file, and nothing says which is whose.
    """
    e = table.events
    kernels = device & table.cat(Cat.KERNEL, Cat.BARE)
    (own, most), *others = e.time_by_device(kernels if kernels.any() else device)
    used = [(own, most), *((index, spent) for index, spent in others if spent > _STRAY * most)]
    if len(used) > 1:
        listed = ", ".join(f"{spent / 1e6:.3f} ms on device {index}" for index, spent in used[:8])
        raise InputError(
            f"one process drove {len(used)} devices ({listed}): which rank each of them is cannot be told",
            hint="record one process per GPU, or keep the events of one device in each file",
            where=table.scan.path,
        )
    index = e.device_index(device)
    stray = index != own
    if not stray.any():
        return device, []
    listed = ", ".join(map(str, np.unique(index[stray]).tolist()[:8]))
    message = f"{int(stray.sum())} events on device {listed} are not used: this rank's work is on device {own}"
    kept = device.copy()
    kept[device] = ~stray
    return kept, [Notice("other-device", message, table.scan.path)]


def _lost_kernels(table: _Table, device: Mask) -> list[Notice]:
    """A Notice when many launches have no kernel: CUPTI dropped them, and what looks idle may not be."""
    e = table.events
    launches = e.corr[table.cat(Cat.RUNTIME) & table.contains("LaunchKernel") & (e.corr >= 0)]
    lost = int(np.sum(~np.isin(launches, e.corr[device])))
    if lost <= _LOST * len(launches):
        return []
    message = (
        f"{lost} of {len(launches)} kernel launches have no kernel in the trace; the profiler lost them, and part of "
        "the idle time of this rank may be work"
    )
    return [Notice("kernels-missing", message, table.scan.path)]


# --- device side ---------------------------------------------------------------------------------------------


def _device_spans(table: _Table, device: Mask) -> tuple[list[Spans], list[Notice]]:
    e = table.events
    copies = device & table.cat(Cat.MEMCPY, Cat.MEMSET)
    what = table.comm_of_name[e.name]
    # Arguments, and the operation that launched it, prove communication where the name does not (custom kernels, a
    # library that is not in the table); torch's own kernels beside it only move the data there.
    untold = device & ~copies & (what == Comm.NONE) & ~table.contains("at::native")
    by_launch = untold & (e.comm < 0)
    by_launch[by_launch] = _launched_by_communication(table, np.flatnonzero(by_launch))
    named = device & ~copies & ~np.isin(what, (Comm.NONE, Comm.WORK))
    comm = named | (untold & (e.comm >= 0)) | by_launch
    compute = device & ~copies & ~comm
    out = [
        table.columns(rows, **_device_columns(e, rows), lane=lane, kind=kind)
        for rows, lane, kind in (
            (compute, Lane.COMPUTE, Kind.OTHER),
            (copies, Lane.COPY, Kind.MEMCPY),
        )
    ]
    out.append(_comm_spans(table, np.flatnonzero(comm)))
    return out, _told_by_launch(table, np.flatnonzero(by_launch))


def _launched_by_communication(table: _Table, rows: Int) -> Mask:
    """Which of these device rows were launched inside an operation of communication, on its thread."""
    e = table.events
    inside = np.zeros(len(rows), dtype=np.bool_)
    around = np.flatnonzero(table.cat(Cat.RANGE, Cat.CPU_OP) & table.starts_with(*_OPERATIONS))
    launches = np.flatnonzero(table.cat(Cat.RUNTIME) & (e.corr >= 0))
    if not len(around) or not len(launches) or not len(rows):
        return inside
    launches = launches[np.argsort(e.corr[launches], kind="stable")]
    at = np.minimum(np.searchsorted(e.corr[launches], e.corr[rows]), len(launches) - 1)
    launch = launches[at]
    for thread, those in intervals.split_by(around, e.tid).items():
        at_work = intervals.union(e.start_ns[those], e.end_ns[those])
        mine = np.flatnonzero((e.corr[launch] == e.corr[rows]) & (e.tid[launch] == thread))
        when = e.start_ns[launch[mine]]
        inside[mine] = intervals.measure_before(at_work, when + 1) > intervals.measure_before(at_work, when)
    return inside


def _told_by_launch(table: _Table, rows: Int) -> list[Notice]:
    if not len(rows):
        return []
    texts = sorted({table.text(row) for row in rows.tolist()})
    listed = some([checks.shown(text) for text in texts], 3)
    message = (
        f"{len(rows)} kernels of {len(texts)} names ({listed}) count as communication, and not as work, because an "
        "operation of torch.distributed or NCCL launched them; a [[kernel]] rule of --names says otherwise"
    )
    return [Notice("comm-by-launch", message, table.scan.path)]


def _device_columns(e: Events, rows: Int | Mask) -> dict[str, Int]:
    index = e.device_index(rows)
    stream = np.where(e.stream[rows] != -1, e.stream[rows], e.tid[rows])
    return {
        "device": np.where((index >= 0) & (index < 1 << 15), index, 0).astype(np.int64),
        "stream": _narrow(stream),
        "corr": e.corr[rows],
    }


def _comm_spans(table: _Table, rows: Int) -> Spans:
    """One span per message of a P2P kernel (a coalesced kernel carries several), one per collective kernel."""
    told = _CommFinder(table)
    source: list[int] = []
    filled: list[tuple[int, int, int, int, int]] = []
    for row in rows.tolist():
        for message in told.messages(row):
            source.append(row)
            filled.append(message)
    at = np.array(source, dtype=np.int64)
    kind, peer, group, seq, size = (
        np.array([f[i] for f in filled], dtype=np.int64) if filled else at for i in range(5)
    )
    return table.columns(
        at, **_device_columns(table.events, at), lane=Lane.COMM,
        kind=kind, peer=peer, group=group, seq=seq, bytes=size,
    )  # fmt: skip


class _CommFinder:
    """What a communication kernel did: from its own arguments, else from the host operations that launched it."""

    def __init__(self, table: _Table) -> None:
        self.table = table
        self.groups: dict[tuple[str, tuple[int, ...], str], int] = {}

    @functools.cached_property
    def around(self) -> _Around:
        """Made where a kernel has no arguments of its own."""
        return _Around(self.table)

    def messages(self, row: int) -> list[tuple[int, int, int, int, int]]:
        """(kind, peer, group, seq, bytes) of each message, in the order they were issued."""
        e = self.table.events
        if e.comm[row] >= 0:
            args = [self.table.scan.comms[int(e.comm[row])]]
        else:
            args, title = self.around.launch_of(row)
            if not args:
                return [self._by_title(row, title)]
        single = [self._by_args(a, row) for a in args]
        return single or [self._by_title(row, "")]

    def _by_args(self, args: CommArgs, row: int) -> tuple[int, int, int, int, int]:
        name = args.collective
        me = self.table.who.rank
        group = self._group(args)
        kind = Kind.COLLECTIVE
        if "send" in name and "recv" not in name:
            kind = Kind.SEND
        elif "recv" in name and "send" not in name:
            kind = Kind.RECV
        elif not any(c in name for c in _COLLECTIVES) and args.src >= 0 and args.dst >= 0 and args.src != args.dst:
            kind = Kind.SEND if me in (None, args.src) or _is_local(args, args.src, me) else Kind.RECV
        elif self._is_p2p(row) and not any(c in name for c in _COLLECTIVES):
            kind = Kind.OTHER
        peer = peer_of(args, kind, me) if kind in (Kind.SEND, Kind.RECV) else -1
        return kind, peer, group, args.seq, args.bytes

    def _by_title(self, row: int, title: str) -> tuple[int, int, int, int, int]:
        """From a name alone: ``nccl:send 0->1``, ``c10d::allreduce_``, or only the kernel's own."""
        kind = Kind.COLLECTIVE
        peer = -1
        if title.startswith(("nccl:send", "nccl:recv", "c10d::send", "c10d::recv")):
            kind = Kind.SEND if title.partition(":")[2].lstrip(":").startswith("send") else Kind.RECV
            tail = title.replace("<-", "->").rpartition("->")[2].strip()
            # These numbers are local to the group, and the group is not named: right only for a whole-job one.
            peer = int(tail) if tail.isdigit() and len(tail) < 8 else -1
        elif self._is_p2p(row) and not any(c in title for c in _COLLECTIVES):
            kind = Kind.OTHER
        return kind, peer, 0, -1, -1

    def _is_p2p(self, row: int) -> bool:
        return int(self.table.comm_of_name[self.table.events.name[row]]) != Comm.COLLECTIVE

    def _group(self, args: CommArgs) -> int:
        key = (args.group, args.members, args.group_text)
        if key not in self.groups:
            members = ",".join(map(str, args.members)) or args.group_text
            self.groups[key] = self.table.names.intern(f"{args.group}[{members}]" if members else args.group)
        return self.groups[key]


class _Around:
    """What the host did around each launch: its operations of communication, by thread and time."""

    def __init__(self, table: _Table) -> None:
        self.table = table
        e = table.events
        host = np.flatnonzero(table.cat(Cat.CPU_OP, Cat.RANGE) & ((e.comm >= 0) | table.starts_with("nccl:", "c10d::")))
        host = host[np.lexsort((e.start_ns[host], e.tid[host]))]
        self.host = host
        self.host_tid = e.tid[host]
        self.host_start = e.start_ns[host]
        runtime = np.flatnonzero(table.cat(Cat.RUNTIME) & (e.corr >= 0))
        order = np.argsort(e.corr[runtime], kind="stable")
        self.launch = runtime[order]
        self.launch_corr = e.corr[self.launch]
        self.last_launch: dict[int, int] = {}

    def launch_of(self, row: int) -> tuple[list[CommArgs], str]:
        """Arguments of the operations that this kernel's launch closes, and the annotation around it."""
        e = self.table.events
        at = int(np.searchsorted(self.launch_corr, e.corr[row])) if e.corr[row] >= 0 else len(self.launch)
        if at >= len(self.launch) or self.launch_corr[at] != e.corr[row]:
            return [], ""
        launch = int(self.launch[at])
        tid, when = int(e.tid[launch]), int(e.start_ns[launch])
        low, high = np.searchsorted(self.host_tid, [tid, tid + 1])
        upto = int(low + np.searchsorted(self.host_start[low:high], when, side="right"))
        since = self.last_launch.get(tid, -(1 << 62))
        self.last_launch[tid] = when
        title = ""
        args: list[CommArgs] = []
        for k in range(upto - 1, max(int(low), upto - 512) - 1, -1):
            h = int(self.host[k])
            if int(e.start_ns[h]) <= since:
                break
            if e.comm[h] >= 0:
                args.insert(0, self.table.scan.comms[int(e.comm[h])])
            elif not title and e.end_ns[h] >= when:
                title = self.table.text(h)
        p2p = [a for a in args if a.src >= 0 or a.dst >= 0 or a.collective in ("send", "recv")]
        return (p2p or args[-1:]) if args else [], title


def _is_local(args: CommArgs, value: int, me: int | None) -> bool:
    return bool(args.members) and 0 <= value < len(args.members) and args.members[value] == me


def peer_of(args: CommArgs, kind: Kind, me: int | None) -> int:
    """Global rank of the other end; -1 when it cannot be told.

    ``Src/Dst Rank`` are global in some versions and local to the group in others (pytorch#153819). The end
    that should be this rank tells which; a group of two needs no number at all.
    """
    members = args.members
    if len(members) == 2 and me in members:
        return members[1] if members[0] == me else members[0]
    mine, other = (args.src, args.dst) if kind == Kind.SEND else (args.dst, args.src)
    if other < 0:
        return -1
    if me is not None and members and me in members:
        local_me = members.index(me)
        if mine == me and other in members:
            return other
        if mine == local_me and other < len(members):
            return members[other]
        if other in members and other != me:
            return other
        return members[other] if other < len(members) and members[other] != me else -1
    return other if other != me else -1


# --- host side -----------------------------------------------------------------------------------------------


def _host_spans(table: _Table, device: Mask) -> list[Spans]:
    e = table.events
    launched = e.corr[device & (e.corr >= 0)]
    launches = table.cat(Cat.RUNTIME) & (e.corr >= 0) & np.isin(e.corr, launched)
    return [
        table.columns(launches, lane=Lane.HOST, kind=Kind.LAUNCH, corr=e.corr[launches]),
        _autograd_spans(table),
        _ranges(table),
    ]


def _autograd_spans(table: _Table) -> Spans:
    """Evidence for forward and backward: outermost operators that carry an autograd sequence number."""
    e = table.events
    rows = np.flatnonzero(table.cat(Cat.CPU_OP) & ((e.sequence >= 0) | table.starts_with(AUTOGRAD)))
    rows = _outermost(e, rows)
    return table.columns(rows, lane=Lane.HOST, kind=Kind.HOST, seq=e.sequence[rows])


def _outermost(e: Events, rows: Int) -> Int:
    """Of `rows`, those that no other one of the same thread contains; in order of thread and start."""
    order = np.lexsort((-e.end_ns[rows], e.start_ns[rows], e.tid[rows]))
    rows = rows[order]
    keep = np.ones(len(rows), dtype=np.bool_)
    for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(e.tid[rows])) + 1):
        reach = np.maximum.accumulate(e.end_ns[rows[part]])
        keep[part[1:]] = e.start_ns[rows[part[1:]]] >= reach[:-1]
    result: Int = rows[keep]
    return result


def _ranges(table: _Table) -> Spans:
    """The user's and the framework's annotations, except those of communication and the step marks."""
    hidden = table.starts_with("nccl:", "gloo:", "ProfilerStep", "record_param_comms", "mpi:", "ucc:")
    rows = np.flatnonzero(table.cat(Cat.RANGE) & ~hidden)
    optimizer = table.starts_with("Optimizer.step#")[rows]
    loader = table.starts_with("enumerate(DataLoader)")[rows]
    kind = np.where(optimizer, Kind.OPTIMIZER, np.where(loader, Kind.DATA, Kind.OTHER))
    return table.columns(rows, lane=np.where(loader, Lane.HOST, Lane.RANGE), kind=kind)


# --- CPU ranks -----------------------------------------------------------------------------------------------


def _is_cpu_rank(table: _Table) -> bool:
    cuda = table.cat(Cat.RUNTIME).any() or table.starts_with("nccl:").any()
    return not cuda and ("gloo" in table.who.backend or bool(table.starts_with("gloo:").any()))


def _cpu_spans(table: _Table) -> list[Spans]:
    """Host operators as busy time, ``c10d::`` calls as posts, ends of ``gloo:`` ranges as waits.

    Such a range lasts from the post until the host has waited for it, and the host works in between: only its
    last part, after whatever the host did before, is waiting.
    """
    comm_call = table.starts_with("c10d::", "record_param_comms") & table.cat(Cat.CPU_OP)
    under_way = table.starts_with("gloo:")
    top = _outermost(table.events, np.flatnonzero(table.cat(Cat.CPU_OP)))
    ops = top[~comm_call[top]]
    posts = top[comm_call[top] & table.starts_with("c10d::")[top]]
    waits = np.flatnonzero(under_way)
    waits = waits[np.argsort(table.events.start_ns[waits], kind="stable")]
    posts = posts[np.argsort(table.events.start_ns[posts], kind="stable")]
    corr_of_post, corr_of_wait = _pair_posts(table, posts, waits)
    e = table.events
    return [
        table.columns(ops, lane=Lane.COMPUTE, kind=Kind.OTHER, device=0, seq=e.sequence[ops]),
        table.columns(posts, lane=Lane.POST, kind=_gloo_kind(table, posts), device=0, corr=corr_of_post),
        table.columns(
            waits, lane=Lane.WAIT, kind=_gloo_kind(table, waits), device=0, corr=corr_of_wait,
            start_ns=_blocked_since(e, waits, top),
        ),
    ]  # fmt: skip


def _blocked_since(e: Events, waits: Int, activity: Int) -> Int:
    """When the host had nothing left but to wait for each range: the last end of anything before its end."""
    ends = np.sort(np.concatenate([e.end_ns[activity], e.end_ns[waits]]))
    end = e.end_ns[waits]
    place = np.searchsorted(ends, end, side="left") - 1
    since = np.where(place >= 0, ends[np.maximum(place, 0)], e.start_ns[waits])
    since = np.maximum(since, e.start_ns[waits])
    # An operator that runs when the range ends (another thread asked for it) leaves no time to wait.
    at_work = intervals.union(e.start_ns[activity], e.end_ns[activity])
    busy = intervals.measure_before(at_work, end) - intervals.measure_before(at_work, end - 1) > 0
    return np.where(busy, end, since)


def _gloo_kind(table: _Table, rows: Int) -> Int:
    texts = [table.text(r).rpartition(":")[2] for r in rows.tolist()]
    kinds = [
        Kind.SEND if t.startswith("send") else Kind.RECV if t.startswith("recv") else Kind.COLLECTIVE for t in texts
    ]
    return np.array(kinds, dtype=np.int64)


def _pair_posts(table: _Table, posts: Int, waits: Int) -> tuple[Int, Int]:
    """A shared number for each ``c10d::send`` and the ``gloo:send`` that it started; -1 where there is none."""
    corr_of_post = np.full(len(posts), -1, dtype=np.int64)
    corr_of_wait = np.full(len(waits), -1, dtype=np.int64)
    post_kind, wait_kind = _gloo_kind(table, posts), _gloo_kind(table, waits)
    start = table.events.start_ns
    for kind in (Kind.SEND, Kind.RECV, Kind.COLLECTIVE):
        mine, theirs = np.flatnonzero(post_kind == kind), np.flatnonzero(wait_kind == kind)
        if len(mine) == 0:
            continue
        # The range opens inside the call: the last call that began before it.
        at = np.searchsorted(start[posts[mine]], start[waits[theirs]], side="right") - 1
        good = at >= 0
        number = mine[at[good]] + 1
        corr_of_wait[theirs[good]] = number
        corr_of_post[mine[at[good]]] = number
    return corr_of_post, corr_of_wait


# --- launches and steps --------------------------------------------------------------------------------------


def _launch_links(spans: Spans) -> Int:
    """(launch row, device row) by correlation id, which is unique within one process's file."""
    hosts = np.flatnonzero(spans.where(kind=Kind.LAUNCH) & (spans.corr >= 0))
    devices = np.flatnonzero((spans.device >= 0) & (spans.corr >= 0))
    if len(hosts) == 0 or len(devices) == 0:
        return np.empty((0, 2), dtype=np.int64)
    hosts = hosts[np.argsort(spans.corr[hosts], kind="stable")]
    at = np.minimum(np.searchsorted(spans.corr[hosts], spans.corr[devices]), len(hosts) - 1)
    found = spans.corr[hosts[at]] == spans.corr[devices]
    return np.stack([hosts[at[found]], devices[found]], axis=1).astype(np.int64)


def _found_steps(spans: Spans, launch: Int, names: Names) -> Steps | None:
    """Where no ProfilerStep tells, the best evidence there is: optimizer ranges, optimizer kernels, period, all as
    one."""
    busy = np.flatnonzero(spans.where(lane=Lane.COMPUTE))
    ends = spans.end_ns[spans.where(kind=Kind.OPTIMIZER, lane=Lane.RANGE)]
    if len(spans) and len(ends):
        on_host = len(launch) > 0 or bool(np.any(spans.lane == Lane.POST))
        begins = int(spans.start_ns.min())
        by_ranges = step_finder.from_boundaries(ends, begins, "optimizer", on_host=on_host)
        if by_ranges is not None:
            return by_ranges
    if len(busy) == 0:
        return None
    busy = busy[np.argsort(spans.start_ns[busy], kind="stable")]
    adam = np.array([bool(step_finder.OPTIMIZER_KERNEL.search(t)) for t in names.texts])[spans.name[busy]]
    ends = step_finder.optimizer_kernel_ends(adam, spans.end_ns[busy])
    on_device = spans.device >= 0
    first, last = int(spans.start_ns[on_device].min()), int(spans.end_ns[on_device].max())
    return (
        step_finder.from_boundaries(ends, first, "optimizer kernels", on_host=False)
        or step_finder.from_period(spans.name[busy].astype(np.int64), spans.start_ns[busy], spans.end_ns[busy])
        or step_finder.whole(first, last)
    )


def _profiler_steps(table: _Table) -> Steps | None:
    start, end = table.events.start_ns, table.events.end_ns
    mine = np.flatnonzero(table.named(*table.step_rules) & table.cat(Cat.RANGE, Cat.CPU_OP))
    if len(mine):
        mine = mine[np.argsort(start[mine], kind="stable")]
        found = step_finder.from_profiler(np.arange(len(mine), dtype=np.int64), start[mine], end[mine])
        return None if found is None else replace(found, how=USER_STEPS)
    rows = np.flatnonzero(table.named(step_finder.STEP_NAME) & table.cat(Cat.RANGE, Cat.CPU_OP))
    numbers = [step_finder.STEP_NAME.match(table.text(r)) for r in rows.tolist()]
    rows = rows[[m is not None for m in numbers]]
    index = np.array([int(m[1] or m[2]) for m in numbers if m], dtype=np.int64)
    return step_finder.from_profiler(index, start[rows], end[rows])


def _stepped(spans: Spans, steps: Steps | None, launch: Int, *, all_host: bool) -> Spans:
    """A device row belongs to the step that launched it; without a launch, to the step it began in."""
    if steps is None or len(spans) == 0:
        return spans
    at = spans.start_ns.copy()
    host = (spans.device < 0) | all_host
    if steps.on_host and len(launch):
        at[launch[:, 1]] = spans.start_ns[launch[:, 0]]
        host[launch[:, 1]] = True
    if not steps.on_host:
        # A receive is resident since its rank was free; it belongs to the step that needs it. A send begins
        # when its producer ends, which may be where the step does.
        at[(spans.lane == Lane.COMM) & (spans.kind == Kind.SEND)] -= 1
        waiting = (spans.lane == Lane.COMM) & (spans.kind == Kind.RECV)
        at[waiting] = spans.end_ns[waiting]
    return spans.with_columns(step=steps.of(at, host))


def _step_rows(steps: Steps | None, names: Names) -> Spans:
    if steps is None:
        return Spans.empty()
    return Spans.from_columns(
        len(steps), lane=Lane.RANGE, kind=Kind.STEP, step=steps.index, start_ns=steps.start_ns,
        end_ns=steps.end_ns, name=np.array([names.intern(f"step {i}") for i in steps.index.tolist()]),
    )  # fmt: skip
