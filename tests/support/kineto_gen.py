"""Kineto traces of a pipeline that never ran, with every time known: the truth that readers are tested against.

A small discrete-event model of torch's schedules on streams as NCCL has them: a compute stream, and a
communication stream on which a receive kernel is resident from the moment its rank has nothing else to do until
the data is there, and a send kernel from the end of its producer until the receiver has the data.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bubblescope.model.kinds import SHORT
from bubblescope.replay.schedules import generate, rank_of_stage

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """One job. Times in ns; `scale` multiplies F and B of each rank; `kernels`: (in an F, in a B). schedule: a name of
    CONTRACT.md; where it has several stages on a rank, `chunks` says how many. I and W are half a B each. reversed:
    the backwards of a GPipe run from the last micro-batch to the first. replicas: pipelines of `stages` ranks each, of
    equal times. Every step ends with an all-reduce among the replicas of a stage that takes reduce_ns, and one between
    the first and the last stage of each pipeline that takes embedding_ns, where these are not 0. slow: factor of each
    replica, () all alike."""

    stages: int = 4
    microbatches: int = 8
    forward_ns: int = 1_000_000
    backward_ns: int = 2_000_000
    transfer_ns: int = 50_000
    scale: tuple[float, ...] = (1.0, 1.0, 1.0, 1.5)
    steps: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    optimizer_ns: int = 0
    kernels: tuple[int, int] = (4, 7)
    same_names: bool = False
    eager: bool = False
    bytes: int = 8 << 20
    gap_ns: int = 200_000
    start_ns: int = 5_000_000
    reversed: bool = False
    replicas: int = 1
    reduce_ns: int = 0
    embedding_ns: int = 0
    slow: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


@dataclass(frozen=True)
class Op:
    rank: int
    step: int
    kind: str
    microbatch: int
    start_ns: int
    end_ns: int
    stage: int = -1


@dataclass(frozen=True)
class Message:
    """Kernels of one message; `order`: place in host issue order of each end."""

    step: int
    source: int
    destination: int
    forward: bool
    microbatch: int
    send: tuple[int, int]
    receive: tuple[int, int]
    to_stage: int = -1


@dataclass(frozen=True)
class Reduction:
    """The kernel of one member of an all-reduce; `members`: the ranks of the group."""

    step: int
    rank: int
    members: tuple[int, ...]
    start_ns: int
    end_ns: int


@dataclass
class Truth:
    """All that happened, on one true clock."""

    shape: Shape
    ops: list[Op] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    step_ranges: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def busy_ns(self, rank: int) -> int:
        return sum(o.end_ns - o.start_ns for o in self.ops if o.rank == rank)

    def transfer_ns(self, rank: int) -> int:
        """Time `rank` lost to transfers: its receives after both ends were there."""
        return sum(m.receive[1] - max(m.send[0], m.receive[0]) for m in self.messages if m.destination == rank)


def order_of(shape: Shape, rank: int) -> list[tuple[str, int, int]]:
    """The operations (kind, stage, micro-batch) of `rank` in the order it runs them."""
    chunks = shape.chunks if shape.chunks > 1 else None
    order = generate(shape.schedule, shape.stages, shape.microbatches, chunks)[rank]
    ops = [(SHORT[a.kind], a.stage, a.microbatch) for a in order]
    if not shape.reversed:
        return ops
    return [(kind, stage, i if kind == "F" else shape.microbatches - 1 - i) for kind, stage, i in ops]


def simulate(shape: Shape) -> Truth:
    """Run the job."""
    truth = Truth(shape)
    begin = shape.start_ns
    for step in range(shape.steps):
        begin = _step(truth, step, begin) + shape.gap_ns
    return truth


def _step(truth: Truth, step: int, begin: int) -> int:
    shape, p = truth.shape, truth.shape.stages
    todo = [order_of(shape, rank % p) for rank in range(shape.ranks)]
    free = [begin] * shape.ranks
    produced: dict[tuple[int, bool, int, int], int] = {}
    while any(todo):
        moved = False
        for rank in range(shape.ranks):
            while todo[rank]:
                kind, stage, i = todo[rank][0]
                start = _input_ready(truth, step, rank, todo[rank][0], free[rank], produced)
                if start is None:
                    break
                slow = shape.slow[rank // p] if shape.slow else 1.0
                end = start + round(_length(shape, kind) * shape.scale[rank % p] * slow)
                truth.ops.append(Op(rank, step, kind, i, start, end, stage))
                if kind != "W":
                    produced[(rank // p, kind == "F", stage, i)] = end
                free[rank] = end
                todo[rank].pop(0)
                moved = True
        assert moved, "the schedule deadlocks"
    _reduce(truth, step, free)
    for s in range(shape.ranks):
        done = free[s] + shape.optimizer_ns
        if shape.optimizer_ns:
            truth.ops.append(Op(s, step, "O", -1, free[s], done))
        truth.step_ranges[(s, step)] = (begin, done)
    last = max(end for (_, k), (_, end) in truth.step_ranges.items() if k == step)
    truth.windows.append((begin, last))
    return last


def _reduce(truth: Truth, step: int, free: list[int]) -> None:
    """All-reduces of the end of a step; `free`: when each rank is, moved on."""
    shape, p = truth.shape, truth.shape.stages
    replicas = [tuple(range(stage, shape.ranks, p)) for stage in range(p)] if shape.reduce_ns else []
    ends = [(first, first + p - 1) for first in range(0, shape.ranks, p)] if shape.embedding_ns else []
    for groups, length in ((replicas, shape.reduce_ns), (ends, shape.embedding_ns)):
        for members in groups:
            end = max(free[rank] for rank in members) + length
            truth.reductions.extend(Reduction(step, rank, members, free[rank], end) for rank in members)
            for rank in members:
                free[rank] = end


def _length(shape: Shape, kind: str) -> int:
    return {"F": shape.forward_ns, "B": shape.backward_ns}.get(kind, shape.backward_ns // 2)


def _input_ready(
    truth: Truth, step: int, rank: int, op: tuple[str, int, int], free: int,
    produced: dict[tuple[int, bool, int, int], int],
) -> int | None:  # fmt: skip
    """When `rank`, free since `free`, can begin `op`; None while its input is not there. Notes the message."""
    shape = truth.shape
    kind, stage, i = op
    forward = kind == "F"
    source = stage - 1 if forward else stage + 1
    if kind == "W" or not 0 <= source < shape.stages * shape.chunks:
        return free
    replica = rank // shape.stages
    sent = produced.get((replica, forward, source, i))
    if sent is None:
        return None
    sender = replica * shape.stages + rank_of_stage(shape.schedule, source, shape.stages)
    if sender == rank:
        return max(free, sent)
    start = max(sent, free) + shape.transfer_ns
    eager = shape.eager and sent + shape.transfer_ns < free
    send = (sent, sent + shape.transfer_ns if eager else start)
    truth.messages.append(Message(step, sender, rank, forward, i, send, (free, start), stage))
    return start


# --- as traces -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How the trace looks. clock_ns: {rank: (offset, drift)} as its host stamps it; base_ns per rank;
    launches: with cuda_runtime launches, so that host order is known; ranges: "" (only ProfilerStep), "torch"
    (``Forward i``), "runtime" (``PP:0F3``), "zero bubble" (``F3.0.0``) or a pattern with kind, stage, chunk and
    microbatch; autograd: backward launches inside autograd engine calls; sequence: every launch inside an operator
    with its sequence number, on `sequence_ranks` or all; metadata: NCCL arguments on the kernels;
    per_direction: gradients have a communicator of their own; host: the name of every rank's host, "" none."""

    clock_ns: dict[int, tuple[int, float]] = field(default_factory=dict)
    base_ns: dict[int, int] = field(default_factory=dict)
    launches: bool = False
    ranges: str = ""
    autograd: bool = False
    metadata: bool = True
    local_ranks: bool = False
    profiler_step: bool = True
    world: int | None = None
    host: Callable[[int], str] = lambda rank: ""
    first_rank: int = 0
    members: tuple[int, ...] | None = None
    description: str = "mesh_pp"
    compact: bool = False
    per_direction: bool = False
    optimizer_range: bool = False
    sequence: bool = False
    sequence_ranks: tuple[int, ...] | None = None


def traces(truth: Truth, style: Style = Style()) -> dict[int, Json]:
    """rank -> the document that its profiler would have exported."""
    return {s + style.first_rank: _Rank(truth, style, s).document() for s in range(truth.shape.ranks)}


def write(folder: Path, documents: dict[int, Json], *, packed: bool = True, compact: bool = False) -> list[Path]:
    """One ``rankN.json[.gz]`` each."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for rank, document in documents.items():
        text = dumps(document, compact=compact).encode()
        path = folder / (f"rank{rank}.json.gz" if packed else f"rank{rank}.json")
        path.write_bytes(gzip.compress(text, 1, mtime=0) if packed else text)
        out.append(path)
    return out


def dumps(document: Json | list[Any], *, compact: bool = False) -> str:
    if compact:
        return json.dumps(document, separators=(",", ":"))
    return json.dumps(document, indent=1)


def range_name(style: str, stage: int, kind: str, microbatch: int, chunk: int) -> str:
    """``PP:0F3``, ``Forward 3``, or what the pattern `style` makes of it."""
    if style == "runtime":
        return f"PP:{stage}{kind}{microbatch}"
    if style == "torch":
        return f"{'Forward' if kind == 'F' else 'Backward'} {microbatch}"
    if style == "zero bubble":
        style = "{kind}{microbatch}.{chunk}.0".replace("{kind}", "B" if kind in "BI" else kind)
    return style.format(stage=stage, kind=kind, microbatch=microbatch, chunk=chunk)


class _Rank:
    """Builds the document of one stage."""

    def __init__(self, truth: Truth, style: Style, stage: int) -> None:
        self.truth, self.style, self.stage = truth, style, stage
        self.rank = stage + style.first_rank
        self.events: list[Json] = []
        self.corr = 1000
        self.pid = 4000 + self.rank
        forwards = [(o.step, o.stage, o.microbatch) for o in truth.ops if o.rank == stage and o.kind == "F"]
        self._turns = {forward: turn for turn, forward in enumerate(forwards)}

    def document(self) -> Json:
        self._metadata_events()
        for item in self._issue_order():
            self._kernels(item) if isinstance(item, Op) else self._message(item)
        self._reductions()
        self._steps()
        info: Json = {"backend": "nccl", "rank": self.rank, "world_size": self.style.world or self.truth.shape.ranks}
        head: Json = {"schemaVersion": 1, "deviceProperties": [{"id": self.stage, "name": "Model GPU"}]}
        head["distributedInfo"] = info
        if self.style.host(self.rank):
            head["host_name"] = self.style.host(self.rank)
        head["traceEvents"] = self.events
        head["displayTimeUnit"] = "ms"
        if self.style.base_ns.get(self.rank):
            head["baseTimeNanoseconds"] = self.style.base_ns[self.rank]
        return head

    def us(self, ns: int) -> float:
        """True time -> what this rank's host would stamp, relative to its base."""
        offset, drift = self.style.clock_ns.get(self.rank, (0, 0.0))
        stamped = ns + offset + round(drift * ns) - self.style.base_ns.get(self.rank, 0)
        return stamped / 1000

    def add(self, cat: str, name: str, start: int, end: int, tid: int, args: Json | None = None, pid: int = -1) -> None:
        self.events.append(
            {
                "ph": "X", "cat": cat, "name": name, "pid": self.pid if pid < 0 else pid, "tid": tid,
                "ts": self.us(start), "dur": (end - start) / 1000, "args": args or {},
            }
        )  # fmt: skip

    def _metadata_events(self) -> None:
        self.events.append(
            {"ph": "M", "name": "process_labels", "pid": self.stage, "tid": 0, "ts": 0, "args": {"labels": "GPU"}}
        )

    def _issue_order(self) -> list[Op | Message]:
        """As the schedule's Python thread issues: receive, compute, send."""
        mine = self.truth.messages
        received = {(m.step, m.forward, m.microbatch, m.to_stage): m for m in mine if m.destination == self.stage}
        sent = {(m.step, m.forward, m.microbatch, m.to_stage): m for m in mine if m.source == self.stage}
        out: list[Op | Message] = []
        for op in (o for o in self.truth.ops if o.rank == self.stage):
            forward = op.kind == "F"
            key = (op.step, forward, op.microbatch)
            if op.kind not in "OW" and (*key, op.stage) in received:
                out.append(received[(*key, op.stage)])
            out.append(op)
            there = op.stage + (1 if forward else -1)
            if op.kind not in "OW" and (*key, there) in sent:
                out.append(sent[(*key, there)])
        return out

    def _kernels(self, op: Op) -> None:
        shape = self.truth.shape
        count = {"F": shape.kernels[0], "O": 2}.get(op.kind, shape.kernels[1])
        prefix = {"F": "fwd", "O": "multi_tensor_apply_adam"}.get(op.kind, "bwd")
        edges = [op.start_ns + (op.end_ns - op.start_ns) * i // count for i in range(count + 1)]
        first = self.corr + 1
        for i in range(count):
            self.corr += 1
            name = f"gemm_{i % 2}" if shape.same_names and op.kind != "O" else f"{prefix}_gemm_{i}"
            args = {"device": self.stage, "stream": 7, "correlation": self.corr}
            self.add("kernel", name, edges[i], edges[i + 1], 7, args, pid=self.stage)
        self._launch(op, first, count)

    def _launch(self, op: Op, first: int, count: int) -> None:
        """Host side: launches just ahead of the kernels, in order, inside the ranges that torch writes."""
        if not (self.style.launches or self.style.ranges or self.style.autograd):
            return
        at = op.start_ns - 2_000 - 100 * count
        backward = op.kind in "BIW"
        thread = self.pid + (1 if self.style.autograd and backward else 0)
        numbered = self.style.sequence and self.rank in (self.style.sequence_ranks or (self.rank,))
        for i in range(count):
            self.add(
                "cuda_runtime", "cudaLaunchKernel", at + 100 * i, at + 100 * i + 80, thread, {"correlation": first + i}
            )
        if numbered and op.kind != "O":
            self._operators(op, at, count, thread)
        elif self.style.autograd and backward:
            args = {"Sequence number": op.microbatch, "Fwd thread id": 1}
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            self.add("cpu_op", name, at - 50, at + 100 * count + 50, thread, args)
        if self.style.ranges and op.kind != "O":
            name = range_name(self.style.ranges, op.stage, op.kind, op.microbatch, op.stage // self.truth.shape.stages)
            self.add("user_annotation", name, at - 100, at + 100 * count + 100, self.pid)
        if op.kind == "O" and self.style.optimizer_range:
            self.add("user_annotation", "Optimizer.step#AdamW.step", at - 100, at + 100 * count + 100, self.pid)

    def _operators(self, op: Op, at: int, count: int, thread: int) -> None:
        """An operator around each launch. The last one of a forward makes no node: its number is the next one's."""
        shape = self.truth.shape
        nodes = max(1, shape.kernels[0] - 1)
        base = 100 + self._turns[op.step, op.stage, op.microbatch] * nodes
        for i in range(count):
            k = base + i if op.kind == "F" else base + nodes - 1 - i * nodes // count
            args = {"Sequence number": k, "Fwd thread id": 0 if op.kind == "F" else 1}
            name = "aten::linear" if op.kind == "F" else "autograd::engine::evaluate_function: AddmmBackward0"
            self.add("cpu_op", name, at + 100 * i - 10, at + 100 * i + 90, thread, args)

    def _message(self, message: Message) -> None:
        sends = message.source == self.stage
        start, end = message.send if sends else message.receive
        self.corr += 1
        stream = 20 if sends else 24
        args: Json = {"device": self.stage, "stream": stream, "correlation": self.corr}
        if self.style.metadata:
            args |= self._nccl(message, sends)
            if self.style.per_direction and not message.forward:
                args["Process Group Name"] = "8"
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        self.add("kernel", name, start, end, stream, args, pid=self.stage)
        if self.style.launches or self.style.ranges or self.style.autograd:
            # The host runs ahead of the device: it hands a message over between the operations around it.
            at = self._handover(message, sends)
            self.add("cuda_runtime", "cudaLaunchKernelExC", at, at + 50, self.pid, {"correlation": self.corr})

    def _handover(self, message: Message, sends: bool) -> int:
        """Just before the operation that makes the message, or that needs it."""
        stage = message.to_stage - (1 if message.forward else -1) if sends else message.to_stage
        key = (message.step, message.microbatch, stage)
        op = next(
            o for o in self.truth.ops
            if o.rank == self.stage and (o.step, o.microbatch, o.stage) == key and (o.kind == "F") == message.forward
            and o.kind != "W"
        )  # fmt: skip
        return op.start_ns - 1_500 if sends else op.start_ns - 4_000

    def _nccl(self, message: Message, sends: bool) -> Json:
        first = self.style.first_rank
        first_of_pipeline = first + self.stage // self.truth.shape.stages * self.truth.shape.stages
        members = self.style.members or tuple(range(first_of_pipeline, first_of_pipeline + self.truth.shape.stages))
        shift = first if not self.style.local_ranks else 0
        return {
            "Collective name": "send" if sends else "recv", "In msg nelems": self.truth.shape.bytes // 2,
            "Out msg nelems": self.truth.shape.bytes // 2, "Group size": len(members), "dtype": "BFloat16",
            "Process Group Name": "7", "Process Group Description": self.style.description,
            "Process Group Ranks": str(list(members)), "Rank": members.index(self.rank),
            "Src Rank": message.source + shift, "Dst Rank": message.destination + shift,
            "Comms Id": 18446744073709551557,
        }  # fmt: skip

    def _reductions(self) -> None:
        """Their kernels, issued as they begin. Each group counts its own."""
        count: dict[tuple[int, ...], int] = {}
        for one in (r for r in self.truth.reductions if r.rank == self.stage):
            count[one.members] = count.get(one.members, 0) + 1
            self.corr += 1
            members = [rank + self.style.first_rank for rank in one.members]
            args: Json = {"device": self.stage, "stream": 28, "correlation": self.corr}
            if self.style.metadata:
                args |= {
                    "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20,
                    "Group size": len(members), "dtype": "BFloat16", "Process Group Name": "9",
                    "Process Group Ranks": str(members), "Rank": members.index(self.rank), "Seq": count[one.members],
                }  # fmt: skip
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            self.add("kernel", name, one.start_ns, one.end_ns, 28, args, pid=self.stage)
            if self.style.launches or self.style.ranges or self.style.autograd:
                at = one.start_ns - 1_000
                self.add("cuda_runtime", "cudaLaunchKernelExC", at, at + 50, self.pid, {"correlation": self.corr})

    def _steps(self) -> None:
        if not self.style.profiler_step:
            return
        for (stage, step), (begin, end) in self.truth.step_ranges.items():
            if stage == self.stage:
                self.add("user_annotation", f"ProfilerStep#{step + 3}", begin - 8_000, end - 10_000, self.pid)


def events_of(document: Json, wanted: Callable[[Json], bool]) -> Iterable[Json]:
    return (e for e in document["traceEvents"] if wanted(e))
