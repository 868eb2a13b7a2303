"""A process that records for long: its memory, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bubblescope.ingest import recording

pytestmark = pytest.mark.real

STEPS = 10_000
LOOP = f"""
import gc, os, sys
import bubblescope

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

def train(steps):
    for _ in range(steps):
        for kind in ("recv_forward", "F", "send_forward", "recv_backward", "B", "send_backward"):
            for microbatch in range(2):
                with bubblescope.span(kind, 1, microbatch):
                    pass
        bubblescope.step()

with bubblescope.record(sys.argv[1]):
    train(500)
    gc.collect()
    before = resident_mb()
    train({STEPS} - 500)
    gc.collect()
    print(resident_mb() - before, sorted({{"pandas", "plotly", "torch"}} & set(sys.modules)))
"""


def test_ten_thousand_steps_take_less_than_fifty_megabytes(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(tmp_path)], env=variables, capture_output=True, text=True, check=True
    )
    grown, _, loaded = done.stdout.partition(" ")
    assert float(grown) < 50 and loaded.strip() == "[]"
    run = recording.read(tmp_path)
    lost = [notice for notice in run.notices if notice.code in ("rows-dropped", "lines-lost")]
    assert lost or max(run.spans.step) == STEPS - 1
