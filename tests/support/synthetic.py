"""Runs with a known truth: a schedule is replayed, and written down as a recorder would have seen it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bubblescope.model import (
    Action,
    Clock,
    HostClock,
    Kind,
    Lane,
    Layout,
    Links,
    Names,
    Run,
    Source,
    SpanBuilder,
)
from bubblescope.replay.dag import build_dag
from bubblescope.replay.engine import run as replay_dag
from bubblescope.replay.schedules import Schedule, make

Duration = Callable[[int, int, int, Action], int]
"""(step, replica, rank in the pipeline, action) -> ns"""


@dataclass(frozen=True)
class Job:
    """What to generate. Times in ns. host: idle of every GPU before each step's first operation; optimizer: time of
    the optimizer of every GPU; sync: the optimizers of all GPUs begin with a collective of this length."""

    schedule: str = "1F1B"
    stages: int = 4
    microbatches: int = 8
    chunks: int | None = None
    steps: int = 2
    replicas: int = 1
    comm: int = 0
    host: int = 0
    data: int = 0
    optimizer: int = 0
    sync: int | None = None
    origin: int = 1_700_000_000_000_000_000


def constant(forward: int, backward: int, scale: dict[int, float] | None = None, split: float = 0.5) -> Duration:
    """Every operation of a kind takes the same, times the factor of its stage; I is `split` of B."""
    factors = scale or {}
    base = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.BACKWARD_INPUT: round(backward * split),
        Kind.BACKWARD_WEIGHT: backward - round(backward * split),
    }
    return lambda step, replica, rank, action: round(base[action.kind] * factors.get(action.stage, 1.0))


def make_run(job: Job, duration: Duration) -> Run:
    """The run of a job whose operations take `duration`."""
    schedule = make(job.schedule, job.stages, job.microbatches, job.chunks)
    writer = _Writer(job, schedule)
    now = job.origin
    for step in range(job.steps):
        now = writer.step(step, now, duration)
    return writer.run()


class _Writer:
    def __init__(self, job: Job, schedule: Schedule) -> None:
        self.job = job
        self.schedule = schedule
        self.spans = SpanBuilder()
        self.names = Names()
        self.act, self.grad = self.names.intern("act"), self.names.intern("grad")
        self.world = self.names.intern("world")
        self.pairs: list[tuple[int, int]] = []
        self.waits: list[tuple[int, int]] = []
        self.dag = build_dag(schedule.orders, schedule.overlapped)

    def step(self, step: int, now: int, duration: Duration) -> int:
        """Write one step that starts at `now`; returns its end."""
        ends = [self._pipeline(step, replica, now, duration) for replica in range(self.job.replicas)]
        last = max(max(e) for e in ends)
        close = now
        for replica, own in enumerate(ends):
            for position, end in enumerate(own):
                close = max(close, self._tail(step, self._rank(replica, position), end, last))
        return close

    def _rank(self, replica: int, position: int) -> int:
        return replica * self.job.stages + position

    def _tail(self, step: int, rank: int, end: int, last: int) -> int:
        if self.job.sync is not None:
            done = last + self.job.sync
            self.spans.add(
                rank=rank,
                step=step,
                lane=Lane.WAIT,
                kind=Kind.COLLECTIVE,
                device=0,
                start_ns=end,
                end_ns=done,
                group=self.world,
                seq=step,
            )
            end = done
        self.spans.add(
            rank=rank,
            step=step,
            lane=Lane.COMPUTE,
            kind=Kind.OPTIMIZER,
            device=0,
            start_ns=end,
            end_ns=end + max(self.job.optimizer, 1),
        )
        return end + max(self.job.optimizer, 1)

    def _pipeline(self, step: int, replica: int, now: int, duration: Duration) -> Sequence[int]:
        dag = self.dag
        lengths = np.array(
            [duration(step, replica, int(r), a) for a, r in zip(dag.actions, dag.rank, strict=True)], dtype=np.float64
        )
        start, end = replay_dag(dag, lengths, self.job.comm)
        offset = now + self.job.host + self.job.data
        starts = [int(s) + offset for s in start]
        ends = [int(e) + offset for e in end]
        index = {
            (a.stage, a.kind == Kind.FORWARD, a.microbatch): i
            for i, a in enumerate(dag.actions)
            if a.kind != Kind.BACKWARD_WEIGHT
        }
        free = [now] * self.job.stages
        for i in np.lexsort((np.arange(len(starts)), start)):
            action, position = dag.actions[i], int(dag.rank[i])
            if free[position] == now and self.job.data:
                self.spans.add(
                    rank=self._rank(replica, position),
                    step=step,
                    lane=Lane.HOST,
                    kind=Kind.DATA,
                    start_ns=now,
                    end_ns=now + self.job.data,
                )
            self._message(step, replica, action, position, index, ends, free[position])
            self.spans.add(
                rank=self._rank(replica, position),
                step=step,
                lane=Lane.COMPUTE,
                kind=action.kind,
                device=0,
                stage=action.stage,
                chunk=action.stage // self.job.stages,
                microbatch=action.microbatch,
                start_ns=starts[i],
                end_ns=ends[i],
            )
            free[position] = ends[i]
        return free

    def _message(
        self,
        step: int,
        replica: int,
        action: Action,
        position: int,
        index: dict[tuple[int, bool, int], int],
        ends: list[int],
        free: int,
    ) -> None:
        """The post at both ends and the receiver's wait, where the input comes from another GPU."""
        forward = action.kind == Kind.FORWARD
        if action.kind == Kind.BACKWARD_WEIGHT:
            return
        source = index.get((action.stage + (-1 if forward else 1), forward, action.microbatch))
        if source is None or self.dag.rank[source] == position:
            return
        sender, sent = int(self.dag.rank[source]), ends[source]
        common = {
            "step": step,
            "lane": Lane.POST,
            "device": 0,
            "microbatch": action.microbatch,
            "name": self.act if forward else self.grad,
            "bytes": 1 << 20,
        }
        src, dst = self._rank(replica, sender), self._rank(replica, position)
        send = len(self.spans)
        self.spans.add(
            rank=src,
            peer=dst,
            kind=Kind.SEND,
            stage=self.dag.actions[source].stage,
            start_ns=sent,
            end_ns=sent,
            **common,
        )
        recv = len(self.spans)
        receiver = {**common, "rank": dst, "peer": src, "kind": Kind.RECV, "stage": action.stage}
        self.spans.add(**receiver, start_ns=free, end_ns=free)
        arrival = max(sent + self.job.comm, free)
        self.spans.add(**{**receiver, "lane": Lane.WAIT}, start_ns=free, end_ns=arrival)
        self.pairs.append((send, recv))
        self.waits.append((-1, recv + 1))

    def run(self) -> Run:
        job = self.job
        world = job.stages * job.replicas
        ranks = np.arange(world)
        host = self.names.intern("node0")
        owner = {}
        for action, position in zip(self.dag.actions, self.dag.rank, strict=True):
            for replica in range(job.replicas):
                owner[replica, action.stage] = self._rank(replica, int(position))
        layout = Layout(
            ranks=ranks,
            pp=ranks % job.stages,
            replica=ranks // job.stages,
            tp=np.zeros(world, dtype=np.int64),
            host=np.full(world, host),
            world_size=world,
            stages=job.stages,
            chunks=len({s for _, s in owner}) // job.stages,
            microbatches=job.microbatches,
            data_parallel=job.replicas,
            schedule=job.schedule,
            device_type="cpu",
            stage_rank=owner,
        )
        links = Links(
            p2p=np.array(self.pairs, dtype=np.int64).reshape(-1, 2),
            p2p_wait=np.array(self.waits, dtype=np.int64).reshape(-1, 2),
        )
        clock = Clock(hosts=(HostClock("node0", 0, 0.0, 0, 0),), aligned=True, how="one host")
        return Run(self.spans.build(), self.names, layout, links, clock, source=Source("synthetic", timing="host"))


def tile(run: Run, replicas: int, steps: int) -> Run:
    """A one-replica, one-step run, repeated: for measuring how cost grows. Every copy has the same times."""
    s = run.spans
    n, world = len(s), len(run.layout.ranks)
    length = int(s.end_ns.max() - s.start_ns.min())
    copies = replicas * steps
    replica = np.repeat(np.tile(np.arange(replicas), steps), n)
    step = np.repeat(np.repeat(np.arange(steps), replicas), n)
    columns = {name: np.tile(getattr(s, name), copies) for name in s.__dataclass_fields__}
    columns["rank"] = columns["rank"] + replica * world
    columns["peer"] = np.where(columns["peer"] >= 0, columns["peer"] + replica * world, -1)
    columns["step"] = step
    for name in ("start_ns", "end_ns"):
        columns[name] = columns[name] + step * length
    spans = type(s).from_columns(n * copies, **columns)
    offset = np.repeat(np.arange(copies) * n, len(run.links.p2p))[:, None]
    links = Links(
        p2p=np.tile(run.links.p2p, (copies, 1)) + offset,
        p2p_wait=np.where(
            (wait := np.tile(run.links.p2p_wait, (copies, 1))) >= 0,
            wait + np.repeat(np.arange(copies) * n, len(run.links.p2p_wait))[:, None],
            -1,
        ),
    )
    ranks = np.arange(world * replicas)
    old = run.layout
    layout = Layout(
        ranks=ranks,
        pp=np.tile(old.pp, replicas),
        replica=np.repeat(np.arange(replicas), world),
        tp=np.zeros(len(ranks), dtype=np.int64),
        host=np.tile(old.host, replicas),
        world_size=len(ranks),
        stages=old.stages,
        chunks=old.chunks,
        microbatches=old.microbatches,
        data_parallel=replicas,
        schedule=old.schedule,
        device_type=old.device_type,
        stage_rank={
            (r, stage): rank + r * world for (_, stage), rank in old.stage_rank.items() for r in range(replicas)
        },
    )
    return Run(spans, run.names, layout, links, run.clock, source=run.source)
