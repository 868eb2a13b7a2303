"""What `scripts/attach_stress` runs: so many injections into one training job, by each way, each checked."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bubblescope.attach import client, inject, protocol
from tests.support.attach_trainer import Job

STAGES = 2
WAIT_SECONDS = 60.0

BUSY = """
import threading
def spin():
    while True:
        sum(range(1000))
threading.Thread(target=spin, daemon=True).start()
"""
"""A thread that fights for the interpreter's lock."""

CLOSE = (
    "try:\n __import__('threading').Thread(target=lambda: __import__('bubblescope.attach.agent').attach.agent.stop())"
    ".start()\nexcept BaseException:\n pass\n"
)


@dataclass
class Outcome:
    """Of one kind of job. stalls_ms: how long the process was stopped, each time."""

    name: str
    worked: int = 0
    stalls_ms: list[float] = field(default_factory=list)
    appeared_ms: list[float] = field(default_factory=list)
    problem: str = ""

    def row(self, rounds: int) -> str:
        stalls = sorted(self.stalls_ms) or [0.0]
        return (
            f"{self.name:<28} {self.worked:>3} of {rounds:<3}  stopped: median {statistics.median(stalls):6.1f} ms, "
            f"most {stalls[-1]:6.1f} ms  agent after: median {statistics.median(self.appeared_ms or [0.0]):6.0f} ms"
            f"  {self.problem}"
        )


def undisturbed(folder: Path, steps: int) -> list[float]:
    """Losses of the same training, left alone."""
    with Job(folder, stages=STAGES) as job:
        job.wait_steps(steps)
    return _losses(job)


def _losses(job: Job) -> list[float]:
    return [loss for _, loss, _ in job.steps(STAGES - 1)]


def stress(name: str, folder: Path, lines: str, rounds: int, expected: list[float], *, with_gdb: bool) -> Outcome:
    """Inject, ask the agent, close it, see a step go by; `rounds` times, into alternating ranks."""
    made = Outcome(name)
    env = {protocol.DIRECTORY_VARIABLE: str(folder / "s")}
    try:
        with Job(folder, stages=STAGES, lines=lines, env=env) as job:
            for i in range(rounds):
                _once(job, folder, i % STAGES, made, with_gdb=with_gdb)
            job.wait_steps(3)
        mine = _losses(job)
        shared = min(len(mine), len(expected))
        if mine[:shared] != expected[:shared]:
            made.problem = "LOSSES DIFFER"
        elif not all(job.said(rank)["restored"] for rank in range(STAGES)):
            made.problem = "NOT RESTORED"
    except Exception as error:  # one kind of job that fails must not hide the others' figures
        made.problem = f"{type(error).__name__}: {error}"[:300]
    return made


def _once(job: Job, folder: Path, rank: int, made: Outcome, *, with_gdb: bool) -> None:
    pid = job.pids[rank]
    path = protocol.socket_path(folder / "s", pid)
    if why := inject.why_not(pid):
        raise RuntimeError(why)
    began = time.monotonic()
    made.stalls_ms.append(inject.start_agent(pid, with_gdb=with_gdb) * 1e3)
    _until(path.exists, "the agent")
    made.appeared_ms.append((time.monotonic() - began) * 1e3)
    if client.ask(path, "status")["rank"] != rank:
        raise RuntimeError("another rank answers")
    inject.by_ptrace(pid, CLOSE)
    _until(lambda: not path.exists(), "its end")
    job.wait_steps(1)
    made.worked += 1


def _until(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"waited {WAIT_SECONDS:.0f} s for {what}")
        time.sleep(0.005)


def main(rounds: int) -> int:
    print(f"Python {sys.version.split()[0]}, {os.uname().machine}, {os.cpu_count()} processors, "
          f"load {os.getloadavg()[0]:.1f}; {STAGES} ranks of gloo training", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        expected = undisturbed(folder / "alone", 50)
        kinds = [
            ("ptrace", "", rounds, False),
            ("ptrace, contended lock", BUSY, rounds, False),
            ("gdb, asked for by name", "", max(1, rounds // 5), True),
        ]
        failed = False
        for number, (name, lines, many, with_gdb) in enumerate(kinds):
            made = stress(name, folder / str(number), lines, many, expected, with_gdb=with_gdb)
            print(made.row(many), flush=True)
            failed |= bool(made.problem) or made.worked < many
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
