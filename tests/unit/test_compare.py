"""`compare`: differences between two runs are found, and noise is not taken for one."""

from __future__ import annotations

import json

import pytest

from bubblescope.report.compare import compare
from tests.support.cases import MS, noisy, report
from tests.support.synthetic import Job, constant


def test_the_same_run_twice_differs_in_nothing() -> None:
    found = compare(report(), report())
    assert found.worse_fraction == 0
    assert not any(c.sure for c in (found.step_seconds, found.fraction, *found.causes.values(), *found.stages.values()))
    assert all(c.difference in (None, 0) for c in found.causes.values())


def test_a_stage_that_got_slower_is_named_to_the_nanosecond() -> None:
    before = report(duration=constant(10 * MS, 20 * MS))
    found = compare(before, report())
    # 330 → 570 ms and 1 ms of optimizer; imbalance 157.5 ms, of which the schedule takes 22.5 (§10).
    assert found.step_seconds.difference == pytest.approx(0.240, abs=1e-9)
    assert found.worse_fraction == pytest.approx(240 / 331, abs=1e-9)
    assert found.causes["stage_imbalance"].difference == pytest.approx(0.1575, abs=1e-9)
    assert found.causes["stage_imbalance"].sure
    assert found.stages[3].difference == pytest.approx(0.0, abs=1e-9)


def test_causes_sum_to_the_change_of_idle() -> None:
    found = compare(report(duration=noisy({}, 1)), report(duration=noisy({3: 1.5}, 2)))
    total = sum(c.difference or 0.0 for c in found.causes.values())
    assert total == pytest.approx(found.idle.difference, abs=1e-6)


def test_noise_alone_is_not_called_a_change_of_the_step() -> None:
    job = Job(steps=12, optimizer=1 * MS)
    found = compare(report(job, noisy({}, 1)), report(job, noisy({}, 2)))
    assert not found.step_seconds.sure
    assert found.step_seconds.low < 0 < found.step_seconds.high
    # Base times are uncertain too, although they do not vary from step to step.
    assert found.causes["warmup"].low < found.causes["warmup"].difference < found.causes["warmup"].high


def test_the_answer_is_the_same_each_time_and_strict_json() -> None:
    before, after = report(duration=noisy({}, 1)), report(duration=noisy({}, 2))
    texts = {json.dumps(compare(before, after).document(), allow_nan=False) for _ in range(2)}
    assert len(texts) == 1


def test_other_shapes_are_said_and_counted_per_microbatch() -> None:
    found = compare(report(), report(Job(microbatches=16, steps=6, optimizer=1 * MS)))
    assert found.per_microbatch is not None
    assert found.per_microbatch.difference < 0
    assert any(n.code == "shape-differs" and "8 before, 16 after" in n.message for n in found.notices)
    assert compare(report(), report(Job(steps=2, optimizer=1 * MS))).notices[0].code == "few-steps"
