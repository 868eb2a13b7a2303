"""Real gloo trainings with agents: recorded, left as they were, and nothing that is thrown at them hurts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bubblescope.attach import client, discover, session
from bubblescope.attach.launcher import job_environment
from bubblescope.attach.process import look
from bubblescope.capture.environment import Settings
from bubblescope.errors import AttachError
from tests.support.attach_jobs import (
    as_it_was,
    attach,
    begin,
    fastest_step,
    job,
    report,
    same_losses,
    sockets,
    wait_for_state,
)
from tests.support.attach_trainer import Job
from tests.support.sleeping import ROOT

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def standby(tmp_path_factory: pytest.TempPathFactory, undisturbed: list[float]) -> Iterator[Job]:
    """Four ranks with agents. Whatever the tests did to it: its losses are the undisturbed ones, all hooks are out."""
    with job(tmp_path_factory.mktemp("standby"), standby=True) as one:
        yield one
    same_losses(one, undisturbed)
    as_it_was(one)


def test_five_steps_by_agent_leave_the_job_as_it_was(standby: Job, tmp_path: Path) -> None:
    one, target = standby, str(standby.folder)
    one.wait_steps(40)
    before, opened = len(one.steps(0)), open_files(one)
    done = attach(one, target, "--steps", "5", "--out", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    after = len(one.steps(0)) + 3
    one.wait_steps(60)
    made = report(tmp_path / "a")
    assert made["source"]["ranks"] == [0, 1, 2, 3]
    assert made["steps"]["analysed"] == 5
    assert (made["pipeline"]["stages"], made["pipeline"]["microbatches"]) == (4, 4)
    assert made["bubble"]["fraction"] > 0.2
    assert made["replay"]["trusted"] is True
    assert "hooks are out of 4 ranks" in done.stdout
    quiet, later = fastest_step(one, 10, before), fastest_step(one, after, after + 50)
    assert later < quiet * 1.3 + 0.002
    again = attach(one, target, "--duration", "0.5", "--out", str(tmp_path / "b"))
    assert again.returncode == 0, again.stderr
    assert report(tmp_path / "b")["source"]["missing_ranks"] == []
    assert open_files(one) == opened, "an attach left something open in the job"
    taken = attach(one, target, "--steps", "5", "--out", str(tmp_path / "a"))
    assert taken.returncode == 2
    assert "recording of this host already" in taken.stderr


def open_files(one: Job) -> list[int]:
    return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in one.pids]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_detaches_at_once_and_keeps_what_was_recorded(
    how: signal.Signals, standby: Job, tmp_path: Path
) -> None:
    running = begin(standby, str(standby.folder), "--duration", "60", "--out", str(tmp_path / "a"))
    for path in sockets(standby):
        wait_for_state(path, "recording")
    standby.wait_steps(8)
    running.send_signal(how)
    began = time.monotonic()
    for path in sockets(standby):
        wait_for_state(path, "done")
    assert time.monotonic() - began < 10, "as late as if nobody had said a word"
    out, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + how, errors
    assert f"ended early by {how.name}" in errors
    assert "hooks are out of 4 ranks" in out
    assert report(tmp_path / "a")["steps"]["analysed"] >= 3


def test_two_clients_dead_clients_and_attackers_do_no_harm(standby: Job, tmp_path: Path) -> None:
    paths = sockets(standby)
    for path in paths:
        client.ask(path, "start", out=str(tmp_path / "x"), seconds=60, lease_s=3.0)
    with pytest.raises(AttachError, match="attached already"):
        client.ask(paths[0], "start", out=str(tmp_path / "y"), steps=1)
    # The client is dead from here on: nobody asks any more.
    attack(paths[1])
    time.sleep(5)
    windows = [client.ask(path, "status")["window"] for path in paths]
    assert [w["state"] for w in windows] == ["done"] * 4
    assert all(w["steps"] > 0 for w in windows)
    for path in paths:
        for _ in range(2):
            client.ask(path, "stop")
    standby.wait_steps(20)
    killed = begin(standby, str(standby.folder), "--duration", "30", "--out", str(tmp_path / "k"))
    for path in paths:
        wait_for_state(path, "recording")
    killed.kill()
    killed.communicate()
    for path in paths:
        client.ask(path, "stop")
        wait_for_state(path, "done")
    standby.wait_steps(20)


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
        out, errors = recording.communicate(timeout=60)
    assert recording.returncode == 0, errors
    assert "ended while it was being recorded" in errors
    assert "4 ranks ended while being recorded" in out
    assert "hooks are out" not in out
    assert report(tmp_path / "a")["steps"]["analysed"] >= 5
    same_losses(one, undisturbed)


def test_a_job_that_is_killed_while_it_is_recorded_leaves_a_report(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), job(tmp_path, stages=2, standby=True) as one:
        recording = begin(one, str(tmp_path), "--duration", "60", "--out", str(tmp_path / "a"))
        wait_for_state(sockets(one)[0], "recording")
        one.wait_steps(10)
        for pid in one.pids:
            os.kill(pid, signal.SIGKILL)
        out, errors = recording.communicate(timeout=60)
        assert recording.returncode == 0, errors
        assert "ended while it was being recorded" in errors
        assert "2 ranks ended while being recorded" in out
        assert "hooks are out" not in out
    assert report(tmp_path / "a")["steps"]["analysed"] >= 5


NO_PIPELINE = """
import time, torch
from bubblescope.attach import agent
print(agent.start(), flush=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def test_a_job_without_a_pipeline_is_told_so_and_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "BUBBLESCOPE_SOCKET_DIR": str(tmp_path / "s"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", NO_PIPELINE], env=env, stdout=subprocess.PIPE) as alone:
        try:
            assert alone.stdout is not None
            assert alone.stdout.readline().strip().endswith(b".sock")
            done = subprocess.run(
                [sys.executable, "-m", "bubblescope", "attach", str(alone.pid), "--duration", "1", "--out", "a"],
                env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100,
            )  # fmt: skip
        finally:
            alone.kill()
    assert done.returncode == 3, done.stderr
    assert re.search(r"no pipeline schedule ran in \d+ optimizer steps", done.stderr)
    assert "bubblescope.span" in done.stderr
    assert not (tmp_path / "a").exists()


WORKERS = """
import torch.utils.data as data
loaders = [iter(data.DataLoader(data.TensorDataset(torch.zeros(1000)), num_workers=1, multiprocessing_context=how))
           for how in ("fork", "spawn")]
for loader in loaders:
    next(loader)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks with data-loading workers, as `bubblescope run --standby` starts them."""
    folder = tmp_path_factory.mktemp("launched")
    made = job_environment(Settings("standby", str(folder / "run")), {"PYTHONPATH": str(ROOT)})
    with job(folder, stages=2, env=made, lines=WORKERS) as one:
        yield one
    as_it_was(one)


def test_what_run_standby_starts_has_agents(launched: Job, tmp_path: Path) -> None:
    done = attach(launched, str(launched.folder), "--via", "agent", "--steps", "2", "--out", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr


def test_doctor_lists_ranks_and_not_their_helpers(launched: Job) -> None:
    mark = str(launched.folder)
    found = [r for r in discover.ranks() if mark in str((r.environ or {}).get("BUBBLESCOPE_SOCKET_DIR"))]
    assert [(r.pid, r.rank, r.prepared) for r in found] == [(pid, i, "agent") for i, pid in enumerate(launched.pids)]
    done = subprocess.run(
        [sys.executable, "-m", "bubblescope", "doctor", "--json", "-"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed = json.loads(done.stdout)["attach"]
    for i, pid in enumerate(launched.pids):
        assert listed[f"process {pid}"]["value"] == f"rank {i} of 2"
        assert "an agent is there" in listed[f"process {pid}"]["note"]


def test_a_helper_stands_for_its_rank(launched: Job) -> None:
    for pid in launched.pids:
        helpers = [one for one in discover._pids() if discover._try(one) is not None and look(one).parent == pid]
        assert len(helpers) >= 2
        for helper in helpers:
            assert [rank.pid for rank in session.targets(str(helper))] == [pid]
