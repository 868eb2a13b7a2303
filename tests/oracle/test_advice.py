"""Advice never promises more than the worse of two readings, and says what it stands on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bubblescope.model import Kind, Lane, Run
from bubblescope.replay import whatif
from bubblescope.replay.schedules import make
from bubblescope.report import facts, ideas
from bubblescope.report.build import Report, ReportOptions, build
from bubblescope.views.summary import first_screen
from tests.support.synthetic import Job, constant, make_run

MS = 1_000_000


def report_of(job: Job, scale: dict[int, float], **options: Any) -> Report:
    return build(make_run(job, constant(20 * MS, 40 * MS, scale)), ReportOptions(**options))


def advice(report: Report, kind: str, **detail: object) -> dict[str, Any]:
    """The first such action that stands alone."""
    rows: list[dict[str, Any]] = [r for r in report.data["advice"] if "rebalanced" not in r["detail"]]
    return next(r for r in rows if r["kind"] == kind and detail.items() <= r["detail"].items())


def test_another_schedule_is_promised_for_the_worse_reading_of_a_slow_stage() -> None:
    """If the GPU is slow, ZBV leaves its work where it is; only if its layers are heavy are they spread."""
    report = report_of(Job(optimizer=MS), {3: 2})
    row = advice(report, "schedule", schedule="ZBVZeroBubble")
    layers, gpu = row["detail"]["step_seconds_if_layers"], row["detail"]["step_seconds_if_gpu"]
    assert layers < gpu == row["step_seconds"]
    # 8 micro-batches of 2 x 60 ms on the slow GPU are a floor that no order goes below.
    assert gpu >= 0.96
    assert any("worse of two cases" in a for a in row["assumptions"])


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "Interleaved1F1B", "GPipe", "DualPipeV"])
def test_a_slow_gpu_stays_slow_under_every_schedule(name: str) -> None:
    """What is predicted for a slow GPU is what a run with a slow GPU takes."""
    report = report_of(Job(), {3: 2})
    a = report.attribution
    basis = ideas.basis(a, facts.pipeline_shape(a), {})
    assert basis.model is not None
    schedule = make(name, 4, 8)
    predicted = whatif.makespan(whatif.on_slow_gpus(basis.model, schedule), schedule.orders, schedule.overlapped)
    slow = {s: 2.0 for order in (schedule.orders[3],) for s in {action.stage for action in order}}
    half = 0.5 if schedule.chunks == 2 else 1.0
    truth = make_run(Job(name, steps=1), constant(round(20 * MS * half), round(40 * MS * half), slow))
    compute = truth.spans.where(lane=Lane.COMPUTE) & (truth.spans.kind != Kind.OPTIMIZER)
    spans = truth.spans.take(compute)
    assert predicted == pytest.approx((spans.end_ns.max() - spans.start_ns.min()) * 1e-9, rel=1e-6)


def test_equal_stages_need_no_second_reading() -> None:
    row = advice(report_of(Job(), {}), "schedule", schedule="ZBVZeroBubble")
    assert "step_seconds_if_gpu" not in row["detail"]


def test_the_slow_stage_of_a_chunked_schedule_is_a_gpu_with_its_true_factor() -> None:
    report = report_of(Job("Interleaved1F1B", chunks=2), {1: 2, 5: 2})
    row = advice(report, "partition")
    assert row["detail"]["slowest_stage"] == 1
    assert row["detail"]["slowdown"] == pytest.approx(2)


def test_what_the_user_says_against_the_input_is_noticed() -> None:
    data = report_of(Job(), {}, stages=9, microbatches=8).data
    said = [w["message"] for w in data["source"]["warnings"] if w["code"] == "overruled"]
    assert len(said) == 1
    assert "stages 4" in said[0] and "9" in said[0]


def test_what_the_user_says_against_the_input_changes_the_closed_form_only() -> None:
    """The headline's reason, the causes and the savings are those of the run that was seen."""
    as_seen = report_of(Job(), {3: 1.5})
    given = {"schedule": "GPipe", "stages": 5, "microbatches": 3}
    report = report_of(Job(), {3: 1.5}, **given)
    data = report.data
    assert {k: data["pipeline"][k] for k in given} == given
    assert data["pipeline"]["overruled"] == {"microbatches": 8, "schedule": "1F1B", "stages": 4}
    assert data["bubble"]["theory"]["fraction"] == pytest.approx(4 / 7)
    for block in ("causes", "advice", "gpus", "replay", "cost"):
        assert data[block] == as_seen.data[block]
    assert first_screen(report).sentence == first_screen(as_seen).sentence
    assert "because 1F1B with 4 stages and 8 micro-batches needs that long" in first_screen(report).sentence
    said = [w["message"] for w in data["source"]["warnings"] if w["code"] == "overruled"]
    assert len(said) == 3
    assert all("contradicts it and is used for the closed form only" in message for message in said)


def test_what_the_user_says_as_the_input_shows_it_overrules_nothing() -> None:
    data = report_of(Job(), {}, schedule="1F1B", stages=4, microbatches=8).data
    assert data["pipeline"]["overruled"] == {}
    assert not [w for w in data["source"]["warnings"] if w["code"] == "overruled"]


def called(name: str, run: Run) -> Report:
    return build(replace(run, layout=replace(run.layout, schedule=name)), ReportOptions())


def test_a_schedule_of_ones_own_name_in_a_known_order_is_that_schedule() -> None:
    run = make_run(Job(optimizer=MS), constant(20 * MS, 40 * MS))
    report, same = called("OurSchedule", run), build(run, ReportOptions())
    pipeline = report.data["pipeline"]
    assert pipeline["schedule"] == "1F1B"
    assert pipeline["inferred"]["schedule"].startswith(
        "the run calls it 'OurSchedule'; the order of 4 of 4 GPUs equals"
    )
    assert advice(report, "microbatches", microbatches=32) == advice(same, "microbatches", microbatches=32)
    assert report.data["advice"] == same.data["advice"]


def test_a_schedule_of_ones_own_name_in_an_order_of_its_own_keeps_its_name() -> None:
    run = make_run(Job("GPipe"), constant(20 * MS, 40 * MS))
    spans = run.spans
    swapped = np.where(spans.kind == Kind.FORWARD, 7 - spans.microbatch, spans.microbatch)
    report = called("OurSchedule", replace(run, spans=spans.with_columns(microbatch=swapped)))
    assert report.data["pipeline"]["schedule"] == "OurSchedule"


def accumulated(passes: int) -> Run:
    """A recording whose optimizer step makes several passes of 4 micro-batches through the pipeline."""
    run = make_run(Job(microbatches=4 * passes, optimizer=MS), constant(20 * MS, 40 * MS))
    s = run.spans
    marks = [(r, k) for r in run.ranks for k in np.unique(s.step[s.step >= 0]) for _ in range(passes)]
    rank, step = (np.array(c) for c in zip(*marks, strict=True))
    rows = type(s).from_columns(len(marks), rank=rank, step=step, lane=int(Lane.RANGE), kind=int(Kind.STEP),
                                start_ns=int(s.start_ns.min()), end_ns=int(s.start_ns.min()))  # fmt: skip
    return replace(run, spans=type(s).concat([s, rows]), source=replace(run.source, format="recording"))


def test_gradient_accumulation_is_counted_in_passes_with_the_closed_form_of_one() -> None:
    report = build(accumulated(2), ReportOptions())
    data = report.data
    assert data["pipeline"]["passes_per_step"] == 2
    assert "1F1B with 4 stages and 4 micro-batches in each of 2 passes needs" in first_screen(report).sentence
    assert data["pipeline"]["microbatches"] == 8
    assert data["bubble"]["theory"]["fraction"] == pytest.approx(3 / 7)
    assert not [a for a in data["advice"] if a["kind"] == "schedule"]


@pytest.mark.parametrize("kind", [Kind.OPTIMIZER, Kind.OTHER, Kind.RECOMPUTE])
def test_what_is_no_part_of_the_pipeline_may_be_given_a_micro_batch(kind: Kind) -> None:
    """`bubblescope.span("optimizer", stage, 0)` says no more than `bubblescope.span("optimizer", stage)`."""
    run = make_run(Job(optimizer=MS), constant(20 * MS, 40 * MS, {3: 2}))
    last = run.spans.kind == Kind.OPTIMIZER
    spans = run.spans.with_columns(kind=np.where(last, kind, run.spans.kind))
    given = spans.with_columns(
        stage=np.where(last, spans.rank, spans.stage), microbatch=np.where(last, 0, spans.microbatch)
    )
    assert ideas_of(replace(run, spans=given)) == ideas_of(replace(run, spans=spans)) != []


def test_where_steps_number_their_micro_batches_differently_no_order_is_replayed_for_them() -> None:
    run = make_run(Job(), constant(20 * MS, 40 * MS, {3: 2}))
    later = (run.spans.step > 0) & (run.spans.microbatch >= 0)
    numbers = run.spans.microbatch + 8 * later
    ideas = ideas_of(replace(run, spans=run.spans.with_columns(microbatch=numbers)))
    assert not {"schedule", "microbatches"} & {idea["kind"] for idea in ideas}


def ideas_of(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = build(run, ReportOptions()).data["advice"]
    return found
