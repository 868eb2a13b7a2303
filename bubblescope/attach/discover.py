"""Which training ranks run on this host, of which job, and how each can be reached. Reads /proc and asks agents."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bubblescope._ranks import numbers_of_launcher
from bubblescope.attach import client, process, protocol
from bubblescope.attach.process import Process
from bubblescope.capture.environment import Settings
from bubblescope.errors import AttachError, UsageError

_LAUNCHERS = re.compile(
    r"(?:.*/)?(?:torchrun|deepspeed|accelerate|srun|mpirun|mpiexec(?:\.\w+)?|orterun|prterun)"
    r"|torch\.distributed\.(?:run|launch)|deepspeed\.launcher\.\w+|accelerate\.commands\.\w+"
)
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_FRAMEWORKS = ("megatron", "deepspeed", "torchtitan")
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """One training process. rank, world: None when nobody says. agent: its socket, when it has one.

    trouble: why the agent that it has cannot be used. recording: the folder that it records into by itself, or "".
    kineto: it polls for a profiler daemon. job: the same text in ranks of one job.
    """

    pid: int
    rank: int | None
    world: int | None
    uid: int
    framework: str
    job: str
    agent: Path | None = None
    trouble: str = ""
    recording: str = ""
    kineto: bool = False
    environ: Mapping[str, str] | None = None
    profiler: bool = False

    @property
    def prepared(self) -> str:
        """How it can be reached without injecting: "agent", "kineto" or "no"."""
        return "agent" if self.agent is not None else "kineto" if self.kineto else "no"

    @property
    def stands_by(self) -> bool:
        """Whether it was started to have an agent, which waits for a framework that runs pipelines to be imported."""
        return self.agent is None and (self.environ or {}).get("BUBBLESCOPE") == "standby"

    @property
    def label(self) -> str:
        return f"rank {self.rank} (process {self.pid})" if self.rank is not None else f"process {self.pid}"


def ranks(uid: int | None = None) -> list[Rank]:
    """That user's (this one's) training ranks on this host, by job and rank, without launchers and helpers."""
    owner = os.geteuid() if uid is None else uid
    processes = {pid: one for pid, one in _processes().items() if one.uid == owner}
    agents = _agents(processes, owner)
    found: dict[int, Rank] = {}
    for pid, one in processes.items():
        if pid in agents or (_numbers(one)[0] is not None and process.maps_torch(pid)):
            found[pid] = describe(one, agents.get(pid))
    launchers = _launchers(processes, found)
    kept = [
        rank
        for pid, rank in found.items()
        if pid not in launchers and not _is_helper(processes[pid], processes, found, launchers)
    ]
    return sorted(kept, key=lambda r: (r.job, r.rank is None, r.rank or 0, r.pid))


def describe(one: Process, agent: Path | None) -> Rank:
    """What is known of a process, without deciding whether it is a rank; a live agent knows best."""
    rank, world = _numbers(one)
    made = Rank(
        pid=one.pid,
        rank=rank,
        world=world,
        uid=one.uid,
        framework=_framework(one.command),
        job=job_of(one.environ),
        recording=_recording(one, rank),
        kineto=one.environ.get("KINETO_USE_DAEMON", "") not in ("", "0") and process.maps_torch(one.pid),
        environ=one.environ,
    )
    if agent is None:
        return made
    try:
        said = client.ask(agent, "status", timeout_s=2.0)
    except AttachError as error:
        return replace(made, trouble=_trouble(one.pid, error))
    return replace(
        made,
        agent=agent,
        rank=_number(said.get("rank"), rank),
        world=_number(said.get("world"), world),
        framework=client.printable(said.get("framework") or made.framework)[:40],
        recording=client.printable("" if _attached(said) else said.get("recording") or ""),
        profiler=said.get("profiler") is True,
    )


def _attached(said: dict[str, Any]) -> bool:
    """Whether it is an attach that records there; of that the agent speaks for itself."""
    window = said.get("window")
    return isinstance(window, dict) and window.get("state") not in ("done", "failed")


def _recording(one: Process, rank: int | None) -> str:
    """By its open file; before that is there, by what `bubblescope run` asked of it."""
    if folder := process.records_into(one.pid):
        return client.printable(folder)
    try:
        settings = Settings.read(one.environ)
    except UsageError:
        return ""
    if settings.mode != "record" or rank not in (settings.ranks or (rank,)):
        return ""
    files = Path(settings.out).glob("rank-*.jsonl" if rank is None else f"rank-{rank:05d}*.jsonl")
    ended = (socket.gethostname(), one.pid) in map(writer_of, files)
    return "" if ended else client.printable(settings.out)


def _trouble(pid: int, error: AttachError) -> str:
    """Why the agent there gave no answer that can be used; "" for a socket that an earlier process left."""
    if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
        return ""
    if process.stopped(pid):
        return f"the process is stopped, as by Ctrl-Z or a debugger (kill -CONT {pid} lets it go on)"
    return f"{error.what} ({error.hint})" if error.hint else error.what


def one(pid: int) -> Rank:
    """That process, rank or not. Raises AttachError when there is none, or it cannot be looked at."""
    try:
        looked = process.look(pid)
    except FileNotFoundError:
        raise AttachError(f"there is no process {pid}", hint="bubblescope doctor lists the training ranks") from None
    except PermissionError:
        raise AttachError(
            f"process {pid} may not be looked at: it is another user's, or protected",
            hint="attach as its user, or as root",
        ) from None
    except (OSError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AttachError(f"process {pid} cannot be looked at: {reason} (a kernel's thread?)") from error
    return describe(looked, _agent_of(looked))


def of_process(pid: int) -> list[Rank]:
    """The rank that it is, the ranks that it started (a launcher), or the rank that it works for (a helper).

    A process that has nothing to do with ranks stands for itself. Raises AttachError when there is no such process,
    or it is a launcher whose ranks are not there.
    """
    named = one(pid)
    processes = _processes()
    found = {rank.pid: rank for rank in ranks(named.uid)}
    if pid in found:
        return [found[pid]]
    if below := [rank for rank in found.values() if pid in _ancestors(rank.pid, processes)]:
        return below
    if above := [found[parent] for parent in _ancestors(pid, processes) if parent in found]:
        return above[:1]
    if pid in processes and (name := _launcher_name(processes[pid])):
        raise AttachError(
            f"process {pid} is a launcher ({name}), and no training rank runs below it",
            hint="ranks can be attached to once they have imported torch; bubblescope doctor lists them",
        )
    return [named]


def of_folder(folder: Path) -> list[Rank]:
    """Ranks whose job has to do with that folder, there or not: it is their working folder, they were started to write
    there, or a recording in it names their processes."""
    wanted = folder.resolve()
    pids = _recorded_pids(wanted)
    return [rank for rank in ranks() if rank.pid in pids or wanted in _folders(rank)]


def job_of(environ: Mapping[str, str]) -> str:
    """The same text for ranks of one job.

    >>> job_of({"MASTER_ADDR": "h0", "MASTER_PORT": "29500", "RANK": "3"})
    'MASTER_ADDR=h0 MASTER_PORT=29500'
    """
    return client.printable(" ".join(f"{name}={environ[name]}" for name in _JOB_VARIABLES if environ.get(name)))


def _folders(rank: Rank) -> set[Path]:
    environ = rank.environ or {}
    named = [v for k, v in environ.items() if k.startswith("BUBBLESCOPE_") and v.startswith("/")]
    try:
        return {Path(f"/proc/{rank.pid}/cwd").resolve(), *(Path(v).resolve() for v in named)}
    except OSError:
        return set()


def writer_of(recording: Path) -> tuple[object, object]:
    """Host and pid that wrote a rank file; None where its header does not tell."""
    header = _header(recording) or {}
    return header.get("host"), header.get("pid")


def _recorded_pids(folder: Path) -> set[int]:
    here = socket.gethostname()
    headers = [_header(p) for p in [*folder.glob("rank-*.jsonl"), *folder.glob("recording/rank-*.jsonl")]]
    return {h["pid"] for h in headers if h is not None and h.get("host") == here and type(h.get("pid")) is int}


def _header(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(1 << 20))
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def _processes() -> dict[int, Process]:
    """All that may be looked at."""
    return {one.pid: one for one in map(_try, _pids()) if one is not None}


def _pids() -> Iterable[int]:
    return [int(name.name) for name in Path("/proc").iterdir() if name.name.isdecimal()]


def _try(pid: int) -> Process | None:
    try:
        return process.look(pid)
    except (OSError, KeyError, ValueError):  # gone meanwhile, another user's, or a kernel thread
        return None


def _numbers(one: Process) -> tuple[int | None, int | None]:
    """Rank and world that the process was started with."""
    return numbers_of_launcher(one.environ)


def _number(value: Any, default: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else default


def _agents(processes: Mapping[int, Process], uid: int) -> dict[int, Path]:
    folders = {protocol.directory_for(uid)}
    folders |= {protocol.directory_for(one.uid, one.environ) for one in processes.values()}
    return {pid: path for folder in folders for pid, path in client.sockets(folder) if pid in processes}


def _agent_of(one: Process) -> Path | None:
    """Its socket, where its own variables or ours put it."""
    for environ in (one.environ, None):
        path = protocol.socket_path(protocol.directory_for(one.uid, environ), one.pid)
        if path.is_socket() or path.is_symlink():
            return path
    return None


def _ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """Its parent, the parent of that, and so on."""
    found: list[int] = []
    while pid in processes and processes[pid].parent not in found:
        pid = processes[pid].parent
        found.append(pid)
    return found


def _launchers(processes: Mapping[int, Process], found: Mapping[int, Rank]) -> set[int]:
    """Those of `found` that only started ranks: an agent may be in them, and under srun they have srun's number.

    Helpers inherit the number of their rank, so numbers below that are not a process's own are those of ranks. Where
    there is a single rank, with the same number, the launcher is told by its name.
    """
    below: dict[int, set[int]] = {pid: set() for pid in found}
    for pid, rank in found.items():
        for parent in _ancestors(pid, processes):
            if parent in below and rank.rank is not None:
                below[parent].add(rank.rank)
    return {
        pid
        for pid, numbers in below.items()
        if numbers - _own(processes[pid], found[pid]) or (numbers and _launcher_name(processes[pid]))
    }


def _own(one: Process, rank: Rank) -> set[int | None]:
    """Its numbers: as it was started, and as its agent says."""
    return {_numbers(one)[0], rank.rank}


def _is_helper(one: Process, processes: Mapping[int, Process], found: Mapping[int, Rank], launchers: set[int]) -> bool:
    """DataLoader workers and resource trackers inherit the rank of the process that started them."""
    if found[one.pid].agent is not None:
        return False
    if any(text in word for word in one.command for text in _HELPERS):
        return True
    served = (p for p in _ancestors(one.pid, processes) if p in found and p not in launchers)
    return any(_numbers(one)[0] in _own(processes[p], found[p]) for p in served)


def _launcher_name(one: Process) -> str:
    """Of a process that only starts others, as far as its name tells; else ""."""
    program = process.program(one.command)
    return program.rpartition("/")[2] if _LAUNCHERS.fullmatch(program) else ""


def _framework(command: tuple[str, ...]) -> str:
    text = " ".join(command).lower()
    return next((name for name in _FRAMEWORKS if name in text), "torch")
