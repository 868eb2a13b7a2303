"""The decompositions of ATTRIBUTION.md §10, found in runs that a replay wrote down."""

from __future__ import annotations

import numpy as np
import pytest

from bubblescope.model import Action, Kind, Run
from bubblescope.replay.attribution import PHASES, Attribution, attribute
from bubblescope.replay.causes import CAUSES
from bubblescope.report.build import ReportOptions, build
from tests.support.synthetic import Duration, Job, constant, make_run

F, B = 1000, 2000


def causes_of(run: Run) -> dict[str, float]:
    """Mean ns per GPU in the last step, without the zeros."""
    a = attribute(run)
    last = a.windows.step == a.windows.step.max()
    mean = a.per_window(a.gaps.causes)[last].mean(axis=0)
    return {name: round(float(v), 6) for name, v in zip(CAUSES, mean, strict=True) if abs(v) > 1e-6}


def phases_of(a: Attribution) -> np.ndarray:
    out = np.zeros((len(a.windows), len(PHASES)))
    np.add.at(out, (a.gaps.window, a.gaps.phase), a.gaps.idle_ns)
    return out


def spike(step: int, replica: int, rank: int, action: Action) -> int:
    base = F if action.kind == Kind.FORWARD else B
    return base * (3 if action.stage == 1 and action.microbatch == 4 else 1)


DECOMPOSITIONS: list[tuple[str, Job, Duration, dict[str, float]]] = [
    ("uniform 33 = 24 + 9", Job(), constant(F, B), {"warmup": 4500, "cooldown": 4500}),
    (
        "last stage 2x: 57 = 30 + 11.25 + 15.75",
        Job(),
        constant(F, B, {3: 2}),
        {"warmup": 5625, "cooldown": 5625, "stage_imbalance": 15750},
    ),
    (
        "F4, B4 of stage 1 3x: 39 = 24 + 9 + 0 + 6, of which GPU 1 works 6 and so the mean idle is 4.5",
        Job(),
        spike,
        {"warmup": 4500, "cooldown": 4500, "transient": 4500},
    ),
    (
        "hop latency .1: 34.6 = 24 + 9 + 0 + 0 + 1.6",
        Job(comm=100),
        constant(F, B),
        {"warmup": 4500, "cooldown": 4500, "p2p_transfer": 1600},
    ),
]


@pytest.mark.parametrize(
    ("job", "duration", "wanted"), [d[1:] for d in DECOMPOSITIONS], ids=[d[0] for d in DECOMPOSITIONS]
)
def test_the_printed_decompositions_come_out_to_the_nanosecond(
    job: Job, duration: Duration, wanted: dict[str, float]
) -> None:
    assert causes_of(make_run(job, duration)) == wanted


def test_slow_replica_is_a_slow_worker_and_not_an_uneven_stage() -> None:
    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        base = F if action.kind == Kind.FORWARD else B
        return base * (2 if replica == 1 and action.stage == 2 else 1)

    found = causes_of(make_run(Job(replicas=3, sync=1), duration))
    assert found["slow_worker"] > 10_000
    assert "stage_imbalance" not in found


def test_micro_batches_of_different_size_are_named_so() -> None:
    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        return (F if action.kind == Kind.FORWARD else B) * (1 + action.microbatch % 3)

    found = causes_of(make_run(Job(), duration))
    assert found["microbatch_imbalance"] > 1000
    assert "transient" not in found


def test_host_data_optimizer_and_collective_are_each_named() -> None:
    job = Job(host=500, data=300, optimizer=700, sync=200)
    found = causes_of(make_run(job, constant(F, B)))
    assert {k: v for k, v in found.items() if k not in ("warmup", "cooldown")} == {
        "host_launch": 500,
        "data_loading": 300,
        "exposed_collective": 200,
    }


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_phases_of_each_stage_follow_the_closed_form(schedule: str) -> None:
    a = attribute(make_run(Job(schedule, steps=1, optimizer=1), constant(F, B)))
    wanted = [[s * F + (3 - s) * B, 0, (3 - s) * F + s * B] for s in range(4)]
    assert phases_of(a).tolist() == wanted


@pytest.mark.parametrize(
    ("schedule", "chunks", "makespan"),
    [("LoopedBFS", 2, 57), ("Interleaved1F1B", 2, 57), ("InterleavedZeroBubble", 2, 51), ("ZBVZeroBubble", 2, 51)],
)
def test_intrinsic_idle_of_every_schedule_is_its_makespan_less_its_work(
    schedule: str, chunks: int, makespan: int
) -> None:
    found = causes_of(make_run(Job(schedule, chunks=chunks), constant(F, B)))
    assert set(found) <= {"warmup", "cooldown", "schedule_steady"}
    assert sum(found.values()) == (makespan - 48) * 1000


def test_a_hidden_bubble_is_reported_with_its_four_ratios() -> None:
    data = build(make_run(Job(), constant(F, B)), ReportOptions()).data
    bubble = data["bubble"]
    assert bubble["fraction"] == pytest.approx(9 / 33, abs=1e-4)
    assert bubble["over_ideal"] == pytest.approx(0.375, abs=1e-4)
    # The longest own span is stage 0's, the whole makespan (§1).
    assert bubble["own_span_rate"] == pytest.approx(0.2727, abs=1e-4)
    assert bubble["straggler_waste"] == pytest.approx(0, abs=1e-9)
    assert bubble["theory"]["fraction"] == pytest.approx(9 / 33)


def test_the_ladder_says_who_was_waited_for() -> None:
    report = build(make_run(Job(comm=100), constant(F, B)), ReportOptions())
    gaps = report.gaps
    gap = gaps[(gaps["rank"] == 2) & (gaps["step"] == 0) & (gaps["before"] == "B0")].iloc[0]
    assert (gap["producer_rank"], gap["producer_stage"], gap["producer_op"]) == (3, 3, "B0")
    rungs = gap[["upstream_s", "peer_host_s", "late_recv_s", "transfer_s", "own_host_s"]]
    assert rungs.sum() == pytest.approx(gap["end_s"] - gap["start_s"], abs=1e-15)
    assert gap["transfer_s"] == pytest.approx(100e-9, abs=1e-15)
