"""Starts the user's own launch command so that every Python process of the job can record (`bubblescope run`).

Nothing is installed: the processes find the recorder through environment variables that they inherit, and a folder
on PYTHONPATH whose ``sitecustomize`` prepares it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bubblescope.capture.environment import VARIABLES, Settings
from bubblescope.errors import UsageError

SITE = Path(__file__).resolve().parent / "site"

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def job_environment(settings: Settings, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the job: what this process has, the settings, and our folder first on PYTHONPATH.

    >>> made = job_environment(Settings("record", "/r"), {"PYTHONPATH": "/mine"})
    >>> made["BUBBLESCOPE"], made["PYTHONPATH"].split(os.pathsep)[1:]
    ('record', ['/mine'])
    """
    made = {name: value for name, value in base.items() if name not in VARIABLES}
    behind = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if part and Path(part) != SITE]
    made["PYTHONPATH"] = os.pathsep.join([str(SITE), *behind])
    made.update(settings.variables())
    return made


def standby_line() -> str:
    """For the shell that starts jobs: what makes their ranks wait for an attach, whatever starts them."""
    return f'export BUBBLESCOPE=standby PYTHONPATH={shlex.quote(str(SITE))}"${{PYTHONPATH:+:$PYTHONPATH}}"'


def stands_by(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a job started with these variables has an agent in each rank, also where it imports no bubblescope."""
    folders = [Path(part) for part in environ.get("PYTHONPATH", "").split(os.pathsep)]
    return environ.get("BUBBLESCOPE") == "standby" and SITE in folders


def default_folder(base: Mapping[str, str] = os.environ, now: float | None = None) -> Path:
    """One folder per job: named by what all nodes of the job know, else by the time.

    >>> default_folder({"SLURM_JOB_ID": "77"}).as_posix()
    'runs/slurm-77'
    """
    if job := base.get("SLURM_JOB_ID"):
        restart = base.get("SLURM_RESTART_COUNT", "0")
        return Path("runs") / f"slurm-{_safe(job)}{'' if restart == '0' else f'-{_safe(restart)}'}"
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S", time.localtime(now))


def _safe(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)


def launch(command: Sequence[str], settings: Settings, *, quiet_stdout: bool = False) -> int:
    """Run the command to its end. Its exit status, or minus the signal that ended it.

    quiet_stdout: what it prints goes to stderr, because stdout is wanted for something else.

    Signals that reach this process go to the command. Raises UsageError when it cannot be started.
    """
    try:
        job = subprocess.Popen(
            list(command), env=job_environment(settings), stdout=sys.stderr if quiet_stdout else None
        )
    except OSError as error:
        raise UsageError(
            f"cannot start '{command[0]}': {error.strerror or error}",
            hint="give the command as you would type it, after `--`",
        ) from error
    with _signals_to(job):
        return job.wait()


@contextlib.contextmanager
def _signals_to(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass on what is sent to us. What the terminal sends goes to the whole group: then the job has it already."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground():
            return
        if job.poll() is None:
            job.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether the terminal sends its signals to our process group."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def recorded_sizes(folder: Path, wait_s: float = 5.0) -> dict[str, int] | None:
    """Name -> bytes of the ranks' files there; None when the file system does not answer in time."""
    found: list[dict[str, int]] = []

    def look() -> None:
        sizes = {}
        for path in folder.glob("rank-*.jsonl"):
            with contextlib.suppress(OSError):  # gone meanwhile
                sizes[path.name] = path.stat().st_size
        found.append(sizes)

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    looker.join(wait_s)
    return found[0] if found else None


def written_files(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Names of the ranks' files that were written between two looks: those of an earlier run do not grow.

    >>> written_files({"rank-00000.jsonl": 9}, {"rank-00000.jsonl": 9, "rank-00000.71.jsonl": 5})
    ['rank-00000.71.jsonl']
    """
    return sorted(name for name, size in after.items() if size > before.get(name, 0))


def ranks_of(files: Iterable[str]) -> int:
    """How many ranks these files are of: one that was started again has two.

    >>> ranks_of(["rank-00000.71.jsonl", "rank-00000.72.jsonl"])
    1
    """
    return len({name.split(".")[0] for name in files})


def end_like(status: int) -> int:
    """End this process as the command ended: by the same signal, where one ended it. Else returns the exit status."""
    if status >= 0:
        return status
    number = -status
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    return 128 + number
