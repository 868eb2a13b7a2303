"""A real training that nobody prepared: refused first, then entered, while it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bubblescope.attach import client, discover, inject
from tests.support.attach_jobs import as_it_was, attach, job, report, same_losses, sockets, wait_until
from tests.support.attach_stress import BUSY, CLOSE
from tests.support.attach_trainer import Job

pytestmark = pytest.mark.real

ROUNDS = 10


@pytest.fixture(scope="module")
def unprepared(tmp_path_factory: pytest.TempPathFactory, undisturbed: list[float]) -> Iterator[Job]:
    """Four ranks without agents. Tests close those that they started; losses and functions are the original ones."""
    with job(tmp_path_factory.mktemp("unprepared")) as one:
        yield one
    same_losses(one, undisturbed)
    as_it_was(one)


def close_agents(one: Job) -> None:
    for pid, path in zip(one.pids, sockets(one), strict=True):
        inject.by_ptrace(pid, CLOSE)
        wait_until(lambda path=path: not path.exists(), "closed")


def test_an_unprepared_job_is_refused_with_the_ways_that_are_open(unprepared: Job, tmp_path: Path) -> None:
    one, pid = unprepared, str(unprepared.pids[0])
    done = attach(one, pid, "--out", str(tmp_path / "a"))
    assert done.returncode == 4
    assert f"rank 0 (process {pid}) was not prepared" in done.stderr
    assert "--via inject --yes" in done.stderr
    assert "bubblescope run --standby" in done.stderr
    unconfirmed = attach(one, pid, "--via", "inject", "--out", str(tmp_path / "a"))
    assert unconfirmed.returncode == 4
    assert "can crash" in unconfirmed.stderr
    assert not (tmp_path / "a").exists()
    assert not (one.folder / "s").exists()
    found = [r for r in discover.ranks() if r.pid in one.pids]
    assert [(r.rank, r.world, r.prepared) for r in found] == [(i, 4, "no") for i in range(4)]


def test_injecting_works_every_time_while_training_goes_on(unprepared: Job, tmp_path: Path) -> None:
    inject_and_close(unprepared, tmp_path)
    close_agents(unprepared)


def test_gdb_does_it_too_when_asked_by_name(unprepared: Job, tmp_path: Path) -> None:
    target = str(unprepared.folder)
    done = attach(unprepared, target, "--via", "gdb", "--yes", "--steps", "2", "--out", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    unprepared.wait_steps(5)


def test_injecting_works_where_a_thread_fights_for_the_interpreters_lock(tmp_path: Path) -> None:
    with job(tmp_path / "job", lines=BUSY, stages=2) as one:
        inject_and_close(one, tmp_path)
        one.wait_steps(5)
    as_it_was(one)


def inject_and_close(one: Job, out: Path) -> None:
    target = str(one.folder)
    done = attach(one, target, "--via", "inject", "--yes", "--steps", "3", "--out", str(out / "a"))
    assert done.returncode == 0, done.stderr
    assert report(out / "a")["steps"]["analysed"] == 3
    path = sockets(one)[1]
    for i in range(ROUNDS):
        inject.by_ptrace(one.pids[1], CLOSE)
        wait_until(lambda: not path.exists(), f"round {i}: closed")
        inject.start_agent(one.pids[1])
        wait_until(path.exists, f"round {i}: started")
        assert client.ask(path, "status")["rank"] == 1
        one.wait_steps(1)
