"""The agent sleeps, answers only whom it should, and outlives everything that is thrown at its socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bubblescope.attach import client
from bubblescope.errors import AttachError
from tests.attach.conftest import AgentProcess, Host
from tests.support.sleeping import ROOT

NOBODY = 65534


def raw(path: Path, data: bytes, timeout_s: float = 5.0) -> bytes:
    """What the agent answers to these bytes; empty when it hung up."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(timeout_s)
        one.connect(str(path))
        try:
            one.sendall(data)
            return one.recv(65536)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def alive(one: AgentProcess) -> bool:
    return client.ask(one.socket, "status")["pid"] == one.pid and one.echo()


def test_the_socket_and_its_folder_are_the_users_alone(agent_process: Host) -> None:
    one = agent_process()
    assert stat.S_IMODE(one.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(one.socket.stat().st_mode) == 0o600
    assert one.socket.name == f"{one.pid}.sock"


def test_status_says_who_this_is_without_importing_anything(agent_process: Host) -> None:
    one = agent_process(env={"RANK": "3", "WORLD_SIZE": "8"})
    said = client.ask(one.socket, "status")
    assert (said["rank"], said["world"], said["torch"], said["window"]) == (3, 8, None, None)
    assert said["profiler"] is False


def test_an_asleep_agent_loads_nothing_heavy_and_uses_no_processor_time() -> None:
    script = (
        "import sys, time; from bubblescope.attach import agent; agent.start(); time.sleep(0.2)\n"
        "a = time.process_time(); time.sleep(0.5); b = time.process_time()\n"
        "import json; print(json.dumps([sorted(sys.modules), b - a]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    modules, spent = json.loads(done.stdout)
    heavy = {"torch", "numpy", "pandas", "plotly", "click", "msgspec", "bubblescope.capture", "bubblescope.model"}
    assert not heavy & set(modules)
    assert spent < 0.002


def test_starting_twice_gives_the_same_socket_and_one_thread(agent_process: Host) -> None:
    one = agent_process("import threading; print(agent.start(), threading.active_count(), flush=True)")
    assert one.process.stdout is not None
    assert one.process.stdout.readline().split() == [str(one.socket), "2"]


def test_the_socket_goes_with_its_process(agent_process: Host) -> None:
    one = agent_process()
    one.end()
    assert not one.socket.exists()


def test_what_a_killed_process_left_is_taken_over(agent_process: Host, tmp_path: Path) -> None:
    # The next process of the same number: faked by leaving a socket under the number that will start.
    script = (
        "import os, socket, sys; d = sys.argv[1]; os.mkdir(d, 0o700)\n"
        "socket.socket(socket.AF_UNIX).bind(f'{d}/{os.getpid()}.sock')\n"
        "from bubblescope.attach import agent; print(agent.start())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "d")],
        env={**os.environ, "BUBBLESCOPE_SOCKET_DIR": str(tmp_path / "d")},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip().endswith(".sock")


def test_sockets_of_killed_processes_go_and_what_lives_or_is_no_socket_stays(
    agent_process: Host, tmp_path: Path
) -> None:
    (tmp_path / "sockets").mkdir(mode=0o700)
    dead, live, file = (tmp_path / "sockets" / f"{2**22 + i}.sock" for i in range(3))
    with socket.socket(socket.AF_UNIX) as killed, socket.socket(socket.AF_UNIX) as listening:
        killed.bind(str(dead))
        listening.bind(str(live))
        listening.listen()
        file.write_text("precious")
        killed.close()
        one = agent_process()
        assert sorted(one.socket.parent.iterdir()) == sorted([one.socket, live, file])


@pytest.mark.parametrize("trap", ["link", "file", "open folder", "linked folder"])
def test_a_trap_in_its_place_means_no_agent_a_warning_and_a_process_that_goes_on(trap: str, tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; d, trap = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "real = d.with_name('real'); real.mkdir(mode=0o700)\n"
        "d.symlink_to(real) if trap == 'linked folder' else d.mkdir(mode=0o700)\n"
        "me = d / f'{os.getpid()}.sock'\n"
        "if trap == 'link': me.symlink_to(real / 'elsewhere.sock')\n"
        "if trap == 'file': me.write_text('precious')\n"
        "if trap == 'open folder': d.chmod(0o777)\n"
        "from bubblescope.attach import agent; print(agent.start() or agent.start())\n"
        "if trap == 'file': print(me.read_text())\n"
        "print(sorted(p.name for p in real.iterdir()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "d"), trap],
        env={**os.environ, "BUBBLESCOPE_SOCKET_DIR": str(tmp_path / "d")},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "None"
    assert lines[-1] == "[]"
    assert trap != "file" or lines[1] == "precious"
    assert done.stderr.count("nobody can attach to this process") == 1


FORGED = [
    {"command": "exec", "code": "1/0"},
    {"command": "__class__"},
    {"command": ["start"]},
    {"command": "start"},
    {"command": "start", "out": "relative"},
    {"command": "start", "out": "/x\0y"},
    {"command": "start", "out": "/tmp/x", "steps": True},
    {"command": "start", "out": "/tmp/x", "steps": 0},
    {"command": "start", "out": "/tmp/x", "steps": 1e300},
    {"command": "start", "out": "/tmp/x", "seconds": -1},
    {"command": "start", "out": "/tmp/x", "seconds": float("inf")},
    {"command": "start", "out": "/tmp/x", "seconds": "1"},
    {"command": "start", "out": "/tmp/x", "hook": "os.system"},
    {},
    *({"command": command, "x": 1} for command in ("status", "stop", "snapshot")),
    {"command": "status", "out": "/tmp/x"},
]


@pytest.mark.parametrize("request_", FORGED, ids=lambda r: json.dumps(r)[:40])
def test_a_forged_command_is_refused_and_changes_nothing(request_: dict[str, object], agent_process: Host) -> None:
    one = agent_process()
    answer = json.loads(raw(one.socket, json.dumps(request_).encode() + b"\n"))
    assert answer["ok"] is False
    assert alive(one)
    assert client.ask(one.socket, "status")["window"] is None


def test_pickles_garbage_and_endless_nesting_are_refused(agent_process: Host) -> None:
    one = agent_process()
    import pickle

    for data in (pickle.dumps(print) + b"\n", os.urandom(1000).replace(b"\n", b"") + b"\n", b"[" * 15_000 + b"\n"):
        assert json.loads(raw(one.socket, data))["ok"] is False
    assert alive(one)


def test_a_message_of_a_gibibyte_is_cut_off_early_and_costs_no_memory(agent_process: Host) -> None:
    one = agent_process()
    before = memory_kib(one.pid)
    sent = 0
    with socket.socket(socket.AF_UNIX) as big:
        big.settimeout(5)
        big.connect(str(one.socket))
        block = b"x" * (1 << 20)
        try:
            for _ in range(1024):
                big.sendall(block)
                sent += len(block)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 8 << 20
    assert memory_kib(one.pid) - before < 4096
    assert alive(one)


def memory_kib(pid: int) -> int:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1])


def test_a_hundred_silent_clients_do_not_keep_others_out_for_long(agent_process: Host) -> None:
    one = agent_process()
    silent = []
    for _ in range(100):
        quiet = socket.socket(socket.AF_UNIX)
        quiet.settimeout(5)
        with contextlib.suppress(BlockingIOError):  # the queue of the socket is full
            quiet.connect(str(one.socket))
        silent.append(quiet)
    ends = time.monotonic() + 12
    while True:
        try:
            assert alive(one)
            break
        except client.NoAgent:
            assert time.monotonic() < ends, "still full of silent clients"
            time.sleep(0.2)
    for quiet in silent:
        quiet.close()
    assert alive(one)


def test_a_request_in_pieces_is_understood_and_half_a_request_is_dropped(agent_process: Host) -> None:
    one = agent_process()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(5)
        slow.connect(str(one.socket))
        for piece in (b'{"comm', b'and": "sta', b'tus"}\n'):
            slow.sendall(piece)
            time.sleep(0.05)
        assert json.loads(slow.recv(65536))["ok"] is True
    assert raw_half(one.socket) == b""
    assert alive(one)


def raw_half(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(10)
        one.connect(str(path))
        one.sendall(b'{"command": "sta')
        return one.recv(100)


def test_ten_thousand_pieces_of_garbage_leave_it_alive(agent_process: Host) -> None:
    one = agent_process()
    for i in range(10_000):
        with socket.socket(socket.AF_UNIX) as bad:
            bad.settimeout(5)
            bad.connect(str(one.socket))
            bad.sendall(b"\x00garbage%d\n" % i)
            bad.recv(4096)
    assert alive(one)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_user_cannot_reach_it_even_where_the_folder_lets_him(agent_process: Host, tmp_path: Path) -> None:
    one = agent_process()
    script = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: print('kept out')\n"
        "else: s.sendall(b'{\"command\": \"snapshot\"}\\n'); print(s.recv(65536).decode())"
    )

    def as_nobody() -> str:
        command = ["/usr/bin/python3", "-I", "-c", script, str(one.socket)]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()

    assert as_nobody() == "kept out"
    for folder in (one.socket.parent, *one.socket.parents):
        if folder != Path("/") and folder.stat().st_uid == 0 and folder != Path("/tmp"):
            folder.chmod(0o755)
    one.socket.chmod(0o666)
    answer = json.loads(as_nobody())
    assert answer["ok"] is False
    assert "user 65534 may not attach" in answer["error"]
    one.socket.parent.chmod(0o700)
    one.socket.chmod(0o600)
    assert alive(one)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a socket to somebody else")
def test_a_client_does_not_talk_to_another_users_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    path = folder / f"{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(path))
        mine.listen()
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(client.NoAgent, match="belongs to user 65534"):
            client.ask(path, "status")
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(client.NoAgent, match="answers there, which is not the rank's own"):
            client.ask(path, "status")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(client.NoAgent, match="belongs to user 65534"):
            client.ask(path, "status")


def test_a_client_does_not_believe_a_socket_of_another_process(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "1.sock"
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(path))
        mine.listen()
        with pytest.raises(client.NoAgent, match=f"process {os.getpid()} of user"):
            client.ask(path, "status")


def test_a_client_does_not_follow_a_symbolic_link(agent_process: Host, tmp_path: Path) -> None:
    one = agent_process()
    link = one.socket.parent / "link.sock"
    link.symlink_to(one.socket)
    with pytest.raises(client.NoAgent, match="symbolic link"):
        client.ask(link, "status")
    assert alive(one)


def test_a_process_without_torch_says_so_instead_of_recording(agent_process: Host, tmp_path: Path) -> None:
    one = agent_process()
    with pytest.raises(AttachError, match="has not imported torch"):
        client.ask(one.socket, "start", out=str(tmp_path / "rec"), steps=1)
    assert alive(one)


def test_stopping_what_never_started_is_harmless(agent_process: Host) -> None:
    one = agent_process()
    for _ in range(2):
        assert client.ask(one.socket, "stop")["window"] is None
    assert alive(one)


def test_a_snapshot_says_where_the_main_thread_is_and_no_values(agent_process: Host) -> None:
    one = agent_process("secret = 'hunter2'")
    threads = client.ask(one.socket, "snapshot")["threads"]
    assert any(thread["name"] == "MainThread" and "<module>" in thread["stack"][0] for thread in threads)
    assert "hunter2" not in json.dumps(threads)
    assert "bubblescope-agent" not in {thread["name"] for thread in threads}


def test_a_forked_child_neither_answers_nor_keeps_the_socket_open(agent_process: Host) -> None:
    one = agent_process("import os\nif os.fork() == 0:\n    time.sleep(5); os._exit(0)")
    assert alive(one)
    one.process.send_signal(signal.SIGKILL)
    one.process.wait()
    with pytest.raises(client.NoAgent):
        client.ask(one.socket, "status")


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_RANK": "1"}])
def test_a_helper_of_a_rank_gets_no_agent_of_its_own(variables: dict[str, str], agent_process: Host) -> None:
    lines = (
        "import subprocess\n"
        "print(subprocess.run([sys.executable, '-c', 'from bubblescope.attach import agent; print(agent.start())'],"
        " capture_output=True, text=True).stdout.strip(), flush=True)"
    )
    one = agent_process(lines, env=variables)
    assert one.process.stdout is not None
    assert one.process.stdout.readline().strip() == "None"


def test_the_agent_can_be_closed(agent_process: Host) -> None:
    one = agent_process("agent.stop(); agent.stop()")
    assert one.echo()
    assert not one.socket.exists()


def test_an_agent_of_another_protocol_is_not_talked_to(agent_process: Host) -> None:
    one = agent_process("import bubblescope.attach.protocol as p; p.PROTOCOL_VERSION = 99")
    assert one.echo()
    with pytest.raises(AttachError, match="speaks version 99"):
        client.ask(one.socket, "status")
