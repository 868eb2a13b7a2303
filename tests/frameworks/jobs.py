"""Starts the training scripts of this folder, by torchrun or another launcher, with and without `bubblescope run`."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-frameworks" / "bin"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
PYTHON = str(BIN / "python")
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")


def tasks(kind: str, *before: str) -> tuple[str, ...]:
    """A launcher that sets the variables of that `kind` only; before: what stands between it and Python."""
    return PYTHON, str(SCRIPTS / "start_tasks.py"), kind, "2", *before, PYTHON


@dataclass(frozen=True)
class Ended:
    """A job that has ended: losses of each step (None when it wrote none), exit status, what it said."""

    losses: Any
    status: int
    output: str


def job(
    folder: Path,
    script: str,
    *arguments: str,
    run: tuple[str, ...] | None = None,
    launcher: tuple[str, ...] = TORCHRUN,
    environment: dict[str, str] | None = None,
    file_bytes: int | None = None,
    timeout_s: float = 240.0,
) -> Ended:
    """Run `script` on two ranks. run: arguments of `bubblescope run` before the command; None = without us.

    launcher: the command that starts the ranks, up to the script.

    file_bytes: no file of the job can grow beyond it, as on a disk that is full.
    """
    assert BIN.exists(), "there is no .venv-frameworks: scripts/test makes it"
    losses = folder / "losses.json"
    losses.unlink(missing_ok=True)
    command = [*launcher, str(SCRIPTS / script), *arguments, "--losses", str(losses)]
    if run is not None:
        command = [str(BIN / "bubblescope"), "run", *run, "--", *command]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        preexec_fn=None if file_bytes is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes,) * 2),
        check=False,
    )
    return Ended(read_losses(losses), ended.returncode, ended.stdout)


def read_losses(path: Path) -> Any:
    """What a script wrote, None when it wrote nothing."""
    return json.loads(path.read_text()) if path.exists() else None
