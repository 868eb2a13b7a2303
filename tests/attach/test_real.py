"""On real 4-process gloo trainings: recorded, left as they were, and nothing that is thrown at them hurts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from bubblescope.attach import client, discover, inject, protocol
from bubblescope.errors import AttachError
from tests.support.attach_trainer import Job
from tests.support.sleeping import ROOT

pytestmark = pytest.mark.real

ROUNDS = 10


def sockets(job: Job) -> list[Path]:
    return [protocol.socket_path(job.folder / "s", pid) for pid in job.pids]


def job(folder: Path, **changes: Any) -> Job:
    env = {"BUBBLESCOPE_SOCKET_DIR": str(folder / "s"), **changes.pop("env", {})}
    return Job(folder, env=env, **changes)


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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same training, which nobody prepared and nobody touched."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder) as one:
        one.wait_steps(150)
    return losses(one)


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


def median_step(one: Job, first: int, last: int) -> float:
    return statistics.median(seconds for _, _, seconds in one.steps(0)[first:last])


def test_five_steps_by_agent_leave_the_job_as_it_was(tmp_path: Path, undisturbed: list[float]) -> None:
    with job(tmp_path, standby=True) as one:
        one.wait_steps(40)
        before = len(one.steps(0))
        done = attach(one, str(tmp_path), "--steps", "5", "--out", str(tmp_path / "a"))
        assert done.returncode == 0, done.stderr
        after = len(one.steps(0)) + 3
        one.wait_steps(60)
        made = report(tmp_path / "a")
        assert made["source"]["ranks"] == [0, 1, 2, 3]
        assert made["steps"]["analysed"] == 5
        assert (made["pipeline"]["stages"], made["pipeline"]["microbatches"]) == (4, 4)
        assert made["bubble"]["fraction"] > 0.2
        assert made["replay"]["trusted"] is True
        again = attach(one, str(tmp_path), "--duration", "0.5", "--out", str(tmp_path / "b"))
        assert again.returncode == 0, again.stderr
        assert report(tmp_path / "b")["source"]["missing_ranks"] == []
        taken = attach(one, str(tmp_path), "--steps", "5", "--out", str(tmp_path / "a"))
        assert taken.returncode == 2
        assert "recording of this host already" in taken.stderr
    quiet, later = median_step(one, 10, before), median_step(one, after, after + 50)
    assert later < quiet * 1.3 + 0.002
    same_losses(one, undisturbed)
    as_it_was(one)


def test_two_clients_dead_clients_and_attackers_do_no_harm(tmp_path: Path, undisturbed: list[float]) -> None:
    with job(tmp_path, standby=True) as one:
        paths = sockets(one)
        for path in paths:
            client.ask(path, "start", out=str(tmp_path / "x"), seconds=60, lease_s=5.0)
        with pytest.raises(AttachError, match="attached already"):
            client.ask(paths[0], "start", out=str(tmp_path / "y"), steps=1)
        # The client is dead from here on: nobody asks any more.
        attack(paths[1])
        time.sleep(8)
        windows = [client.ask(path, "status")["window"] for path in paths]
        assert [w["state"] for w in windows] == ["done"] * 4
        assert all(w["steps"] > 0 for w in windows)
        for path in paths:
            for _ in range(2):
                client.ask(path, "stop")
        one.wait_steps(20)
        killed = begin(one, str(tmp_path), "--duration", "30", "--out", str(tmp_path / "k"))
        wait_for_state(paths[0], "recording")
        killed.kill()
        killed.communicate()
        for path in paths:
            client.ask(path, "stop")
            wait_for_state(path, "done")
        stopped = begin(one, str(tmp_path), "--duration", "30", "--out", str(tmp_path / "i"))
        wait_for_state(paths[0], "recording")
        stopped.send_signal(signal.SIGINT)
        stopped.communicate(timeout=30)
        assert stopped.returncode == 130
        for path in paths:
            wait_for_state(path, "done")
        one.wait_steps(20)
    same_losses(one, undisturbed)
    as_it_was(one)


def wait_for_state(path: Path, state: str) -> None:
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        window = client.ask(path, "status")["window"]
        if window is not None and window["state"] == state:
            return
        time.sleep(0.05)
    pytest.fail(f"never {state}")


def attack(path: Path) -> None:
    """Forged commands, garbage, and a message without end, at an agent that records."""
    for data in (b'{"command": "eval", "code": "1/0"}\n', os.urandom(500) + b"\n", b"[" * 16_000 + b"\n"):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as one:
                one.settimeout(5)
                one.connect(str(path))
                one.sendall(data)
                with contextlib.suppress(OSError):
                    one.recv(65536)
    with socket.socket(socket.AF_UNIX) as big:
        big.settimeout(5)
        big.connect(str(path))
        with contextlib.suppress(OSError):
            for _ in range(1024):
                big.sendall(b"x" * (1 << 20))


def test_a_job_that_ends_while_it_is_recorded_ends_as_it_would(tmp_path: Path, undisturbed: list[float]) -> None:
    with job(tmp_path, standby=True) as one:
        recording = begin(one, str(tmp_path), "--duration", "60", "--out", str(tmp_path / "a"))
        wait_for_state(sockets(one)[0], "recording")
        one.wait_steps(10)
        one.finish()
        _, errors = recording.communicate(timeout=60)
    assert recording.returncode == 0, errors
    assert "ended while it was being recorded" in errors
    assert report(tmp_path / "a")["steps"]["analysed"] >= 5
    same_losses(one, undisturbed)


def test_a_job_that_is_killed_while_it_is_recorded_leaves_a_report(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), job(tmp_path, standby=True) as one:
        recording = begin(one, str(tmp_path), "--duration", "60", "--out", str(tmp_path / "a"))
        wait_for_state(sockets(one)[0], "recording")
        one.wait_steps(10)
        for pid in one.pids:
            os.kill(pid, signal.SIGKILL)
        _, errors = recording.communicate(timeout=60)
        assert recording.returncode == 0, errors
        assert "ended while it was being recorded" in errors
    assert report(tmp_path / "a")["steps"]["analysed"] >= 5


PROFILED = """
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
def each_step(index):
    if index == 5:
        profiler.__enter__()
    if index == {ends}:
        profiler.__exit__(None, None, None)
"""


def test_a_job_that_profiles_itself_is_left_alone_until_it_has_done(tmp_path: Path, undisturbed: list[float]) -> None:
    with kineto_job(tmp_path, standby=True, stages=2, lines=PROFILED.format(ends=150)) as one:
        one.wait_steps(10)
        for via in ("agent", "kineto"):
            done = attach(one, str(tmp_path), "--via", via, "--duration", "1", "--out", str(tmp_path / via))
            assert len(one.steps(0)) < 150, "too slow a machine for this test"
            assert done.returncode == 4, done.stderr
            assert "own torch.profiler" in done.stderr
        while len(one.steps(0)) < 155:
            one.wait_steps(5)
        done = attach(one, str(tmp_path), "--via", "agent", "--steps", "2", "--out", str(tmp_path / "later"))
        assert done.returncode == 0, done.stderr


def kineto_job(folder: Path, **changes: Any) -> Job:
    """Its sockets lie in a folder with a short name: Kineto's have long ones."""
    (folder / "k").symlink_to(tempfile.mkdtemp(prefix="bsk-"))
    conf = folder / "kineto.conf"
    conf.write_text("ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n")
    env = {"KINETO_USE_DAEMON": "1", "KINETO_CONFIG": str(conf), "KINETO_IPC_SOCKET_DIR": str((folder / "k").resolve())}
    return job(folder, env=env, **changes)


@pytest.mark.parametrize("window", [("--duration", "1"), ("--steps", "5")], ids=lambda w: w[0])
def test_kineto_writes_a_trace_per_rank_and_a_report(
    window: tuple[str, str], tmp_path: Path, undisturbed: list[float]
) -> None:
    with kineto_job(tmp_path, sleep_s=0.002) as one:
        out = tmp_path / "a"
        done = attach(one, str(tmp_path), "--via", "kineto", *window, "--out", str(out))
        assert done.returncode == 0, done.stderr
        assert "must not end within" in done.stderr
        assert sorted(p.name for p in (out / "traces").iterdir()) == [f"rank-{r}.pt.trace.json" for r in range(4)]
        made = report(out)
        assert made["source"]["ranks"] == [0, 1, 2, 3]
        assert made["source"]["world_size"] == 4
        assert made["steps"]["analysed"] >= 2
        one.wait_steps(10)
    same_losses(one, undisturbed)


def test_kineto_outlives_restarts_of_ours_and_garbage_and_a_real_daemon_is_respected(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    from bubblescope.attach.kineto_daemon import Endpoint

    with kineto_job(tmp_path) as one:
        folder = str((tmp_path / "k").resolve())
        for _ in range(3):
            with Endpoint(folder, frozenset({os.geteuid()})) as endpoint:
                ends = time.monotonic() + 20
                while len(endpoint.seen()) < 4 and time.monotonic() < ends:
                    garbage(folder, 2000)
                assert set(endpoint.seen()) == set(one.pids)
                refused = attach(one, str(tmp_path), "--via", "kineto", "--out", str(tmp_path / "r"))
                assert refused.returncode == 4
                assert "dyno gputrace" in refused.stderr
        one.wait_steps(10)
    same_losses(one, undisturbed)


def garbage(folder: str, count: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        for i in range(count):
            one.sendto(os.urandom(40 + i % 40), f"{folder}/dynolog")


def test_an_unprepared_job_is_refused_with_the_ways_that_are_open(tmp_path: Path, undisturbed: list[float]) -> None:
    with job(tmp_path) as one:
        done = attach(one, str(one.pids[0]), "--out", str(tmp_path / "a"))
        assert done.returncode == 4
        assert f"rank 0 (process {one.pids[0]}) was not prepared" in done.stderr
        assert "--via inject --yes" in done.stderr
        assert "bubblescope run --standby" in done.stderr
        unconfirmed = attach(one, str(one.pids[0]), "--via", "inject", "--out", str(tmp_path / "a"))
        assert unconfirmed.returncode == 4
        assert "can crash" in unconfirmed.stderr
        assert not (tmp_path / "s").exists()
        found = [r for r in discover.ranks() if r.pid in one.pids]
        assert [(r.rank, r.world, r.prepared) for r in found] == [(i, 4, "no") for i in range(4)]
    same_losses(one, undisturbed)


BUSY = """
import threading
def spin():
    while True:
        sum(range(1000))
threading.Thread(target=spin, daemon=True).start()
"""
"""A thread that fights for the interpreter's lock."""


@pytest.mark.parametrize(("lines", "stages"), [("", 4), (BUSY, 2)], ids=["alone", "contended"])
def test_injecting_works_every_time_while_training_goes_on(
    lines: str, stages: int, tmp_path: Path, undisturbed: list[float]
) -> None:
    with job(tmp_path, lines=lines, stages=stages) as one:
        done = attach(one, str(tmp_path), "--via", "inject", "--yes", "--steps", "3", "--out", str(tmp_path / "a"))
        assert done.returncode == 0, done.stderr
        assert report(tmp_path / "a")["steps"]["analysed"] == 3
        path = sockets(one)[1]
        for i in range(ROUNDS):
            inject.by_ptrace(one.pids[1], CLOSE)
            wait_until(lambda: not path.exists(), f"round {i}: closed")
            inject.start_agent(one.pids[1])
            wait_until(path.exists, f"round {i}: started")
            assert client.ask(path, "status")["rank"] == 1
            one.wait_steps(1)
        one.wait_steps(5)
    if stages == 4:
        same_losses(one, undisturbed)
    as_it_was(one)


CLOSE = (
    "try:\n __import__('threading').Thread(target=lambda: __import__('bubblescope.attach.agent').attach.agent.stop())"
    ".start()\nexcept BaseException:\n pass\n"
)


def wait_until(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.01)


def test_gdb_does_it_too_when_asked_by_name(tmp_path: Path) -> None:
    with job(tmp_path, stages=2) as one:
        done = attach(one, str(tmp_path), "--via", "gdb", "--yes", "--steps", "2", "--out", str(tmp_path / "a"))
        assert done.returncode == 0, done.stderr
        one.wait_steps(5)
    as_it_was(one)


def test_what_run_standby_starts_has_agents(tmp_path: Path) -> None:
    from bubblescope.attach.launcher import job_environment
    from bubblescope.capture.environment import Settings

    made = job_environment(Settings("standby", str(tmp_path / "run")), {"PYTHONPATH": str(ROOT)})
    with job(tmp_path, stages=2, env=made) as one:
        done = attach(one, str(tmp_path), "--via", "agent", "--steps", "2", "--out", str(tmp_path / "a"))
        assert done.returncode == 0, done.stderr
    as_it_was(one)


WORKERS = """
import torch.utils.data as data
loaders = [iter(data.DataLoader(data.TensorDataset(torch.zeros(1000)), num_workers=1, multiprocessing_context=how))
           for how in ("fork", "spawn")]
for loader in loaders:
    next(loader)
"""


def test_doctor_lists_ranks_and_not_their_helpers(tmp_path: Path) -> None:
    with job(tmp_path, stages=2, standby=True, lines=WORKERS) as one:
        found = [r for r in discover.ranks() if str(tmp_path) in str((r.environ or {}).get("BUBBLESCOPE_SOCKET_DIR"))]
        assert [(r.pid, r.rank, r.prepared) for r in found] == [(pid, i, "agent") for i, pid in enumerate(one.pids)]
        done = subprocess.run(
            [sys.executable, "-m", "bubblescope", "doctor", "--json", "-"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        listed = json.loads(done.stdout)["attach"]
        for i, pid in enumerate(one.pids):
            assert listed[f"process {pid}"]["value"] == f"rank {i} of 2"
            assert "an agent is there" in listed[f"process {pid}"]["note"]
