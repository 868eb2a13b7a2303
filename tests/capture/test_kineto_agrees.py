"""One real run, seen twice: by our hooks and by torch.profiler. Both must tell the same story."""

from __future__ import annotations

import numpy as np
import pytest

from bubblescope.algebra import intervals
from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.label.schedule import letters, operations
from bubblescope.model import Kind, Lane, Run
from tests.support.sleeping import SleepRun, run_pipelines

pytestmark = pytest.mark.real

P, M = 4, 8
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """schedule -> (recording, profiler trace)."""
    folder = tmp_path_factory.mktemp("twice")
    runs = [
        SleepRun(name, P, M, 0.020, 0.040, steps=5, out=folder / name / "rec", profiler=folder / name / "prof")
        for name in SCHEDULES
    ]
    run_pipelines(runs)
    return {name: (prepare(read(folder / name / "rec")), prepare(read(folder / name / "prof"))) for name in SCHEDULES}


def step_ends(run: Run) -> list[int]:
    """End of each step: the latest optimizer end of any rank."""
    s = run.spans
    rows = (s.lane == Lane.COMPUTE) & (s.kind == Kind.OPTIMIZER)
    return [int(s.end_ns[rows & (s.step == step)].max()) for step in sorted(set(s.step[rows].tolist()))]


def idle_ns(run: Run) -> np.ndarray:
    """Idle of each rank in each window between the ends of two steps, shape (ranks, steps - 1)."""
    s, ends = run.spans, step_ends(run)
    out = []
    for rank in run.ranks:
        rows = (s.rank == rank) & (s.lane == Lane.COMPUTE)
        busy = intervals.union(s.start_ns[rows], s.end_ns[rows])
        out.append(np.diff(ends) - np.diff(intervals.measure_before(busy, ends)))
    return np.array(out)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_measure_the_same_idle_per_rank(seen: dict[str, tuple[Run, Run]], schedule: str) -> None:
    """In the usual step, within 5 %, or within 1 % of the step where there is little idle: the hooks count the Python
    around an operation's first and last operator as work, of which the profiler knows nothing."""
    hooks, profiler = seen[schedule]
    step = np.median(np.diff(step_ends(hooks)))
    idle = idle_ns(hooks)
    apart = np.median(np.abs(idle_ns(profiler) - idle), axis=1)
    assert (apart <= np.maximum(0.05 * np.median(idle, axis=1), 0.01 * step)).all(), (apart, idle, step)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_profiler_trace_tells_the_schedule(seen: dict[str, tuple[Run, Run]], schedule: str) -> None:
    hooks, profiler = seen[schedule]
    assert profiler.layout.schedule == schedule
    assert profiler.layout.stage_rank == hooks.layout.stage_rank
    assert (profiler.layout.microbatches, profiler.layout.chunks) == (M, hooks.layout.chunks)


@pytest.mark.parametrize("schedule", ("1F1B", "GPipe", "Interleaved1F1B"))
def test_every_rank_did_the_same_operations_in_the_same_order(seen: dict[str, tuple[Run, Run]], schedule: str) -> None:
    hooks, profiler = (operations(run) for run in seen[schedule])
    for rank in range(P):
        assert letters(profiler[(rank, 2)]) == letters(hooks[(rank, 2)])
        assert profiler[(rank, 2)] == hooks[(rank, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_matched_and_arrive_at_the_same_times(seen: dict[str, tuple[Run, Run]], schedule: str) -> None:
    hooks, profiler = seen[schedule]

    def arrivals(run: Run) -> list[tuple[int, int, int, int]]:
        s, wait = run.spans, run.links.p2p_wait[:, 1]
        rows = (s.step[run.links.p2p[:, 1]] == 2) & (wait >= 0)
        send, receive = run.links.p2p[rows, 0], run.links.p2p[rows, 1]
        found = zip(s.rank[send], s.rank[receive], s.start_ns[send], s.end_ns[wait[rows]], strict=True)
        return sorted((int(a), int(b), int(c), int(d)) for a, b, c, d in found)

    mine, theirs = arrivals(profiler), arrivals(hooks)
    assert [m[:2] for m in mine] == [t[:2] for t in theirs]
    # Both stamp the same moments; the clocks' origins differ by a constant.
    apart = np.array([m[2:] for m in mine]) - np.array([t[2:] for t in theirs])
    assert np.ptp(apart - np.median(apart)) < 5_000_000
