"""The per-rank pass on a real dask cluster: a scheduler and two workers on loopback, one of them killed in mid-run."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bubblescope.cli import analyze as command
from bubblescope.errors import UsageError
from bubblescope.ingest import read
from bubblescope.ingest.kineto import read_part
from bubblescope.ingest.parallel import over_files
from bubblescope.ingest.part import Part
from tests.support.dask_reader import fatal_once
from tests.support.kineto_gen import Shape, Style, simulate, traces, write

pytest.importorskip("distributed", reason="the dask extra is not installed")
REPO = Path(__file__).resolve().parents[2]


@dataclass
class Cluster:
    address: str
    workers: list[subprocess.Popen[bytes]]


def _start(module: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(REPO), "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "30s"}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *arguments],
            env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent,
        )  # fmt: skip


def _address(file: Path, scheduler: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 90
    while time.monotonic() < end and scheduler.poll() is None:
        try:
            return str(json.loads(file.read_text())["address"])
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.1)
    raise AssertionError("the scheduler did not start")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    file = tmp_path / "scheduler.json"
    arguments = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    processes = [_start("dask_scheduler", *arguments, log=tmp_path / "scheduler.log")]
    try:
        address = _address(file, processes[0])
        options = (address, "--nthreads", "1", "--no-nanny", "--host", "127.0.0.1")
        for number in (1, 2):
            processes.append(_start("dask_worker", *options, log=tmp_path / f"worker{number}.log"))
        yield Cluster(address, processes[1:])
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(30)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write(tmp_path / "job", traces(simulate(Shape(steps=2)), Style(launches=True)))
    return tmp_path / "job"


def test_a_cluster_gives_the_run_that_this_process_gives(cluster: Cluster, job: Path) -> None:
    alone = read(job)
    with command.reading_pool("dask", cluster.address, None) as executor:
        spread = read(job, executor=executor)
    assert np.array_equal(alone.spans.start_ns, spread.spans.start_ns)
    assert alone.names.texts == spread.names.texts
    assert alone.source == spread.source
    assert alone.notices == spread.notices


def test_a_worker_that_is_killed_in_mid_run_costs_no_rank(cluster: Cluster, job: Path, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    paths = sorted(str(p) for p in job.iterdir())
    with command.reading_pool("dask", cluster.address, None) as executor:
        assert executor is not None
        results = dict(over_files(functools.partial(fatal_once, marker=str(marker)), paths, executor))
    assert list(results) == paths
    for path, part in results.items():
        assert isinstance(part, Part)
        assert np.array_equal(part.spans.start_ns, read_part(path).spans.start_ns)
    dead = [w for w in cluster.workers if w.poll() == -signal.SIGKILL]
    assert [str(w.pid) for w in dead] == [marker.read_text()]


def test_the_command_reads_on_the_cluster(cluster: Cluster, job: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bubblescope", "analyze", str(job), "--engine", "dask", "--scheduler", cluster.address,
         "--no-cache", "--json", "-"],
        capture_output=True, text=True, check=False, cwd=REPO, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["source"]["ranks"] == [0, 1, 2, 3]


def test_a_scheduler_that_does_not_answer_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no dask scheduler"), command.reading_pool("dask", "tcp://127.0.0.1:9", None):
        pass
