"""`compare`: differences between two runs are found, and noise is not taken for one."""

from __future__ import annotations

import json

import pytest

from bubblescope.report.compare import compare
from tests.support.cases import MS, noisy, report
from tests.support.synthetic import Job, constant


def test_the_same_run_twice_differs_in_nothing() -> None:
    found = compare(report(), report())
    assert (found.worse_fraction, found.unit, found.document()["unit"]) == (0, "step", "step")
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


def test_the_bubble_fraction_is_that_of_both_reports() -> None:
    """Of all steps together: the mean of the steps' own fractions is another number where they differ in length."""
    before, after = report(duration=noisy({}, 1, 0.5)), report(duration=noisy({3: 1.5}, 2, 0.5))
    found = compare(before, after).fraction
    wanted = [r.data["bubble"]["fraction"] for r in (before, after)]
    assert [found.before, found.after] == pytest.approx(wanted, abs=1e-12)
    assert found.difference == pytest.approx(wanted[1] - wanted[0], abs=1e-12)
    assert found.low < found.difference < found.high


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
    # 571 → 1051 ms: 71.375 → 65.6875 ms per micro-batch.
    assert (found.unit, found.microbatches) == ("micro-batch", (8, 16))
    assert found.step_seconds.difference == pytest.approx(0.480, abs=1e-9)
    assert found.unit_seconds is found.per_microbatch
    assert found.unit_seconds.difference == pytest.approx(-0.0056875, abs=1e-9)
    assert found.worse_fraction == pytest.approx(65.6875 / 71.375 - 1, abs=1e-9)
    # Each figure is per micro-batch: busy and idle make up the time, the causes the idle time.
    assert found.idle.difference + found.busy.difference == pytest.approx(-0.0056875, abs=1e-6)
    assert sum(c.difference or 0.0 for c in found.causes.values()) == pytest.approx(found.idle.difference, abs=1e-9)
    for stage, idle in found.stages.items():
        parts = sum(c.difference or 0.0 for c in found.stage_causes[stage].values())
        assert parts == pytest.approx(idle.difference, abs=1e-9)
    said = [n.message for n in found.notices if n.code == "shape-differs"]
    assert said == ["microbatches: 8 before, 16 after; compared per micro-batch, taken to be of the same size"]
    assert compare(report(), report(Job(steps=2, optimizer=1 * MS))).notices[0].code == "few-steps"
