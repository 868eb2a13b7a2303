"""A broken time stamp takes its step out; a step that was merely held up stays."""

from __future__ import annotations

import numpy as np
import pytest

from bubblescope.analysis.quarantine import quarantine
from bubblescope.model import Run
from tests.support.synthetic import Job, constant, make_run

SECOND = 1_000_000_000
RUN = make_run(Job(steps=3), constant(1_000_000, 2_000_000))


def with_row(by_ns: int, *, start: int | None = None) -> Run:
    """The run with one row of rank 1, step 1 moved."""
    s = RUN.spans
    row = int(np.flatnonzero((s.rank == 1) & (s.step == 1) & (s.microbatch == 3))[0])
    starts, ends = s.start_ns.copy(), s.end_ns.copy()
    starts[row] = starts[row] + by_ns if start is None else start
    ends[row] += by_ns
    return Run(s.with_columns(start_ns=starts, end_ns=ends), RUN.names, RUN.layout, RUN.links, RUN.clock)


@pytest.mark.parametrize("run", [with_row(3600 * SECOND), with_row(-3600 * SECOND), with_row(0, start=0)])
def test_an_impossible_time_takes_out_its_step_of_its_rank(run: Run) -> None:
    made = quarantine(run)
    assert [n.code for n in made.notices] == ["impossible-times"]
    assert "rank 1, step 1" in made.notices[0].message
    gone = (made.spans.step < 0) & (RUN.spans.step >= 0)
    assert set(RUN.spans.rank[gone].tolist()) == {1}
    assert set(RUN.spans.step[gone].tolist()) == {1}


def test_a_step_that_a_stall_held_up_for_a_minute_is_kept() -> None:
    assert quarantine(with_row(60 * SECOND)).notices == ()


def test_a_clean_run_and_an_empty_one_pass_unchanged() -> None:
    assert quarantine(RUN) is RUN
    assert len(quarantine(Run.empty()).spans) == 0
