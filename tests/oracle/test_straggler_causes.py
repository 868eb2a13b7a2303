"""Our decomposition of the two public straggler jobs names the cause that their paper found, in seconds, in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.report.build import ReportOptions, build

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "straggler"
INTRINSIC = ("warmup", "cooldown", "schedule_steady")
WANTED = {
    "ST": ("stage_imbalance", 0.30, 2.214, {"slowdown": 1.17870, "stage_share": 1.2194, "worker_share": 0.0314}),
    "SE": ("microbatch_imbalance", 2.1, 9.113, {"slowdown": 1.53736, "stage_share": 0.6877, "worker_share": 0.0251}),
}


@pytest.mark.parametrize("job", ["ST", "SE"])
def test_the_first_cause_is_the_papers_and_stands_beside_its_figures(job: str) -> None:
    pytest.importorskip("pyarrow")
    path = DATA / f"trace-{job}.parquet"
    if not path.exists():
        pytest.skip("the straggler data is not here")
    name, seconds, step, figures = WANTED[job]
    began = time.process_time()
    data = build(prepare(read([str(path)])), ReportOptions()).data
    assert time.process_time() - began < 10
    causes = {c: row["seconds"] for c, row in data["causes"].items() if c not in INTRINSIC}
    assert max(causes, key=lambda c: causes[c]) == name
    assert causes[name] == pytest.approx(seconds, rel=0.03)
    assert data["replay"]["step_seconds"] == pytest.approx(step, rel=1e-3)
    assert data["replay"]["trusted"]
    assert {key: data["straggler"][key] for key in figures} == pytest.approx(figures, rel=2e-3)
    assert data["straggler"]["waste"] == pytest.approx(1 - 1 / figures["slowdown"], rel=1e-3)
