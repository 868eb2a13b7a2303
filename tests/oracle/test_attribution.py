"""The decompositions of ATTRIBUTION.md §10, found in runs that a replay wrote down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bubblescope.cli.main import run as run_command
from bubblescope.model import Action, Kind, Run, Spans
from bubblescope.replay.attribution import PHASES, Attribution, attribute
from bubblescope.replay.causes import CAUSES
from bubblescope.report.build import ReportOptions, build
from bubblescope.views.summary import first_screen
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


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_slow_replica_is_a_slow_worker_and_not_an_uneven_stage(replicas: int) -> None:
    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        base = F if action.kind == Kind.FORWARD else B
        return base * (2 if replica == 1 and action.stage == 2 else 1)

    found = causes_of(make_run(Job(replicas=replicas, sync=1), duration))
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


def test_one_stage_has_no_bubble_and_waits_for_its_slow_replica() -> None:
    """Three of four replicas wait 6000 for the third, and all 20 for their collective: 4500 and 20 per GPU."""
    job = Job(stages=1, replicas=4, microbatches=4, sync=20)
    run = make_run(
        job, lambda step, replica, rank, action: constant(F, B, {0: 1 + (replica == 2) / 2})(step, 0, 0, action)
    )
    assert causes_of(run) == {"slow_worker": 4500, "exposed_collective": 20}
    report = build(run, ReportOptions())
    assert [report.data["bubble"][name] for name in ("fraction", "over_ideal", "own_span_rate")] == [0, 0, 0]
    assert "fraction-unavailable" not in {w["code"] for w in report.data["source"]["warnings"]}
    best = report.data["advice"][0]
    assert (best["kind"], best["detail"]) == ("node", {"rank": 2, "slowdown": 1.5})
    sentence = first_screen(report).sentence
    assert sentence.startswith("25.1 % of 4 GPUs' time is idle: ")
    assert sentence.endswith("because GPU 2 is 1.5× slower than the other replicas of its stage.")


def test_a_slow_gpu_is_named_though_the_last_backward_of_its_replica_holds_the_wait_for_it() -> None:
    """As DDP's: the gradients are reduced inside the last backward, so rank 1 is as busy there as rank 3 is."""

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        base = F if action.kind == Kind.FORWARD else B
        waits = replica == 0 and action == Action(1, Kind.BACKWARD, 3)
        return base * (2 if (replica, rank) == (1, 1) else 7 if waits else 1)

    report = build(make_run(Job(stages=2, microbatches=4, replicas=2, sync=1), duration), ReportOptions())
    busy = {g["rank"]: g["busy"] for g in report.data["gpus"]}
    assert max(busy, key=lambda rank: busy[rank]) != 3
    assert report.slowdowns == {0: 1, 1: 0.5, 2: 1, 3: 2}
    assert "because GPU 3 is 2× slower than the other replicas of its stage" in first_screen(report).sentence


def test_equal_stages_that_split_their_backward_differently_are_not_called_slow() -> None:
    """As torch's first stage under zero-bubble schedules: the whole backward is a W."""

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        weight = B - 10 if action.stage == 0 else 10
        return {Kind.FORWARD: F, Kind.BACKWARD_INPUT: B - weight, Kind.BACKWARD_WEIGHT: weight}[action.kind]

    report = build(make_run(Job("ZBVZeroBubble", 2, 4), duration), ReportOptions())
    assert report.data["causes"]["stage_imbalance"]["share_of_idle"] > 0.25
    sentence = first_screen(report).sentence
    assert "stages that take equally long in all divide it differently into forward, input and weight" in sentence
    assert "slower" not in sentence


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("DualPipeV", "none is known for DualPipeV"),
        ("InterleavedZeroBubble", "none is known for InterleavedZeroBubble"),
        ("ZBVZeroBubble", "that of ZBVZeroBubble holds for m ≥ 2p and F = I = W"),
    ],
)
def test_where_there_is_no_closed_form_a_notice_says_why_and_how_to_replay_the_schedule(name: str, why: str) -> None:
    report = build(make_run(Job(name, 2, 4), constant(F, B, split=0.75)), ReportOptions())
    assert report.data["bubble"]["theory"] is None
    (told,) = (w["message"] for w in report.data["source"]["warnings"] if w["code"] == "theory-unavailable")
    assert f"is unavailable, because {why}; bubblescope simulate --schedule {name} --stages 2" in told
    command = told.split("; bubblescope ")[1].removesuffix(" replays it").split()
    assert run_command(command) == 0


def test_where_there_is_a_closed_form_no_notice_says_otherwise() -> None:
    report = build(make_run(Job("ZBVZeroBubble", 2, 4), constant(F, B)), ReportOptions())
    assert report.data["bubble"]["theory"] is not None
    assert "theory-unavailable" not in {w["code"] for w in report.data["source"]["warnings"]}


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


RUNGS = ["upstream_s", "peer_host_s", "late_recv_s", "transfer_s", "own_host_s"]
Waited = tuple[tuple[int, str], list[float]]


def waited(run: Run, rank: int, before: str, step: int = 0) -> list[Waited]:
    """Who and what the gaps before an operation ("" the end of the step) waited for, and their rungs in ns."""
    report = build(run, ReportOptions())
    gaps = report.gaps[report.gaps["end_s"] > report.gaps["start_s"]]
    rungs = gaps[RUNGS].sum(axis=1, skipna=False)
    assert (rungs.isna() | np.isclose(rungs, gaps["end_s"] - gaps["start_s"], rtol=0, atol=1e-15)).all()
    rows = gaps[(gaps["rank"] == rank) & (gaps["step"] == step) & (gaps["before"] == before)].to_dict("records")
    return [((g["producer_rank"], g["producer_op"]), [round(g[name] * 1e9, 3) for name in RUNGS]) for g in rows]


def test_the_ladder_says_who_was_waited_for() -> None:
    # The last stage has B0 done at 6300; stage 2 has done with F1 at 4200.
    assert waited(make_run(Job(comm=100), constant(F, B)), 2, "B0") == [((3, "B0"), [2100, 0, 0, 100, 0])]


@pytest.mark.parametrize("rank", range(4))
def test_at_the_end_of_a_step_those_are_waited_for_that_still_work(rank: int) -> None:
    """Stage s ends its last backward s B before stage 0 does; its host has nothing to do with that."""
    run = make_run(Job(optimizer=500), constant(F, B))
    assert waited(run, rank, "") == ([((0, "optimizer"), [rank * B, 0, 0, 0, 0])] if rank else [])


def test_in_a_collective_the_member_that_comes_last_is_waited_for() -> None:
    run = make_run(Job(sync=50, optimizer=500), constant(F, B))
    assert waited(run, 3, "optimizer") == [((0, "B7"), [3 * B, 0, 0, 50, 0])]
    assert waited(run, 0, "optimizer") == [((-1, ""), [0, 0, 0, 50, 0])]


def test_optimizers_that_all_begin_as_the_last_gpu_is_ready_wait_for_it_and_not_for_their_hosts() -> None:
    """A norm of all gradients that was not recorded: what GPUs wait before their optimizer is the schedule's."""
    ms = 1_000_000
    run = make_run(Job(sync=0, optimizer=ms), constant(ms, 2 * ms))
    kept = run.spans.kind != Kind.COLLECTIVE
    row = np.cumsum(kept) - 1
    links = replace(
        run.links, p2p=row[run.links.p2p], p2p_wait=np.where(run.links.p2p_wait < 0, -1, row[run.links.p2p_wait])
    )
    run = replace(run, spans=run.spans.take(kept), links=links)
    assert waited(run, 3, "optimizer") == [((0, "B7"), [6 * ms, 0, 0, 0, 0])]
    gaps = build(run, ReportOptions()).gaps
    before = gaps[gaps["before"] == "optimizer"]
    assert before["cooldown"].sum() == pytest.approx(2 * (6 + 4 + 2) * 1e-3)
    assert not gaps["host_launch"].any()


def test_optimizers_of_some_gpus_that_begin_together_are_no_barrier() -> None:
    ms = 1_000_000
    run = make_run(Job(optimizer=ms), constant(ms, 2 * ms))
    late = (run.spans.kind == Kind.OPTIMIZER) & (run.spans.rank == 3)
    run = replace(
        run, spans=run.spans.with_columns(**{n: getattr(run.spans, n) + 4 * ms * late for n in ("start_ns", "end_ns")})
    )
    assert waited(run, 3, "optimizer") == [((-1, ""), [0, 0, 0, 0, 4 * ms])]


def test_a_host_that_is_late_in_a_collective_is_another_host_to_all_but_its_own_gpu() -> None:
    run = make_run(Job(sync=750, optimizer=500), constant(F, B))
    late = (run.spans.kind == Kind.COLLECTIVE) & (run.spans.rank == 0)
    run = replace(run, spans=run.spans.with_columns(start_ns=run.spans.start_ns + 700 * late))
    assert waited(run, 3, "optimizer") == [((0, "B7"), [3 * B, 700, 0, 50, 0])]
    assert waited(run, 0, "optimizer") == [((-1, ""), [0, 0, 0, 50, 700])]


def test_through_several_collectives_the_operation_is_found_that_all_wait_for() -> None:
    """Each pipeline first ends with a collective of its own, then all GPUs join one: the slow replica is waited for."""
    job = Job(replicas=2, steps=1, sync=100, optimizer=500)
    run = make_run(job, lambda step, replica, rank, action: constant(F + replica, B)(step, replica, rank, action))
    spans, of_replica = run.spans, run.spans.rank // job.stages
    norm = spans.kind == Kind.COLLECTIVE
    done = np.array([spans.start_ns[norm & (of_replica == r)].max() + 30 for r in range(2)])[of_replica]
    own = spans.with_columns(end_ns=done, group=100 + of_replica).take(norm)
    spans = spans.with_columns(start_ns=np.where(norm, done, spans.start_ns))
    gaps = waited(replace(run, spans=Spans.concat([spans, own])), 3, "optimizer")
    assert gaps == [((4, "B7"), [3 * B + 11, 0, 0, 100, 0])]


def test_both_parts_of_a_split_gap_wait_for_the_same_message() -> None:
    run = make_run(Job("GPipe", optimizer=500), constant(F, B))
    assert waited(run, 0, "B0") == [((1, "B0"), [3 * F, 0, 0, 0, 0]), ((1, "B0"), [3 * B, 0, 0, 0, 0])]


def test_a_next_step_that_begins_early_ends_a_gap_by_itself_or_by_what_is_not_seen() -> None:
    """The last stage's optimizer ends 2000 after the others began the next step: stage 0 because its host was ready,
    stage 1 because stage 0 had sent it an input of the next step, which this step does not show."""
    run = make_run(Job(host=500, optimizer=500), constant(F, B))
    slow = (run.spans.kind == Kind.OPTIMIZER) & (run.spans.rank == 3) & (run.spans.step == 0)
    run = replace(run, spans=run.spans.with_columns(end_ns=run.spans.end_ns + (3 * B + 2000) * slow))
    assert waited(run, 0, "") == [((-1, ""), [0, 0, 0, 0, 500])]
    [(_, rungs)] = waited(run, 1, "")
    assert np.isnan(rungs).all()
    assert waited(run, 2, "") == [((3, "optimizer"), [B + 2000 + B, 0, 0, 0, 0])]
