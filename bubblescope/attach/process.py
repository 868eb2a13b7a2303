"""What /proc says about a process, and why one cannot be entered. Reads only."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

from bubblescope.attach.elf import mappings

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_LIBPYTHON = re.compile(r"(?:^|/)(?:lib)?python(3\.\d+)")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_RANK_FILE = re.compile(r"rank-\d+(?:\.\d+(?:-\d+)?)?\.jsonl")
_TAKES_A_WORD = ("-W", "-X", "--check-hash-based-pycs")
_STOPPED = ("T", "t")
_SIGTRAP_BIT = 1 << 4
_CAP_SYS_PTRACE = 1 << 19


@dataclass(frozen=True)
class Process:
    """pid, its parent, its user (effective), its words, and its variables as they were when it started."""

    pid: int
    parent: int
    uid: int
    command: tuple[str, ...]
    environ: dict[str, str]


def look(pid: int) -> Process:
    """Raises OSError when it is gone or belongs to somebody who may not be looked at."""
    fields = status(pid)
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return Process(pid, int(fields["PPid"]), int(fields["Uid"].split()[1]), tuple(words[:-1]), environ)


def program(command: tuple[str, ...]) -> str:
    """What runs: the executable, or with Python the script or module.

    >>> program(("/venv/bin/python3", "-u", "-m", "torch.distributed.run", "train.py"))
    'torch.distributed.run'
    """
    words = iter(command)
    executable = next(words, "")
    if not _PYTHON.fullmatch(executable):
        return executable
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in _TAKES_A_WORD:
            next(words, "")
        elif not word.startswith("-"):
            return word
    return executable


def status(pid: int) -> dict[str, str]:
    """/proc/PID/status by name. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def exists(pid: int) -> bool:
    """Whether it lives; a zombie does not."""
    try:
        return not status(pid)["State"].startswith(("Z", "X"))
    except (OSError, KeyError):
        return False


def stopped(pid: int) -> bool:
    """Whether it is there and does not run: by a signal, or in a debugger."""
    try:
        return status(pid)["State"].startswith(_STOPPED)
    except (OSError, KeyError):
        return False


def maps_torch(pid: int) -> bool:
    """Whether it has torch's libraries in memory."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    return "libtorch_python.so" in text or "libtorch_cpu.so" in text


def records_into(pid: int) -> Path | None:
    """The folder of a rank's file that it holds open: its recorder's, whoever started that."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                path = link.readlink()
            except FileNotFoundError:
                continue  # closed meanwhile
            if _RANK_FILE.fullmatch(path.name):
                return path.parent
    except OSError:
        return None
    return None


def python_version(pid: int) -> tuple[int, int] | None:
    """(3, 11) from the names of libpython, the executable or the standard library; None when they do not tell."""
    try:
        paths = [str(Path(f"/proc/{pid}/exe").readlink()), *(m.path for m in mappings(pid))]
    except OSError:
        return None
    for path in sorted(set(paths), key=lambda p: "libpython" not in p):
        if found := _LIBPYTHON.search(path):
            major, _, minor = found[1].partition(".")
            return int(major), int(minor)
    return None


def why_not_reachable(pid: int) -> str:
    """Why no call can be placed into that process from here; "" when it can. Neither stops nor changes it."""
    try:
        fields = status(pid)
        uid = int(fields["Uid"].split()[1])
        if uid != os.geteuid() and os.geteuid() != 0:
            return f"it belongs to user {uid}, and you are user {os.geteuid()}"
        if platform.machine() != "x86_64" or platform.system() != "Linux":
            return f"injection is written for x86-64 Linux, and this is {platform.machine()} {platform.system()}"
        if reason := _namespace(pid) or _forbidden(pid, fields):
            return reason
        return _cannot_take_part(pid, fields)
    except (OSError, KeyError, ValueError) as error:
        return f"it cannot be looked at: {error}"


def in_container(pid: int) -> bool:
    """Whether it counts processes by itself: no number that it says is one of ours."""
    try:
        return len(status(pid).get("NSpid", "").split()) > 1
    except OSError:
        return False


def _namespace(pid: int) -> str:
    if in_container(pid):
        return "it runs in a container; run bubblescope inside that container"
    for kind in ("pid", "mnt"):
        if Path(f"/proc/{pid}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            return f"it runs in another {kind} namespace (a container); run bubblescope inside that container"
    return ""


def _forbidden(pid: int, fields: dict[str, str]) -> str:
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    may = bool(int(status(os.getpid())["CapEff"], 16) & _CAP_SYS_PTRACE)
    if scope == "3" or (scope in ("1", "2") and not may):
        return f"the kernel forbids it (kernel.yama.ptrace_scope is {scope}); root can, or a lower ptrace_scope"
    tracer = fields.get("TracerPid", "0")
    if tracer != "0":
        return f"process {tracer} (a debugger?) is attached to it already"
    return ""


def _cannot_take_part(pid: int, fields: dict[str, str]) -> str:
    if fields["State"].startswith(_STOPPED):
        return "it is stopped (as by Ctrl-Z or a debugger)"
    if fields["State"].startswith(("Z", "X")):
        return "it has ended"
    if int(fields.get("SigBlk", "0"), 16) & _SIGTRAP_BIT:
        return "its main thread blocks SIGTRAP, so a call placed into it could not be ended safely"
    return ""


def makes_progress(pid: int, within_s: float) -> bool:
    """Whether the main thread used the processor, or woke up, within that time: a hung rank does neither."""
    before = _activity(pid)
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        time.sleep(0.02)
        if _activity(pid) != before:
            return True
    return False


def _activity(pid: int) -> tuple[str, ...]:
    task = Path(f"/proc/{pid}/task/{pid}")
    try:
        times = task.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]
        switches = [line for line in task.joinpath("status").read_text().splitlines() if "ctxt_switches" in line]
    except OSError:
        return ()
    return (*times, *switches)
