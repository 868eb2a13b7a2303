"""Trainings to attach to, `bubblescope attach` beside them, and what must hold of a job that was attached to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bubblescope.attach import client, protocol
from tests.support.attach_trainer import Job
from tests.support.sleeping import ROOT


def job(folder: Path, **changes: Any) -> Job:
    """A job whose agents have their sockets in its folder."""
    env = {"BUBBLESCOPE_SOCKET_DIR": str(folder / "s"), **changes.pop("env", {})}
    return Job(folder, env=env, **changes)


def sockets(one: Job) -> list[Path]:
    return [protocol.socket_path(one.folder / "s", pid) for pid in one.pids]


def begin(running: Job, *arguments: str) -> subprocess.Popen[str]:
    """`bubblescope attach ARG…` beside a running job."""
    return subprocess.Popen(
        [sys.executable, "-m", "bubblescope", "attach", *arguments],
        env={**os.environ, "BUBBLESCOPE_SOCKET_DIR": str(running.folder / "s"), "PYTHONPATH": str(ROOT)},
        cwd=running.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def attach(running: Job, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    one = begin(running, *arguments)
    out, errors = one.communicate(timeout=200)
    return subprocess.CompletedProcess(arguments, one.returncode, out, errors)


def report(out: Path) -> dict[str, Any]:
    assert (out / "report.html").stat().st_size > 10_000
    made: dict[str, Any] = json.loads((out / "report.json").read_text())
    return made


def losses(one: Job) -> list[float]:
    return [loss for _, loss, _ in one.steps(one.stages - 1)]


def same_losses(one: Job, undisturbed: list[float]) -> None:
    mine = losses(one)
    shared = min(len(mine), len(undisturbed))
    assert shared > 20
    assert mine[:shared] == undisturbed[:shared]


def as_it_was(one: Job) -> None:
    for rank in range(one.stages):
        said = one.said(rank)
        assert said["restored"] is True
        assert said["optimizer_hooks"] == 0
        assert not {"pandas", "plotly"} & set(said["modules"])


def fastest_step(one: Job, first: int, last: int) -> float:
    """Seconds: what the job can do when nothing else takes the processors."""
    return min(seconds for _, _, seconds in one.steps(0)[first:last])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.01)


def wait_for_state(path: Path, state: str) -> None:
    def there() -> bool:
        window = client.ask(path, "status")["window"]
        return window is not None and window["state"] == state

    wait_until(there, f"never {state}")
