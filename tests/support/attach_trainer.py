"""A pipeline that trains until told to stop, one real process per rank, started as a launcher would start it.

Rank variables are in each process's environment from its first instruction, as with torchrun. Each rank writes a
line per step (number, loss, seconds) into ``steps-RANK.txt`` in the job's folder; a file ``stop`` there ends the
training: the last stage names the last step, so that all ranks leave together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.sleeping import ROOT, WIDTH, SleepRun, _originals, build, free_port


@dataclass
class Job:
    """A running job. ``with Job(folder) as job: …`` starts it, waits until all ranks train, and ends it after.

    standby: ranks have an agent. env: further variables. lines: code run in each rank before training.
    """

    folder: Path
    stages: int = 4
    schedule: str = "1F1B"
    microbatches: int = 4
    standby: bool = False
    env: dict[str, str] = field(default_factory=dict)
    lines: str = ""
    python: str = sys.executable
    sleep_s: float = 0.001
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def __enter__(self) -> Job:
        self.folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        for rank in range(self.stages):
            self.processes.append(self._start(rank, port))
        self.wait_steps(3)
        return self

    def _start(self, rank: int, port: str) -> subprocess.Popen[str]:
        plan = {
            "folder": str(self.folder),
            "stages": self.stages,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "standby": self.standby,
            "lines": self.lines,
            "sleep_s": self.sleep_s,
        }
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **self.env,
        }
        with (self.folder / f"log-{rank}.txt").open("w") as log:
            return subprocess.Popen(
                [self.python, "-m", "tests.support.attach_trainer", json.dumps(plan)],
                cwd=self.folder,
                env=env,
                stdout=log,
                stderr=log,
                text=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def finish(self) -> None:
        """End the training in good order; raise RuntimeError with the log of a rank that did not end well."""
        (self.folder / "stop").touch()
        for rank, process in enumerate(self.processes):
            if process.wait(60) != 0:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}:\n{self.log(rank)}")

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}.txt").read_text()

    def steps(self, rank: int) -> list[tuple[int, float, float]]:
        """(step, loss, seconds) so far; the loss is nan except on the last stage."""
        path = self.folder / f"steps-{rank}.txt"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        rows = [line.split() for line in whole.splitlines()]
        return [(int(a), float(b), float(c)) for a, b, c in rows]

    def wait_steps(self, more: int, timeout_s: float = 90.0) -> None:
        """Until every rank has done `more` further steps: the proof that training goes on."""
        marks = [len(self.steps(rank)) + more for rank in range(self.stages)]
        ends = time.monotonic() + timeout_s
        while any(len(self.steps(rank)) < mark for rank, mark in enumerate(marks)):
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    raise RuntimeError(f"rank {rank} ended with {process.returncode}:\n{self.log(rank)}")
            if time.monotonic() > ends:
                raise RuntimeError(f"no progress in {timeout_s} s: {[len(self.steps(r)) for r in range(self.stages)]}")
            time.sleep(0.02)

    def said(self, rank: int) -> dict[str, Any]:
        """What that rank wrote when it ended: `restored`, whether every function is the original again."""
        result: dict[str, Any] = json.loads((self.folder / f"result-{rank}.json").read_text())
        return result


# ---- inside the processes


def main(plan: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    import torch.utils.data

    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(plan["folder"])
    torch.set_num_threads(1)
    if plan["standby"]:
        from bubblescope.attach import agent

        agent.start()
    dist.init_process_group("gloo")
    pause = plan["sleep_s"]
    run = SleepRun(
        plan["schedule"], world, plan["microbatches"], forward_s=pause, backward_s=2 * pause, steps=1
    )
    schedule, parameters, _group, first, last = build(run, rank)
    before = [*_originals(), torch.optim.Optimizer.zero_grad]
    namespace: dict[str, Any] = {"rank": rank, "torch": torch}
    exec(plan["lines"], namespace)  # noqa: S102 -- the test's own text
    each_step = namespace.get("each_step", lambda index: None)
    torch.manual_seed(7)
    x, y = torch.randn(run.microbatches, WIDTH), torch.randn(run.microbatches, WIDTH)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    index = 0
    with (folder / f"steps-{rank}.txt").open("a", buffering=1) as lines:
        while not _stop(folder, index, rank):
            began = time.perf_counter()
            each_step(index)
            optimizer.zero_grad()
            losses: list[Any] = []
            schedule.step(*((x,) if first else ()), **({"target": y, "losses": losses} if last else {}))
            optimizer.step()
            loss = float(sum(float(one.detach()) for one in losses) / len(losses)) if losses else float("nan")
            lines.write(f"{index} {loss!r} {time.perf_counter() - began!r}\n")
            index += 1
    after = [*_originals(), torch.optim.Optimizer.zero_grad]
    hooks = sys.modules["torch.optim.optimizer"]
    said = {
        "restored": all(a is b for a, b in zip(before, after, strict=True)),
        "optimizer_hooks": len(hooks._global_optimizer_pre_hooks) + len(hooks._global_optimizer_post_hooks),
        "modules": sorted(name for name in sys.modules if "." not in name),
        "main": sorted(vars(sys.modules["__main__"])),
    }
    (folder / f"result-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def _stop(folder: Path, index: int, rank: int) -> bool:
    """Rank 0 sees the file and names a step that nobody has reached yet: ranks are never two steps apart."""
    last = folder / "last-step"
    if rank == 0 and (folder / "stop").exists() and not last.exists():
        beside = folder / "last-step.tmp"
        beside.write_text(str(index + 3))
        beside.rename(last)
    return last.exists() and index >= int(last.read_text())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
