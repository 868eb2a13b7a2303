"""Clocks of a job's hosts, compared over its store. Two processes stand in for two hosts, one with a shifted clock."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

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
        for _ in range(8):
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
    assert {line["phase"] for line in lines} >= {"start"}
    for line in lines:
        assert line["reference"] == "host-0"
        assert abs(int(str(line["offset_ns"])) + SHIFT_NS) <= int(str(line["half_ns"])) < 5_000_000
    run = recording.read(folder)
    assert run.clock.aligned and "store" in run.clock.how and run.clock.half_width_ns is not None
    assert 0 < run.clock.half_width_ns < 5_000_000
    send, receive = run.links.p2p[0]
    assert abs(int(run.spans.start_ns[send]) - int(run.spans.start_ns[receive])) < 5_000_000_000
    for sent, received in zip(run.links.p2p[:, 0], run.links.p2p_wait[:, 1], strict=True):
        assert run.spans.end_ns[received] >= run.spans.start_ns[sent] - 2 * run.clock.half_width_ns
    assert run.spans.where(kind=Kind.FORWARD).sum() == 2 * 2 * 8


def test_ranks_of_one_host_have_nothing_to_compare(jobs: dict[str, tuple[Path, list[float]]]) -> None:
    folder, _ = jobs["one"]
    assert clock_lines(folder, 0) == clock_lines(folder, 1) == []
    run = recording.read(folder)
    assert run.notices == () and run.clock.half_width_ns == 0


def test_no_thread_is_left_that_tries_to_reach_a_store_which_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As jobs of srun and mpirun end, with rank 0: torch goes on trying for seconds, and an interpreter that exits
    meanwhile would abort."""
    import torch.distributed

    assert torch.distributed.is_available()
    monkeypatch.setattr(hostclocks, "store_address", lambda: ("127.0.0.1", free_port()))
    clocks = HostClocks(1, 2, "here", lambda line: None)
    clocks.start()
    assert clocks._thread is None
    clocks.end()
    clocks.stop()


def test_the_thread_never_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is there before the thread is, and the thread has left the store when the job may end it."""
    connected = []

    class Store:
        def add(self, key: str, amount: int) -> int:
            return 1

        def set(self, key: str, value: str) -> None:
            pass

    def connect(address: tuple[str, int], limit_s: float) -> Store:
        connected.append(threading.current_thread())
        return Store()

    monkeypatch.setattr(hostclocks, "store_address", lambda: ("127.0.0.1", 1))
    monkeypatch.setattr(hostclocks, "connect", connect)
    clocks = HostClocks(0, 2, "here", lambda line: None)
    clocks.start()
    clocks.end()
    assert connected == [threading.current_thread()]
    assert clocks._thread is not None and not clocks._thread.is_alive()
