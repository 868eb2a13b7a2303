"""Clocks of a job's hosts, compared over its store. Two processes stand in for two hosts, one with a shifted clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bubblescope.ingest import recording
from bubblescope.model import Kind
from tests.support.sleeping import free_port

pytestmark = pytest.mark.real

JOB = """
import os, sys, time
rank, shift_ns = int(os.environ["RANK"]), int(sys.argv[2])
from bubblescope.capture import environment, hostclocks
if sys.argv[3] == "two":
    environment.boot_id = lambda: f"host-{rank}"
    if rank:  # this host's monotonic clock runs ahead
        real = time.perf_counter_ns
        shifted = lambda: real() + shift_ns
        hostclocks.perf_counter_ns = time.perf_counter_ns = shifted
import bubblescope
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
torch.set_num_threads(1)
dist.init_process_group("gloo")
part = torch.nn.Linear(8, 8)
schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), 2, loss_fn=torch.nn.MSELoss())
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
x = torch.ones(4, 8)
with bubblescope.record(sys.argv[1]):
    for _ in range(8):
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x, "losses": []} if rank else {}))
        optimizer.step()
        time.sleep(0.01)
    began = time.monotonic()
    dist.destroy_process_group()
print(time.monotonic() - began)
"""


def train(folder: Path, shift_ns: int, hosts: str) -> list[float]:
    """Seconds that the end of the process group took on each rank."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(folder), str(shift_ns), hosts],
            env={**os.environ, "RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [float(text) for text in said]


def clock_lines(folder: Path, rank: int) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "clock"]


def test_the_shift_of_a_hosts_clock_is_found_within_its_error(tmp_path: Path) -> None:
    shift_ns = 3_600_000_000_000
    ends = train(tmp_path, shift_ns, "two")
    assert max(ends) < 2.0
    lines = clock_lines(tmp_path, 1)
    assert {line["phase"] for line in lines} >= {"start"}
    for line in lines:
        assert line["reference"] == "host-0"
        assert abs(int(str(line["offset_ns"])) + shift_ns) <= int(str(line["half_ns"])) < 5_000_000
    run = recording.read(tmp_path)
    assert run.clock.aligned and "store" in run.clock.how and run.clock.half_width_ns is not None
    assert 0 < run.clock.half_width_ns < 5_000_000
    send, receive = run.links.p2p[0]
    assert abs(int(run.spans.start_ns[send]) - int(run.spans.start_ns[receive])) < 5_000_000_000
    for sent, received in zip(run.links.p2p[:, 0], run.links.p2p_wait[:, 1], strict=True):
        assert run.spans.end_ns[received] >= run.spans.start_ns[sent] - 2 * run.clock.half_width_ns
    assert run.spans.where(kind=Kind.FORWARD).sum() == 2 * 2 * 8


def test_ranks_of_one_host_have_nothing_to_compare(tmp_path: Path) -> None:
    train(tmp_path, 0, "one")
    assert clock_lines(tmp_path, 0) == clock_lines(tmp_path, 1) == []
    run = recording.read(tmp_path)
    assert run.notices == () and run.clock.half_width_ns == 0
