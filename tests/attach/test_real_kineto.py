"""Real trainings that only have KINETO_USE_DAEMON=1: traced, and neither restarts nor garbage hurt them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bubblescope.attach import discover, session
from bubblescope.attach.kineto_daemon import Endpoint
from tests.support.attach_jobs import attach, begin, job, report, same_losses, wait_until
from tests.support.attach_trainer import Job
from tests.support.sleeping import ROOT

pytestmark = pytest.mark.real

PROFILED = """
import pathlib
asked, profiler = pathlib.Path("profile"), None
def each_step(index):
    global profiler
    if asked.exists() and profiler is None:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).__enter__()
        pathlib.Path(f"profiles-{rank}").touch()
    if profiler is not None and not asked.exists():
        profiler.__exit__(None, None, None)
        profiler = None
        pathlib.Path(f"profiles-{rank}").unlink()
"""
"""A job that runs torch's profiler by itself as long as there is a file `profile`."""


@contextlib.contextmanager
def polling(folder: Path, **changes: Any) -> Iterator[Job]:
    """Its sockets lie in a folder with a short name: Kineto's have long ones."""
    conf = folder / "kineto.conf"
    conf.write_text("ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n")
    with tempfile.TemporaryDirectory(prefix="bsk-") as short:
        env = {"KINETO_USE_DAEMON": "1", "KINETO_CONFIG": str(conf), "KINETO_IPC_SOCKET_DIR": short}
        with job(folder, env=env, **changes) as one:
            yield one
            with Endpoint(short, frozenset({os.geteuid()})):
                one.finish()  # without a daemon, ranks take up to 10 s longer to exit


@pytest.fixture(scope="module")
def kineto_job(tmp_path_factory: pytest.TempPathFactory, undisturbed: list[float]) -> Iterator[Job]:
    with polling(tmp_path_factory.mktemp("kineto"), sleep_s=0.002) as one:
        yield one
    same_losses(one, undisturbed)


@pytest.mark.parametrize("window", [("--duration", "1"), ("--steps", "5")], ids=lambda w: w[0])
def test_kineto_writes_a_trace_per_rank_and_a_report(window: tuple[str, str], kineto_job: Job, tmp_path: Path) -> None:
    out = tmp_path / "a"
    done = attach(kineto_job, str(kineto_job.folder), "--via", "kineto", *window, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "must not end within" in done.stderr
    assert "Kineto traced 4 ranks" in done.stdout, done.stdout + done.stderr
    assert sorted(p.name for p in (out / "traces").iterdir()) == [f"rank-{r}.pt.trace.json" for r in range(4)]
    made = report(out)
    assert made["source"]["ranks"] == [0, 1, 2, 3]
    assert made["source"]["world_size"] == 4
    assert made["steps"]["analysed"] >= 2
    kineto_job.wait_steps(10)


def test_kineto_outlives_restarts_of_ours_and_garbage(kineto_job: Job) -> None:
    folder = kineto_job.env["KINETO_IPC_SOCKET_DIR"]
    for _ in range(3):
        with Endpoint(folder, frozenset({os.geteuid()})) as endpoint:
            ends = time.monotonic() + 20
            while len(endpoint.seen()) < 4 and time.monotonic() < ends:
                garbage(folder, 2000)
            assert set(endpoint.seen()) == set(kineto_job.pids)
    kineto_job.wait_steps(10)


def garbage(folder: str, count: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        for i in range(count):
            one.sendto(os.urandom(40 + i % 40), f"{folder}/dynolog")


def test_a_real_daemon_and_another_bubblescope_are_respected_and_a_refusal_leaves_nothing(
    kineto_job: Job, tmp_path: Path
) -> None:
    target, folder = str(kineto_job.folder), kineto_job.env["KINETO_IPC_SOCKET_DIR"]
    with Endpoint(folder, frozenset({os.geteuid()})):
        refused = attach(kineto_job, target, "--via", "kineto", "--out", str(tmp_path / "r"))
    assert refused.returncode == 4
    assert f"process {os.getpid()} (" in refused.stderr
    assert "dyno gputrace" in refused.stderr
    assert not (tmp_path / "r").exists()
    # Never ended early here: ranks that have fetched their request trace to the end of it, and must not end before.
    first = begin(kineto_job, target, "--via", "kineto", "--duration", "3", "--out", str(tmp_path / "first"))
    wait_until(Path(folder, "dynolog").exists, "the endpoint of the first")
    second = attach(kineto_job, target, "--via", "kineto", "--out", str(tmp_path / "second"))
    assert second.returncode == 4
    assert f"another bubblescope (process {first.pid})" in second.stderr
    assert not (tmp_path / "second").exists()
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 0, errors


def test_a_job_that_profiles_itself_is_left_alone_until_it_has_done(tmp_path: Path) -> None:
    """A job of its own: with a daemon's window just behind it, the job's own profiler is not safe in Kineto."""
    profiling = [tmp_path / f"profiles-{rank}" for rank in range(2)]
    with polling(tmp_path, standby=True, stages=2, lines=PROFILED) as one:
        (tmp_path / "profile").touch()
        wait_until(lambda: all(path.exists() for path in profiling), "the job's own profiler")
        for via in ("agent", "kineto"):
            done = attach(one, str(tmp_path), "--via", via, "--duration", "1", "--out", str(tmp_path / via))
            assert done.returncode == 4, done.stderr
            assert "own torch.profiler" in done.stderr
            assert not (tmp_path / via).exists()
        (tmp_path / "profile").unlink()
        wait_until(lambda: not any(path.exists() for path in profiling), "the end of the job's own profiler")
        done = attach(one, str(tmp_path), "--via", "agent", "--steps", "2", "--out", str(tmp_path / "later"))
        assert done.returncode == 0, done.stderr


def test_torchrun_polls_too_and_is_never_taken_for_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, pathlib, time, torch\npathlib.Path(os.environ['RANK']).touch()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "the ranks", 90)
        assert discover.one(torchrun.pid).kineto, "it polls as well"
        found = session.targets(str(torchrun.pid))
        assert [(r.rank, r.world, r.prepared) for r in found] == [(0, 2, "kineto"), (1, 2, "kineto")]
        assert torchrun.pid not in [r.pid for r in discover.ranks()]
        for rank in found:
            os.kill(rank.pid, signal.SIGKILL)  # by themselves they would look for the daemon for 10 s more
    finally:
        torchrun.terminate()
        torchrun.wait(60)
