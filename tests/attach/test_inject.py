"""The text that is placed into a process, the refusals, and the ptrace calls on processes in every kind of wait."""

from __future__ import annotations

import ast
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bubblescope.attach import client, elf, inject, process, protocol, ptrace
from bubblescope.errors import AttachError
from tests.support.attach_jobs import wait_until
from tests.support.attach_stress import CLOSE
from tests.support.sleeping import ROOT


def wait_for(path: Path, timeout_s: float = 10.0) -> bool:
    ends = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    return path.exists()


# ---- the text


def run_payload(tmp_path: Path, after: str = "", folder: Path | None = None) -> str:
    """Run the payload as the interpreter would (PyRun_SimpleString in __main__), in one without our packages."""
    script = (
        "import ctypes, sys, time\nkeep = None; keep = set(globals())\n"
        f"text = {inject.payload(folder or inject.package_folder())!r}.encode(); keep.add('text')\n"
        "assert ctypes.pythonapi.PyRun_SimpleString(text) == 0\n"
        "time.sleep(1.5)\nprint(sorted(set(globals()) - keep))\n"
        f"{after}"
    )
    env = {"BUBBLESCOPE_SOCKET_DIR": str(tmp_path / "s"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [str(Path(sys.executable).resolve()), "-I", "-c", script],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_payload_starts_the_agent_where_bubblescope_is_not_installed_and_leaves_no_name(tmp_path: Path) -> None:
    after = (
        "import os, pathlib; p = pathlib.Path(os.environ['BUBBLESCOPE_SOCKET_DIR'])\n"
        "print([x.name == f'{os.getpid()}.sock' for x in p.iterdir()], sys.modules['bubblescope'].__file__)\n"
        f"print({str(ROOT)!r} in sys.path)"
    )
    said = run_payload(tmp_path, after=after).splitlines()
    assert said == ["[]", f"[True] {inject.package_folder() / '__init__.py'}", "False"]


def test_a_payload_that_cannot_work_prints_but_never_raises(tmp_path: Path) -> None:
    said = run_payload(tmp_path, after="print('lives')", folder=tmp_path / "gone")
    assert "lives" in said
    assert "FileNotFoundError" in said


def test_the_payload_is_harmless_twice(tmp_path: Path) -> None:
    text = inject.payload(inject.package_folder())
    after = f"ctypes.pythonapi.PyRun_SimpleString({text!r}.encode()); time.sleep(0.5)\nimport threading\n" + (
        "print(sum(t.name == 'bubblescope-agent' for t in threading.enumerate()))"
    )
    assert run_payload(tmp_path, after=after).splitlines() == ["[]", "1"]


# ---- refusals


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(0.3)
    yield child
    child.kill()
    child.wait()


def test_a_plain_python_process_without_torch_is_refused(sleeper: subprocess.Popen[bytes]) -> None:
    assert inject.why_not(sleeper.pid) == "it has not loaded torch"


def test_a_process_that_is_no_python_is_refused() -> None:
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        time.sleep(0.1)
        assert inject.why_not(child.pid) == "it is not a Python process"
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_is_refused() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    assert "cannot be looked at" in inject.why_not(child.pid)


def test_a_stopped_process_is_refused(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert "it is stopped" in inject.why_not(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGCONT)


def test_a_hung_main_thread_is_refused(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "maps_torch", lambda pid: True)
    monkeypatch.setattr(inject, "HUNG_SECONDS", 1.0)
    assert "hung" in inject.why_not(sleeper.pid)


@pytest.mark.parametrize(
    ("version", "reason"), [((3, 9), "runs Python 3.9"), ((3, 14), "sys.remote_exec"), ((3, 15), "sys.remote_exec")]
)
def test_other_versions_of_python_are_refused_with_the_reason(
    version: tuple[int, int], reason: str, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "maps_torch", lambda pid: True)
    monkeypatch.setattr(process, "python_version", lambda pid: version)
    assert reason in inject.why_not(sleeper.pid)


def test_an_interpreter_without_the_functions_is_refused(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "maps_torch", lambda pid: True)
    monkeypatch.setattr(inject, "_FUNCTIONS", ("Py_AddPendingCall", "Py_NoSuchFunction"))
    assert "static build" in inject.why_not(sleeper.pid)
    assert "Py_NoSuchFunction" in inject.why_not(sleeper.pid)


def test_another_processor_is_refused(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in inject.why_not(sleeper.pid)


def test_another_users_process_is_refused(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "and you are user 12345" in inject.why_not(sleeper.pid)


@pytest.mark.parametrize(("scope", "refused"), [("0", False), ("1", True), ("2", True), ("3", True)])
def test_ptrace_scope_is_respected(
    scope: str, refused: bool, sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yama = tmp_path / "ptrace_scope"
    yama.write_text(f"{scope}\n")
    monkeypatch.setattr(process, "_YAMA", yama)
    monkeypatch.setattr(process, "_CAP_SYS_PTRACE", 0)  # as if we had no such capability
    reason = process.why_not_reachable(sleeper.pid)
    assert ("ptrace_scope" in reason) is refused


def test_a_container_is_refused(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    real = process.status
    monkeypatch.setattr(process, "status", lambda pid: {**real(pid), "NSpid": f"{pid}\t7"})
    assert "container" in process.why_not_reachable(sleeper.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a namespace")
def test_a_real_pid_namespace_is_refused() -> None:
    child = subprocess.Popen(["unshare", "--pid", "--fork", sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.5)
        inner = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])
        assert "container" in inject.why_not(inner)
        os.kill(inner, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()


def test_a_process_under_a_debugger_is_refused(sleeper: subprocess.Popen[bytes]) -> None:
    with ptrace.stopped(sleeper.pid, 1.0):
        reason = process.why_not_reachable(sleeper.pid)
    assert "attached to it already" in reason


# ---- sys.remote_exec, of which no interpreter is at hand: a fake of PEP 768


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    seen = SimpleNamespace(calls=[], error=None)

    def fake(pid: int, script: str) -> None:
        seen.calls.append((pid, script, Path(script).read_text()))
        if seen.error:
            raise seen.error

    monkeypatch.setattr(sys, "remote_exec", fake, raising=False)
    monkeypatch.setattr(process, "python_version", lambda pid: sys.version_info[:2])
    return seen


def test_where_python_offers_a_way_in_it_is_taken(remote: SimpleNamespace) -> None:
    assert inject.start_agent(os.getpid()) == 0.0
    ((pid, script, text),) = remote.calls
    assert pid == os.getpid()
    compile(text, script, "exec")
    assert inject.payload(inject.package_folder()) in text
    Path(script).unlink()


def test_its_script_removes_itself_when_it_has_run(remote: SimpleNamespace, tmp_path: Path) -> None:
    inject.start_agent(os.getpid())
    script = remote.calls[0][1]
    env = {**os.environ, "BUBBLESCOPE_SOCKET_DIR": str(tmp_path / "s")}
    subprocess.run([sys.executable, script], check=True, env=env)
    assert not Path(script).exists()


def test_a_process_that_forbids_it_is_reported_and_no_script_stays(remote: SimpleNamespace) -> None:
    remote.error = RuntimeError("Remote debugging is not enabled in the remote process")
    with pytest.raises(AttachError, match="not enabled") as caught:
        inject.start_agent(os.getpid())
    assert "PYTHON_DISABLE_REMOTE_DEBUG" in caught.value.hint
    assert not Path(remote.calls[0][1]).exists()


# ---- ptrace on real processes

WAITS = {
    "computing": "sum(range(1000))",
    "sleep": "time.sleep(0.3)",
    "recv": "a, b = socket.socketpair(); threading.Timer(0.4, lambda: b.send(b'x')).start(); a.recv(1)",
    "select": "select.select([], [], [], 0.3)",
    "lock": "l = threading.Lock(); l.acquire(); threading.Timer(0.4, l.release).start(); l.acquire()",
    "pipe": "r, w = os.pipe(); threading.Timer(0.4, lambda: os.write(w, b'x')).start(); os.read(r, 1)",
    "threads": "[threading.Thread(target=lambda: [sum(range(1000)) for _ in range(10**9)], daemon=True).start()"
    " for _ in range(3 * (threading.active_count() < 3))]; sum(range(1000))",
    "numpy": "import numpy; x = numpy.ones((64, 64)); assert (x @ x == 64).all()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_call_is_run_whatever_the_main_thread_does_and_it_goes_on(wait: str, tmp_path: Path) -> None:
    body = (
        "import os, select, signal, socket, sys, threading, time\nstop, count = sys.argv[1], 0\n"
        "print('ready', flush=True)\nwhile not os.path.exists(stop):\n    count += 1\n"
        f"    {WAITS[wait]}\n"
        "print('count', count, flush=True)\nos._exit(0)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", body, str(tmp_path / "stop")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for i in range(5):
            mark = tmp_path / f"mark-{i}"
            inject.by_ptrace(child.pid, f"try:\n open({str(mark)!r}, 'w').close()\nexcept Exception:\n pass\n")
            assert wait_for(mark), f"call {i} was not run"
        assert child.poll() is None
        (tmp_path / "stop").touch()
        out, errors = child.communicate(timeout=20)
        assert (child.returncode, errors) == (0, "")
        assert int(out.split()[1]) > 0
    finally:
        child.kill()
        child.wait()


PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
PYTHONS = [Path(sys.executable), *sorted(PYENV.glob("versions/3.1[1-3].*/bin/python"))]
"""The one of the tests, and what pyenv has of the versions that are entered by ptrace."""


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parents[1].name)
def test_the_agent_starts_and_answers_in_every_python_that_is_here(python: Path, tmp_path: Path) -> None:
    body = "import sys\nprint(sys.version_info[:3], flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
    env = {"PATH": os.environ["PATH"], protocol.DIRECTORY_VARIABLE: str(tmp_path / "s")}
    child = subprocess.Popen([python, "-c", body], stdin=-1, stdout=-1, stderr=subprocess.PIPE, text=True, env=env)
    path = protocol.socket_path(tmp_path / "s", child.pid)
    assert child.stdin is not None
    assert child.stdout is not None
    version = ast.literal_eval(child.stdout.readline())
    assert process.python_version(child.pid) == version[:2]

    def echoes(word: str) -> bool:
        child.stdin.write(f"{word}\n")
        child.stdin.flush()
        return bool(child.stdout.readline() == f"{word}\n")

    for i in range(5):
        inject.start_agent(child.pid)
        assert echoes(f"started {i}")
        assert wait_for(path)
        assert client.ask(path, "status")["python"] == ".".join(map(str, version))
        inject.by_ptrace(child.pid, CLOSE)
        assert echoes(f"closing {i}")
        wait_until(lambda: not path.exists(), "closed")
    assert child.communicate(timeout=20) == ("", "")
    assert child.returncode == 0


def test_registers_masks_and_signals_are_as_they_were(tmp_path: Path) -> None:
    body = (
        "import signal, sys, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})\n"
        "got = []\nsignal.signal(signal.SIGUSR1, lambda *a: got.append(1))\nprint('ready', flush=True)\n"
        "ends = time.monotonic() + 3\nwhile time.monotonic() < ends: time.sleep(0.01)\n"
        "print(len(got) > 0, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])) == [signal.SIGUSR2])"
    )
    child = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    for _ in range(20):
        child.send_signal(signal.SIGUSR1)
        with ptrace.stopped(child.pid, 1.0) as one:
            before = dict(one.registers)
            one.mmap_code(4096)
        with ptrace.stopped(child.pid, 1.0) as one:
            assert one.registers["fs_base"] == before["fs_base"]
    assert child.communicate(timeout=20)[0].split() == ["True", "True"]


def test_a_call_that_does_not_return_is_given_up_and_the_process_goes_on(tmp_path: Path) -> None:
    body = "import sys, time\nprint('ready', flush=True)\nfor i in range(30): time.sleep(0.1)\nprint('done')"
    child = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    libc = next(m for m in elf.mappings(child.pid) if "libc.so" in m.path and m.offset == 0)
    at = libc.start + elf.functions(Path(libc.path), ["pause"])["pause"] - elf.load_address(Path(libc.path))
    with pytest.raises(ptrace.TimedOut), ptrace.stopped(child.pid, 0.5) as one:
        page = one.mmap_code(4096)
        one.write(page, b"\xcc")
        one.call(at, 0, 0, page)
    out, _ = child.communicate(timeout=20)
    assert (child.returncode, out) == (0, "done\n")


def test_a_process_that_may_not_be_traced_says_so() -> None:
    with pytest.raises(AttachError, match="cannot be entered"):
        inject.by_ptrace(os.getpid(), "pass")
    with pytest.raises(ptrace.PtraceError), ptrace.stopped(2**22 + 5, 0.1):
        pass


# ---- ELF


def test_exported_functions_are_found_where_the_loader_put_them() -> None:
    import ctypes

    found = elf.locate(os.getpid(), ["Py_AddPendingCall", "PyRun_SimpleString"])
    for name, address in found.items():
        assert address == ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value


@pytest.mark.parametrize(
    "data", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + b"\0" * 100, b"\x7fELF\x02\x01" + b"\xff" * 500]
)
def test_damaged_files_are_refused_and_do_not_raise_otherwise(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    with pytest.raises(elf.NotFound):
        elf.functions(path, ["x"])


def test_a_truncated_library_is_refused_at_every_length(tmp_path: Path) -> None:
    libc = next(m.path for m in elf.mappings(os.getpid()) if "libm.so" in m.path)
    data = Path(libc).read_bytes()
    for cut in (70, 1000, 5000, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.so").write_bytes(data[:cut])
        with pytest.raises(elf.NotFound):
            elf.functions(tmp_path / "cut.so", ["no_such_function"])
