"""Starts the agent in a Python process that nobody prepared.

The one thing that is ever placed into the job is the code of `payload`: it starts a thread that starts the agent.
Python 3.14 and newer offer a way in themselves (PEP 768); before, the main thread is stopped for some milliseconds
and made to call ``Py_AddPendingCall(PyRun_SimpleString, text)``; the interpreter runs the text at its own next safe
point. No breakpoint stays behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bubblescope.attach import elf, process, ptrace
from bubblescope.errors import AttachError

PYTHONS = ((3, 11), (3, 13))
"""First and last version for which placing a call is known to work and the agent's code runs."""

HUNG_SECONDS = 10.0
CALL_SECONDS = 1.0
TRIES = 3
GDB_SECONDS = 30.0
_TRAP_AT, _TEXT_AT, _PAGE = 0, 16, 4096
_FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString")

RISK = (
    "this stops the main thread of a process that was not prepared for it for some milliseconds and makes it run code "
    "of ours; if bubblescope is killed in these milliseconds (kill -9, out of memory), the process can crash"
)


def package_folder() -> Path:
    """The folder of this bubblescope."""
    return Path(__file__).resolve().parents[1]


def payload(folder: Path) -> str:
    """Python text that starts the agent from a thread, raises nothing, and leaves no name behind.

    The job's own bubblescope is used if it has one; else ours, without touching the job's ``sys.path``.
    """
    inner = (
        "import importlib.util as u, sys\n"
        "if 'bubblescope' not in sys.modules and u.find_spec('bubblescope') is None:\n"
        f"    s = u.spec_from_file_location('bubblescope', {str(folder / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(folder)!r}])\n"
        "    m = u.module_from_spec(s); sys.modules['bubblescope'] = m; s.loader.exec_module(m)\n"
        "import bubblescope.attach.agent as a\n"
        "a.start()\n"
    )
    return (
        "try:\n"
        f" __import__('threading').Thread(target=exec, args=({inner!r}, {{}}), name='bubblescope-start', daemon=True)"
        ".start()\n"
        "except BaseException:\n"
        " pass\n"
    )


def why_not(pid: int) -> str:
    """Why the agent cannot be started in that process; "" when it can be tried. Changes nothing."""
    if reason := process.why_not_reachable(pid):
        return reason
    version = process.python_version(pid)
    if version is None:
        return "it is not a Python process"
    if version < PYTHONS[0]:
        return f"it runs Python {version[0]}.{version[1]}, and bubblescope needs {PYTHONS[0][0]}.{PYTHONS[0][1]}"
    if not process.maps_torch(pid):
        return "it has not loaded torch"
    if has_remote_exec(version):
        return ""
    if version > PYTHONS[1]:
        return (
            f"it runs Python {version[0]}.{version[1]}: run bubblescope with the same version, whose sys.remote_exec "
            "is made for this"
        )
    try:
        elf.locate(pid, _FUNCTIONS)
    except elf.NotFound as error:
        return f"its interpreter does not show the functions that are needed (a static build?): {error}"
    except OSError as error:
        return f"its interpreter cannot be read: {error}"
    if not process.makes_progress(pid, HUNG_SECONDS):
        return (
            f"its main thread has done nothing for {HUNG_SECONDS:g} s (hung?); `py-spy dump --pid {pid}` shows where, "
            "without touching it"
        )
    return ""


def start_agent(pid: int, *, with_gdb: bool = False) -> float:
    """Start the agent there; seconds for which the process was stopped. Call `why_not` first.

    That the agent answers is for the caller to check: the text runs when the main thread is back in the interpreter.
    Raises AttachError; then the process goes on as before.
    """
    text = payload(package_folder())
    version = process.python_version(pid)
    if version is not None and has_remote_exec(version):
        return remote_exec(pid, text)
    method: Callable[[int, str], float] = by_gdb if with_gdb else by_ptrace
    return method(pid, text)


# ---- Python's own way in (PEP 768)


def has_remote_exec(version: tuple[int, int]) -> bool:
    """Whether `sys.remote_exec` of this interpreter reaches a process of that version."""
    return hasattr(sys, "remote_exec") and version == sys.version_info[:2]


def remote_exec(pid: int, text: str) -> float:
    """Hand the interpreter a script to run at its next safe point; the process is not stopped.

    The script removes its own file when it has run. Raises AttachError.
    """
    handle, name = tempfile.mkstemp(prefix=f"bubblescope-start-{pid}-", suffix=".py")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"{text}try:\n __import__('os').unlink({name!r})\nexcept BaseException:\n pass\n")
        if os.geteuid() == 0:
            os.chown(name, process.look(pid).uid, -1)  # the job's user reads it
        call: Callable[[int, str], None] = vars(sys)["remote_exec"]
        call(pid, name)
    except (OSError, RuntimeError, ValueError) as error:
        Path(name).unlink(missing_ok=True)
        raise AttachError(
            f"process {pid} does not take a script: {error}",
            hint="is remote debugging switched off there (PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug)?",
        ) from error
    return 0.0


# ---- ptrace


def by_ptrace(pid: int, text: str) -> float:
    """Place the call by ptrace; seconds of the longest stop. Raises AttachError."""
    addresses = elf.locate(pid, _FUNCTIONS)
    longest = 0.0
    problem: Exception | None = None
    for _ in range(TRIES):
        began = time.perf_counter()
        try:
            queued = _place(pid, addresses, text)
        except ptrace.TimedOut as error:
            # The thread itself held the lock that Py_AddPendingCall takes. It is back where it was: once more.
            queued, problem = -1, error
        except (ptrace.PtraceError, OSError) as error:
            raise AttachError(f"process {pid} cannot be entered: {error}", hint=_look(pid)) from error
        longest = max(longest, time.perf_counter() - began)
        if queued == 0:
            return longest
        time.sleep(0.05)
    raise AttachError(f"process {pid} takes no call: {problem or 'its queue is full'}", hint=_look(pid))


def _place(pid: int, addresses: dict[str, int], text: str) -> int:
    data = text.encode() + b"\0"
    size = -(-(_TEXT_AT + len(data)) // _PAGE) * _PAGE
    with ptrace.stopped(pid, CALL_SECONDS) as thread:
        page = thread.mmap_code(size)
        thread.write(page + _TRAP_AT, b"\xcc")
        thread.write(page + _TEXT_AT, data)
        return thread.call(
            addresses["Py_AddPendingCall"], addresses["PyRun_SimpleString"], page + _TEXT_AT, page + _TRAP_AT
        )


def _look(pid: int) -> str:
    return "it goes on as before" if process.exists(pid) else "it has ended; did it end by itself?"


# ---- gdb


def by_gdb(pid: int, text: str) -> float:
    """The same call, placed by gdb; seconds that gdb took. Raises AttachError.

    gdb is never killed: one that takes too long is interrupted, and lets the process go by itself.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        raise AttachError("there is no gdb on this machine", hint="--via inject does without one")
    began = time.perf_counter()
    running = subprocess.Popen(
        [gdb, "-p", str(pid), "-nx", "-batch", *_gdb_commands(text)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = running.communicate(timeout=GDB_SECONDS)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate()
    if "bubblescope-queued 0" not in said:
        lines = [line for line in said.splitlines() if line.strip()]
        raise AttachError(f"gdb could not place the call: {lines[-1] if lines else 'it said nothing'}", hint=_look(pid))
    return time.perf_counter() - began


def _gdb_commands(text: str) -> list[str]:
    """Only libpython's symbols are loaded: those of torch take seconds, and the process would wait for them."""
    data = text.encode() + b"\0"
    size = -(-len(data) // _PAGE) * _PAGE
    mmap = f"((void*(*)(void*,unsigned long,int,int,int,long))mmap)((void*)0,{size}UL,3,0x22,-1,0L)"
    commands = ["set confirm off", "set pagination off", "sharedlibrary libpython", "sharedlibrary libc.so"]
    commands.append(f"set $page = (char*){mmap}")
    for at in range(0, len(data), 256):
        part = data[at : at + 256]
        values = ",".join(str(b) for b in part)
        commands.append(f"set {{unsigned char[{len(part)}]}}($page+{at}) = {{{values}}}")
    commands.append(
        "set $queued = ((int(*)(void*,void*))Py_AddPendingCall)((void*)PyRun_SimpleString, (void*)$page)"
    )
    commands += ['printf "bubblescope-queued %d\\n", $queued', "detach"]
    return ["-iex", "set auto-solib-add off", *(word for one in commands for word in ("-ex", one))]
