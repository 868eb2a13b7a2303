"""The per-rank pass on a real dask cluster: a scheduler and two workers on loopback, one of them killed in mid-run."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from bubblescope.cli import analyze as command
from bubblescope.errors import InputError, UsageError
from bubblescope.ingest import cluster as module
from bubblescope.ingest import read
from bubblescope.ingest.kineto import read_part
from bubblescope.ingest.parallel import over_files
from bubblescope.ingest.part import Part
from tests.support.dask_reader import endless, fatal_once
from tests.support.kineto_gen import Shape, Style, simulate, traces, write

pytest.importorskip("distributed", reason="the dask extra is not installed")
REPO = Path(__file__).resolve().parents[2]


@dataclass
class Cluster:
    address: str
    scheduler: subprocess.Popen[bytes]
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
        yield Cluster(address, processes[0], processes[1:])
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


def test_a_scheduler_that_is_lost_in_mid_run_is_an_input_error(cluster: Cluster, job: Path) -> None:
    paths = [str(p) for p in job.iterdir()]
    killer = threading.Timer(2, cluster.scheduler.kill)
    with command.reading_pool("dask", cluster.address, None) as executor:
        killer.start()
        with pytest.raises(InputError, match=f"the dask scheduler at {cluster.address} was lost"):
            list(over_files(endless, paths, executor))
    killer.join()


def test_a_cluster_without_workers_is_told_once_and_then_given_up(
    cluster: Cluster, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "TELL_AFTER_S", 1.0)
    monkeypatch.setattr(module, "END_AFTER_S", 4.0)
    for worker in cluster.workers:
        worker.kill()
    with (
        command.reading_pool("dask", cluster.address, None) as executor,
        pytest.raises(InputError, match=r"no worker has been connected .* for 4 s"),
    ):
        read(job, executor=executor)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: no worker is connected to the dask scheduler at {cluster.address}; waiting for one"


def test_relative_paths_mean_the_same_to_workers_in_another_folder(
    cluster: Cluster, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job)
    with command.reading_pool("dask", cluster.address, None) as executor:
        assert read(".", executor=executor).ranks == [0, 1, 2, 3]


def test_a_file_that_only_a_worker_does_not_see_is_said_to_be_so(cluster: Cluster) -> None:
    with command.reading_pool("dask", cluster.address, None) as executor:
        ((_, result),) = over_files(read_part, ["/nowhere/rank0.json"], executor)
    assert isinstance(result, InputError)
    assert re.search(r"the dask worker on \S+ does not see this file", str(result))


def test_a_file_that_kills_every_worker_costs_only_itself() -> None:
    from distributed import KilledWorker

    class Client:
        """A cluster whose workers die of one file."""

        scheduler = SimpleNamespace(address="tcp://x")

        def submit(self, function: Callable[..., Any], *args: Any, **_: Any) -> Any:
            result = Mock(side_effect=KilledWorker("a", None, 4)) if "bad" in args[1] else Mock(return_value="read")
            return SimpleNamespace(result=result)

    pool = module.DaskPool(Client(), lambda what: None)
    good, bad = (result for _, result in over_files(read_part, ["good.json", "bad.json"], pool))
    assert good == "read"
    assert isinstance(bad, InputError)
    assert "were killed" in str(bad)


def test_a_scheduler_that_does_not_answer_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no dask scheduler"), command.reading_pool("dask", "tcp://127.0.0.1:9", None):
        pass
