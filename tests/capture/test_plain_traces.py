"""Real profiler traces of two ranks, once with the schedule's ranges and once without: what is inferred is the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bubblescope.ingest import read
from bubblescope.label import label
from bubblescope.model import PIPELINE_KINDS, Lane, Run
from tests.support.sleeping import SleepRun, run_pipelines

pytestmark = pytest.mark.real

FOLLOWED = ("1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B")
REFUSED = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
Told = dict[tuple[int, int, str], tuple[int, int, int]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """schedule -> (with ranges, without)."""
    folder = tmp_path_factory.mktemp("plain")
    names = (*FOLLOWED, *REFUSED)
    run_pipelines(
        [SleepRun(n, 2, 4, 0.004, 0.008, steps=3, out=folder / n / "rec", profiler=folder / n / "with") for n in names]
    )
    for name in names:
        _strip(folder / name / "with", folder / name / "without")
    return {name: (label(read(folder / name / "with")), label(read(folder / name / "without"))) for name in names}


def _strip(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.glob("*.json"):
        document = json.loads(path.read_text())
        ours = ("PP:", "Forward ", "Backward ")
        document["traceEvents"] = [e for e in document["traceEvents"] if not str(e.get("name")).startswith(ours)]
        (target / path.name).write_text(json.dumps(document))


def told(run: Run) -> Told:
    """(rank, start, name) -> (kind, stage, micro-batch) of every operator with a micro-batch, after the first step: in
    that one torch sends what the stages exchange about their shapes."""
    s = run.spans
    rows = np.flatnonzero(
        (s.lane == Lane.COMPUTE) & np.isin(s.kind, PIPELINE_KINDS) & (s.microbatch >= 0) & (s.step > 0)
    )
    keys = zip(s.rank[rows].tolist(), s.start_ns[rows].tolist(), [run.names[i] for i in s.name[rows]], strict=True)
    labels = zip(s.kind[rows].tolist(), s.stage[rows].tolist(), s.microbatch[rows].tolist(), strict=True)
    return dict(zip(keys, labels, strict=True))


@pytest.mark.parametrize("schedule", FOLLOWED)
def test_every_operator_of_autograd_is_labelled_as_the_ranges_say(
    seen: dict[str, tuple[Run, Run]], schedule: str
) -> None:
    ranges, plain = seen[schedule]
    want, got = told(ranges), told(plain)
    engine = {key: labels for key, labels in want.items() if "evaluate_function" in key[2] or "matmul" in key[2]}
    assert len(engine) > 50
    assert {key: got.get(key) for key in engine} == engine
    assert plain.layout.schedule == schedule
    assert plain.layout.stage_rank == ranges.layout.stage_rank


@pytest.mark.parametrize("schedule", REFUSED)
def test_what_cannot_be_followed_gets_no_stage(seen: dict[str, tuple[Run, Run]], schedule: str) -> None:
    _, plain = seen[schedule]
    assert told(plain) == {}
    assert not plain.layout.stage_rank
    assert "stages-unclear" in {n.code for n in plain.notices}
