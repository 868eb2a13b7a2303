"""A whole recording of a small pipeline, written without any process, for tests of commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bubblescope.model import Kind, Lane
from bubblescope.model.kinds import SHORT
from tests.support.recordings import end, header, layout, step, write
from tests.support.synthetic import Duration, Job, make_run

ROW = ("stage", "chunk", "microbatch", "start_ns", "end_ns", "peer", "bytes", "device")


def write_recording(folder: Path, job: Job, duration: Duration) -> Path:
    """The run of `make_run`, one file per rank, as the recorder writes it."""
    run = make_run(job, duration)
    s = run.spans
    origin = int(s.start_ns.min())
    seq = _message_numbers(run)
    for rank in range(job.stages):
        steps = []
        for number in range(job.steps):
            rows = []
            for i in [int(i) for i in ((s.rank == rank) & (s.step == number)).nonzero()[0]]:
                row: dict[str, Any] = {name: int(getattr(s, name)[i]) for name in ROW}
                row["start_ns"] -= origin
                row["end_ns"] -= origin
                kind = Kind(int(s.kind[i]))
                row["kind"], row["lane"] = SHORT.get(kind, kind.name), Lane(int(s.lane[i])).name.lower()
                message = kind in (Kind.SEND, Kind.RECV)
                row["group"], row["name"], row["seq"] = int(message), 2 * int(message), seq.get(i, -1)
                rows.append(row)
            steps.append(step(number, rows))
        lines = [header(rank, job.stages), layout(rank, job.stages, job.microbatches), *steps, end(steps=job.steps)]
        write(folder, rank, *lines)
    return folder


def _message_numbers(run: Any) -> dict[int, int]:
    """{span row: a number that both ends and their waits share}."""
    found: dict[int, int] = {}
    for number, (pair, waits) in enumerate(zip(run.links.p2p.tolist(), run.links.p2p_wait.tolist(), strict=True)):
        found.update({row: number for row in (*pair, *waits) if row >= 0})
    return found
