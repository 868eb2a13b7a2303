"""What varies between operations, and a slow GPU, come again as often as the changed step has operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bubblescope.model import Action, Kind, Lane, Run
from bubblescope.replay import whatif
from bubblescope.replay.schedules import make
from bubblescope.report.advice import Wanted, explore
from bubblescope.report.build import build
from bubblescope.report.tables import step_seconds
from tests.support.cases import MS, report
from tests.support.synthetic import Duration, Job, constant, make_run

MICROBATCHES = 8
ALL = 320
"""Micro-batches of a run: 40 steps of 8, or 10 of 32, of the same ones."""

Factor = Callable[[int, int, int, Action], float]
"""(number of the micro-batch in the run, replica, GPU, action) -> how much longer than usual"""


def sizes() -> Factor:
    """Micro-batches of different length, the same on every stage."""
    factor = np.random.default_rng(7).lognormal(0.0, 0.3, ALL)
    return lambda number, replica, gpu, action: float(factor[number])


def single() -> Factor:
    """Every operation is as long as it happens to be."""
    factor = np.random.default_rng(8).lognormal(0.0, 0.3, (ALL, 2, 4, 2))
    return lambda number, replica, gpu, action: float(factor[number, replica, gpu, int(action.kind == Kind.FORWARD)])


def pauses() -> Factor:
    """One micro-batch in 37 takes five times as long, on one GPU or another."""
    return lambda number, replica, gpu, action: 5.0 if (11 * number + 5 * gpu) % 37 == 0 else 1.0


def slow_gpu() -> Factor:
    return lambda number, replica, gpu, action: 1.5 if (replica, gpu) == (1, 2) else 1.0


def duration(job: Job, factor: Factor) -> Duration:
    """F = 10 and B = 20 ms of each GPU and micro-batch, split evenly over its chunks."""
    usual = constant(10 * MS, 20 * MS)
    chunks = make(job.schedule, job.stages, job.microbatches, job.chunks).chunks

    def of(step: int, replica: int, gpu: int, action: Action) -> int:
        number = step * job.microbatches + action.microbatch
        return round(usual(step, replica, gpu, action) * factor(number, replica, gpu, action) / chunks)

    return of


def job_of(microbatches: int = MICROBATCHES, schedule: str = "1F1B", replicas: int = 1) -> Job:
    return Job(schedule, microbatches=microbatches, steps=ALL // microbatches, replicas=replicas, sync=0, optimizer=MS)


CASES = [(sizes, 1), (single, 1), (single, 2), (pauses, 1), (slow_gpu, 2), (slow_gpu, 4)]


@pytest.mark.parametrize(("factor", "replicas"), CASES)
@pytest.mark.parametrize("microbatches", [4, 16, 32])
def test_another_number_of_micro_batches_takes_what_a_run_with_so_many_takes(
    factor: Callable[[], Factor], replicas: int, microbatches: int
) -> None:
    before, after = job_of(replicas=replicas), job_of(microbatches, replicas=replicas)
    found = explore(report(before, duration(before, factor())), Wanted(microbatches=(microbatches,)))
    truth = step_seconds(report(after, duration(after, factor())).attribution)[1].mean()
    assert found["changes"][0]["step_seconds"] == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize(("factor", "replicas"), [(sizes, 1), (pauses, 1), (slow_gpu, 3)])
@pytest.mark.parametrize("schedule", ["GPipe", "ZB-H1", "ZB-H2", "ZBVZeroBubble", "Interleaved1F1B"])
def test_another_schedule_takes_what_a_run_with_it_takes(
    factor: Callable[[], Factor], replicas: int, schedule: str
) -> None:
    """A slow GPU stays slow, a long micro-batch long on both of its chunks. Which stage has more of the pauses is by
    chance, but counts as its weight where stages move to other GPUs: up to 0.3 %."""
    before, after = job_of(replicas=replicas), job_of(schedule=schedule, replicas=replicas)
    found = explore(report(before, duration(before, factor())), Wanted(schedules=(schedule,)))
    truth = step_seconds(report(after, duration(after, factor())).attribution)[1].mean()
    assert found["changes"][0]["step_seconds"] == pytest.approx(truth, rel=3e-3)


@pytest.mark.parametrize("microbatches", [4, 16, 32])
def test_data_that_a_step_waits_for_is_loaded_for_each_of_its_micro_batches(microbatches: int) -> None:
    usual = constant(10 * MS, 20 * MS)
    before = replace(job_of(), data=40 * MS, host=7 * MS)
    after = replace(job_of(microbatches), data=40 * MS * microbatches // MICROBATCHES, host=7 * MS)
    found = explore(report(before, usual), Wanted(microbatches=(microbatches,)))["changes"][0]
    truth = step_seconds(report(after, usual).attribution)[1].mean()
    assert found["step_seconds"] == pytest.approx(truth, rel=1e-3)
    assert found["saved_seconds"] == pytest.approx(found["now_seconds"] - truth * 8 / microbatches, rel=5e-3)


def test_pauses_of_the_host_come_with_the_micro_batches() -> None:
    """Here the host of the first GPU takes 5 ms before each forward but the first of a step."""

    def shown_late(microbatches: int) -> Run:
        job = job_of(microbatches)
        usual = constant(10 * MS, 20 * MS)

        def longer(step: int, replica: int, gpu: int, action: Action) -> int:
            late = gpu == 0 and action.kind == Kind.FORWARD and action.microbatch > 0
            return usual(step, replica, gpu, action) + (5 * MS if late else 0)

        run = make_run(job, longer)
        s = run.spans
        late = (s.rank == 0) & (s.kind == Kind.FORWARD) & (s.lane == Lane.COMPUTE) & (s.microbatch > 0)
        return replace(run, spans=s.with_columns(start_ns=s.start_ns + np.where(late, 5 * MS, 0)))

    found = explore(build(shown_late(8)), Wanted(microbatches=(16, 32)))
    for change in found["changes"]:
        truth = step_seconds(build(shown_late(change["detail"]["microbatches"])).attribution)[1].mean()
        assert change["step_seconds"] == pytest.approx(truth, rel=0.015)


def test_a_transfer_that_was_not_seen_is_one_that_was() -> None:
    """Into stage 1 of one replica: 2 and 4 were seen, the others may be either. Into stage 0 none came."""
    transfer = np.full((2, 1, 2, 4, 1), np.nan)
    transfer[0, 0, 1, [0, 2], 0] = [2.0, 4.0]
    done = whatif._completed(transfer)
    assert done[0, 0, 1, :, 0].tolist() == [2.0, 2.0, 4.0, 4.0]
    assert sorted(set(done[0, 0, 0, :, 0].tolist())) == [2.0, 4.0]
    assert (done[1] == 0).all()


def test_no_prediction_is_below_what_the_slow_gpu_computes() -> None:
    job = job_of(replicas=3)
    (change,) = explore(report(job, duration(job, slow_gpu())), Wanted(microbatches=(32,)))["changes"]
    assert change["step_seconds"] > 32 * 0.045
    assert any("slow GPUs stay slow" in a for a in change["assumptions"])
