"""Clocks of a job's hosts. Two processes, or two objects here, stand in for two hosts, one with a shifted clock."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bubblescope.capture import hostclocks
from bubblescope.capture.hostclocks import HostClocks
from bubblescope.ingest import recording
from bubblescope.model import Kind
from tests.support.sleeping import free_port

pytestmark = pytest.mark.real

SHIFT_NS = 3_600_000_000_000
JOBS = """
import json, multiprocessing, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

def train(rank, folder, port, shift_ns, answers):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    from bubblescope.capture import environment, hostclocks
    if shift_ns:
        environment.boot_id = lambda: f"host-{rank}"
        if rank:  # this host's monotonic clock runs ahead
            real = time.perf_counter_ns
            hostclocks.perf_counter_ns = time.perf_counter_ns = lambda: real() + shift_ns
    import bubblescope
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    part = torch.nn.Linear(8, 8)
    schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), 2, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    x = torch.ones(4, 8)
    with bubblescope.record(folder):
        for _ in range(30):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x, "losses": []} if rank else {}))
            optimizer.step()
            time.sleep(0.01)
        began = time.monotonic()
        dist.destroy_process_group()
    answers.put(time.monotonic() - began)

context = multiprocessing.get_context("fork")
ends = []
for folder, port, shift_ns in json.loads(sys.argv[1]):
    answers = context.Queue()
    ranks = [context.Process(target=train, args=(r, folder, port, shift_ns, answers)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    ends.append([answers.get() for _ in ranks])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """{"two" hosts, or "one": (recording, seconds that the end of the process group took on each rank)}."""
    folders = {hosts: tmp_path_factory.mktemp(hosts) for hosts in ("two", "one")}
    plans = [(str(folder), str(free_port()), SHIFT_NS * (hosts == "two")) for hosts, folder in folders.items()]
    done = subprocess.run([sys.executable, "-c", JOBS, json.dumps(plans)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(zip(folders, zip(folders.values(), json.loads(done.stdout), strict=True), strict=True))


def clock_lines(folder: Path, rank: int) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "clock"]


def test_the_shift_of_a_hosts_clock_is_found_within_its_error(jobs: dict[str, tuple[Path, list[float]]]) -> None:
    folder, ends = jobs["two"]
    assert max(ends) < 2.0
    lines = clock_lines(folder, 1)
    assert {line["phase"] for line in lines} == {"start", "end"}
    for line in lines:
        assert line["reference"] == "host-0"
        assert abs(int(str(line["offset_ns"])) + SHIFT_NS) <= int(str(line["half_ns"])) < 5_000_000
    run = recording.read(folder)
    assert run.clock.aligned and "rank 0" in run.clock.how and run.clock.half_width_ns is not None
    assert 0 < run.clock.half_width_ns < 5_000_000
    send, receive = run.links.p2p[0]
    assert abs(int(run.spans.start_ns[send]) - int(run.spans.start_ns[receive])) < 5_000_000_000
    for sent, received in zip(run.links.p2p[:, 0], run.links.p2p_wait[:, 1], strict=True):
        assert run.spans.end_ns[received] >= run.spans.start_ns[sent] - 2 * run.clock.half_width_ns
    assert run.spans.where(kind=Kind.FORWARD).sum() == 2 * 2 * 30


def test_ranks_of_one_host_have_nothing_to_compare(jobs: dict[str, tuple[Path, list[float]]]) -> None:
    folder, _ = jobs["one"]
    assert clock_lines(folder, 0) == clock_lines(folder, 1) == []
    run = recording.read(folder)
    assert run.notices == () and run.clock.half_width_ns == 0


class Job:
    """A store, and ranks of a job that has it. calls: of which threads the store was used."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: set[threading.Thread] = set()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.add(threading.current_thread())
        return getattr(self.store, name)

    def rank(self, number: int, host: str) -> HostClocks:
        return HostClocks(number, 4, host, lambda line: self.lines.append((host, line)))

    def readings(self) -> list[tuple[str, str, str]]:
        return [(host, line["phase"], line["reference"]) for host, line in self.lines]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    from torch.distributed import PrefixStore, TCPStore

    master = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    one = Job(PrefixStore("default_pg", master))
    monkeypatch.setattr(hostclocks, "store_of_job", lambda: (one, ("127.0.0.1", master.port)))
    monkeypatch.setattr(hostclocks, "LOOK_S", 0.0)
    return one


def train(ranks: list[HostClocks], until: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10.0
    while not until():
        assert time.monotonic() < ends, "nothing came of it"
        for rank in ranks:
            rank.look()
        time.sleep(0.005)


def session(job: Job) -> list[HostClocks]:
    """Four ranks on hosts a and b that have looked for each other and compared their clocks."""
    ranks = [job.rank(number, host) for number, host in enumerate("aabb")]
    had = len(job.lines)
    train(ranks, lambda: len(job.lines) > had)
    return ranks


def stop(ranks: list[HostClocks]) -> None:
    threads = [threading.Thread(target=rank.end) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.stop()


def test_each_recording_of_a_job_compares_its_clocks_and_leaves_nothing_in_the_store(job: Job) -> None:
    for _ in range(2):
        stop(session(job))
        assert job.readings() == [("b", "start", "a"), ("b", "end", "a")]
        assert not job.store.check([hostclocks.KEY])
        job.lines.clear()


def test_a_host_that_comes_later_is_compared_too(job: Job) -> None:
    first = session(job)
    late = job.rank(4, "c")
    train([late], lambda: len(job.lines) == 2)
    stop([*first, late])
    assert sorted(job.readings()) == [(h, p, "a") for h in "bc" for p in ("end", "start")]


def test_only_the_training_thread_uses_the_store_and_over_no_connection_more(job: Job) -> None:
    job.store.set("other", "key")
    before = sockets_to(job.store.underlying_store.port)
    ranks = session(job)
    assert sockets_to(job.store.underlying_store.port) == before
    for rank in ranks:
        rank.leave_store()
    stop(ranks)
    assert job.calls == {threading.current_thread()}
    assert not [thread for thread in threading.enumerate() if thread.name == "bubblescope-clock" and alive(thread)]


def alive(thread: threading.Thread) -> bool:
    thread.join(2.0)
    return thread.is_alive()


def sockets_to(port: int) -> int:
    """Connections of this host to that port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(line[2].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


def test_where_the_launcher_says_that_there_is_one_host_nothing_is_looked_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "4")
    ranks = [job.rank(number, "a") for number in range(4)]
    for rank in ranks:
        rank.look()
    stop(ranks)
    assert job.calls == set() and ranks[0]._answers is None


def test_who_does_not_know_the_token_is_told_nothing(job: Job) -> None:
    first = job.rank(0, "a")
    train([first], lambda: first._published)
    answers = first._answers
    assert answers is not None
    with socket.create_connection(("127.0.0.1", answers.port), 5.0) as stranger:
        stranger.sendall(f"{'0' * 32} start b\n".encode())
        assert stranger.recv(1) == b""
    stop([first])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", answers.port), 5.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_is_asked_once(rank: int, job: Job) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    job.store = Gone()
    clocks = job.rank(rank, "a")
    train([clocks], lambda: clocks._looks_until == 0.0)
    clocks.look()
    stop([clocks])
    assert job.lines == []
