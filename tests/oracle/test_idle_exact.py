"""Idle time read from a trace against decimal arithmetic on its very text: not one nanosecond apart."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from pathlib import Path

import pytest

import bubblescope as bs
from bubblescope.ingest import kineto_scan, read
from bubblescope.model import Lane

BASES = {"small": 0, "a day": 86_400_000_000, "2^42 us": 4_398_046_511_104, "an epoch": 1_766_000_000_000_000}


def trace(base_us: int, seed: int) -> tuple[str, Decimal, Decimal]:
    """A trace as text, with short kernels at every nanosecond; its busy time and its span (us, exact)."""
    dice = random.Random(seed)
    at = Decimal(base_us)
    events, busy, first = [], Decimal(0), Decimal(0)
    for i in range(2000):
        at += Decimal(dice.randrange(1, 4000)) / 1000
        length = Decimal(dice.randrange(1, 2500)) / 1000
        first = first or at
        events.append(
            f'{{"ph": "X", "cat": "kernel", "name": "k{i % 7}", "pid": 0, "tid": 7, "ts": {at:f}, "dur": {length:f}, '
            f'"args": {{"device": 0, "stream": 7, "correlation": {i}}}}}'
        )
        at += length
        busy += length
    events.append(
        f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "pid": 1, "tid": 1, "ts": {first:f}, '
        f'"dur": {at - first:f}}}'
    )
    head = json.dumps({"distributedInfo": {"rank": 0, "world_size": 1, "backend": "nccl"}})
    return f'{head[:-1]}, "traceEvents": [{", ".join(events)}]}}', busy, at - first


@pytest.mark.parametrize("native", [True, False], ids=["native", "Python"])
@pytest.mark.parametrize("base", sorted(BASES))
def test_busy_and_idle_are_exact_to_the_nanosecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(kineto_scan, "open_scanner", lambda columns: None)
    text, busy, span = trace(BASES[base], seed=3)
    path = tmp_path / "rank0.json"
    path.write_text(text)
    run = read(path)
    s = run.spans
    rows = s.lane == Lane.COMPUTE
    assert int((s.end_ns - s.start_ns)[rows].sum()) == int(busy * 1000)
    assert int(s.end_ns[rows].max() - s.start_ns[rows].min()) == int(span * 1000)
    found = bs.analyze(run).data["gpus"][0]
    assert round(found["busy"] * 1e9) == int(busy * 1000)
    assert round(found["idle"] * 1e9) == int((span - busy) * 1000)
