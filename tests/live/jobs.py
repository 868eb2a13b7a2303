"""Recordings of jobs with a known truth, as bytes that a test appends as it likes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bubblescope.model import Kind, Lane, Run
from bubblescope.model.kinds import SHORT
from tests.support import recordings, synthetic
from tests.support.synthetic import Duration, Job

MS = 1_000_000


@dataclass(frozen=True)
class Recorded:
    """What each rank writes: head (header and layout), one line a step, and the end line."""

    head: dict[int, bytes]
    steps: dict[int, dict[int, bytes]]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.head)

    def file(self, folder: Path, rank: int, suffix: str = "") -> Path:
        return folder / f"rank-{rank:05d}{suffix}.jsonl"

    def write(self, folder: Path, steps: Sequence[int], ranks: Sequence[int] | None = None, suffix: str = "") -> None:
        """Append these steps to the ranks' files; a new file begins with its head."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks if ranks is None else ranks:
            path = self.file(folder, rank, suffix)
            new = b"" if path.exists() else self.head[rank]
            with path.open("ab") as file:
                file.write(new + b"".join(self.steps[rank][step] for step in steps))

    def end(self, folder: Path, ranks: Sequence[int] | None = None, **more: Any) -> None:
        for rank in self.ranks if ranks is None else ranks:
            with self.file(folder, rank).open("ab") as file:
                file.write(recordings.text(recordings.end(**more)))


def record(plan: Job, duration: Duration, *, device: str = "cpu", **header: Any) -> Recorded:
    """The job as its recorder would write it. Step 0 is a warm-up step. Ranks of a GPU job are on GPU 0, 1, …"""
    run = synthetic.make_run(plan, duration)
    world = plan.stages * plan.replicas
    head, steps = {}, {}
    for rank in range(world):
        pipeline = list(range(rank // plan.stages * plan.stages, (rank // plan.stages + 1) * plan.stages))
        head[rank] = recordings.text(
            recordings.header(rank, world, **header),
            recordings.layout(rank % plan.stages, plan.stages, plan.microbatches, schedule=plan.schedule,
                              pp_ranks=pipeline, stage_ranks=pipeline,
                              device={"type": device, "index": rank, "name": device}),
        )  # fmt: skip
        steps[rank] = {step: _line(run, rank, step) for step in range(plan.steps)}
    return Recorded(head, steps)


def steady(steps: int = 12, replicas: int = 1, slow: float = 2.0, **header: Any) -> Recorded:
    """1F1B of four stages, the third of which takes `slow` times as long: 5 ms forward, 10 ms backward."""
    plan = Job(steps=steps, replicas=replicas, comm=MS // 5, host=MS // 2, origin=10 * MS)
    return record(plan, synthetic.constant(5 * MS, 10 * MS, {2: slow}), **header)


def _line(run: Run, rank: int, step: int) -> bytes:
    s = run.spans
    rows = []
    for i in np.flatnonzero((s.rank == rank) & (s.step == step)):
        kind, grad = Kind(int(s.kind[i])), run.names[int(s.name[i])] == "grad"
        talks = kind in (Kind.SEND, Kind.RECV)
        rows.append(
            {
                "kind": SHORT.get(kind, kind.name), "lane": Lane(int(s.lane[i])).name.lower(),
                "stage": int(s.stage[i]), "chunk": int(s.chunk[i]), "microbatch": int(s.microbatch[i]),
                "start_ns": int(s.start_ns[i]), "end_ns": int(s.end_ns[i]), "peer": int(s.peer[i]),
                "bytes": int(s.bytes[i]), "device": int(s.device[i]), "name": 2 + grad if talks else 0,
                "group": 1 if talks else 0, "seq": 2 * int(s.microbatch[i]) + grad if talks else int(s.seq[i]),
            }
        )  # fmt: skip
    line = recordings.step(step, rows, texts=["", "pp", "act", "grad"], warmup=step == 0)
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
