"""Real training processes, recorded: what is in the recording, and that the training does not notice."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bubblescope.align import prepare
from bubblescope.ingest import recording
from bubblescope.model import Kind, Lane, Run
from bubblescope.report.build import ReportOptions, build
from bubblescope.views.summary import first_screen
from tests.support.sleeping import MULTI, RankResult, SleepRun, run_pipeline, run_pipelines

pytestmark = pytest.mark.real

SCHEDULES = ("GPipe", "1F1B", *MULTI)
SHORT = {"stages": 2, "microbatches": 4, "forward_s": 0.001, "backward_s": 0.002, "steps": 3}


@pytest.fixture(scope="module")
def by_schedule(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, list[RankResult], list[RankResult]]]:
    """schedule → (what was recorded, results with hooks, results without)."""
    folder = tmp_path_factory.mktemp("schedules")
    runs = []
    for schedule in SCHEDULES:
        runs += [SleepRun(schedule, out=folder / schedule, **SHORT), SleepRun(schedule, **SHORT)]
    results = run_pipelines(runs)
    return {
        schedule: (recording.read(folder / schedule), results[2 * i], results[2 * i + 1])
        for i, schedule in enumerate(SCHEDULES)
    }


def operations(run: Run, step: int, *kinds: Kind) -> Counter[tuple[int, int]]:
    rows = run.spans.where(step=step, kind=kinds, lane=Lane.COMPUTE)
    return Counter(zip(run.spans.stage[rows].tolist(), run.spans.microbatch[rows].tolist(), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_operation_of_every_step_is_recorded_once(schedule: str, by_schedule: dict) -> None:  # type: ignore[type-arg]
    run, _, _ = by_schedule[schedule]
    stages = 4 if schedule in MULTI else 2
    all_once = Counter((stage, mb) for stage in range(stages) for mb in range(4))
    assert run.notices == ()
    assert (run.layout.schedule, run.layout.stages, run.layout.microbatches) == (schedule, 2, 4)
    assert run.layout.chunks == (2 if schedule in MULTI else 1)
    for step in range(3):
        assert operations(run, step, Kind.FORWARD) == all_once
        assert operations(run, step, Kind.BACKWARD, Kind.BACKWARD_INPUT) == all_once
        assert operations(run, step, Kind.BACKWARD_INPUT) == operations(run, step, Kind.BACKWARD_WEIGHT)
        assert set(operations(run, step, Kind.LOSS)) == {(stages - 1, mb) for mb in range(4)}
        per_rank = run.spans.where(step=step, kind=Kind.OPTIMIZER)
        assert sorted(run.spans.rank[per_rank]) == [0, 1]
        assert run.spans.where(step=step, kind=Kind.STEP, lane=Lane.RANGE).sum() == 2
    splits = schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    assert bool(operations(run, 1, Kind.BACKWARD_WEIGHT)) == splits


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_message_is_posted_at_both_ends_waited_for_and_matched(schedule: str, by_schedule: dict) -> None:  # type: ignore[type-arg]
    run, _, _ = by_schedule[schedule]
    spans, pairs, waits = run.spans, run.links.p2p, run.links.p2p_wait
    stages = 4 if schedule in MULTI else 2
    ranks = [run.layout.stage_rank[0, stage] for stage in range(stages)]
    hops = sum(a != b for a, b in itertools.pairwise(ranks))
    assert len(pairs) == 3 * 2 * 4 * hops
    for lane in (Lane.POST, Lane.WAIT):
        for kind in (Kind.SEND, Kind.RECV):
            assert spans.where(lane=lane, kind=kind).sum() == len(pairs)
    assert (waits >= 0).all()
    send, recv = pairs.T
    assert (spans.rank[send] == spans.peer[recv]).all() and (spans.rank[recv] == spans.peer[send]).all()
    onward = np.where([run.names[i] == "act" for i in spans.name[send]], 1, -1)
    assert (spans.stage[recv] == spans.stage[send] + onward).all()
    assert (spans.microbatch[send] == spans.microbatch[recv]).all()
    assert (spans.bytes[send] == spans.bytes[recv]).all() and (spans.bytes[send] > 0).all()
    # What a receiver waited for cannot have been there before the sender posted it.
    assert (spans.end_ns[waits[:, 1]] >= spans.start_ns[send]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_training_does_not_notice(schedule: str, by_schedule: dict) -> None:  # type: ignore[type-arg]
    _, with_hooks, without = by_schedule[schedule]
    assert [r.losses for r in with_hooks] == [r.losses for r in without]
    assert any(r.losses for r in with_hooks) and all(loss > 0 for r in with_hooks for loss in r.losses)
    for result in with_hooks:
        assert result.restored and result.log == []
        assert not {"pandas", "plotly", "jinja2", "scipy", "fsspec"} & set(result.modules)


def test_sleeping_stages_take_their_set_times(by_schedule: dict) -> None:  # type: ignore[type-arg]
    """Input and weight gradients sleep separately, so that zero-bubble schedules are timed right."""
    run, _, _ = by_schedule["ZBVZeroBubble"]
    for kind, stage, expected_ms in (
        (Kind.FORWARD, 1, 1.0),
        (Kind.BACKWARD_INPUT, 1, 1.0),
        (Kind.BACKWARD_WEIGHT, 1, 1.0),
        (Kind.BACKWARD_WEIGHT, 0, 2.0),  # torch runs the whole backward of the first stage as W
    ):
        rows = run.spans.where(kind=kind, stage=stage) & (run.spans.step > 0)
        assert expected_ms <= np.median(run.spans.duration_ns[rows]) / 1e6 < expected_ms + 1.0


# ---- loops of other shapes, and faults

ODD = {
    "plain": SleepRun(**SHORT),
    "accumulate": SleepRun(**SHORT, accumulate=3),
    "optimizers": SleepRun(**SHORT, optimizers=2),
    "no-optimizer": SleepRun(**SHORT, no_optimizer=True),
    "evaluate": SleepRun(**SHORT, fault="evaluate"),
    "every": SleepRun(**SHORT | {"steps": 5}, record_options={"every": 2}),
    "max-steps": SleepRun(**SHORT | {"steps": 5}, record_options={"max_steps": 2}),
    "workers": SleepRun(**SHORT, workers=2),
    "replicas": SleepRun(**SHORT, replicas=2),
    "raise-in-hook": SleepRun(**SHORT, fault="raise-in-hook"),
    "read-only": SleepRun(**SHORT),
    "killed": SleepRun(**SHORT | {"stages": 3, "steps": 5}, kill=(1, 3)),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[RankResult]]]:
    folder = tmp_path_factory.mktemp("odd")
    # A folder that cannot be made, for root too: below a file.
    (folder / "file").write_text("")
    places = {name: folder / "file" / "run" if name == "read-only" else folder / name for name in ODD}
    runs = [SleepRun(**vars(run) | {"out": places[name]}) for name, run in ODD.items()]
    return folder, dict(zip(ODD, run_pipelines(runs), strict=True))


def steps_of(run: Run) -> list[int]:
    return sorted(set(run.spans.step.tolist()))


def test_the_header_says_which_stages_run_on_which_device(odd: tuple) -> None:  # type: ignore[type-arg]
    for rank in (0, 1):
        header, layout = [json.loads(line) for line in (odd[0] / "accumulate" / f"rank-{rank:05d}.jsonl").open()][:2]
        assert (header["kind"], layout["kind"]) == ("header", "layout")
        assert header["layout"] == {name: value for name, value in layout.items() if name != "kind"}
        assert header["layout"]["stages"] == [rank] and header["layout"]["device"]["type"] == "cpu"


def test_gradient_accumulation_is_one_step_with_microbatches_numbered_on(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "accumulate")
    assert steps_of(run) == [0, 1, 2] and run.layout.microbatches == 12
    assert operations(run, 1, Kind.FORWARD) == Counter((s, mb) for s in range(2) for mb in range(12))
    assert len(run.links.p2p) == 3 * 3 * 2 * 4


def test_several_optimizers_are_one_step(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "optimizers")
    assert steps_of(run) == [0, 1, 2]
    assert run.spans.where(step=1, kind=Kind.OPTIMIZER, rank=0).sum() == 2


def test_without_an_optimizer_each_schedule_call_is_a_step(odd: tuple) -> None:  # type: ignore[type-arg]
    assert steps_of(recording.read(odd[0] / "no-optimizer")) == [0, 1, 2]


def test_evaluation_is_kept_apart(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "evaluate")
    assert steps_of(run) == [-1, 0, 1, 2]
    evaluation = run.spans.take(run.spans.step == -1)
    assert not evaluation.where(kind=[Kind.BACKWARD, Kind.OPTIMIZER]).any()
    assert evaluation.where(kind=Kind.FORWARD).sum() == 8
    assert [run.names[i] for i in evaluation.name[evaluation.where(kind=Kind.STEP)]] == ["eval", "eval"]


def test_sampling_records_every_second_step(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "every")
    assert steps_of(run) == [0, 2, 4]
    assert operations(run, 2, Kind.FORWARD) == Counter((s, mb) for s in range(2) for mb in range(4))


def test_max_steps_stops_by_itself_and_the_training_goes_on(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "max-steps")  # 2, and the warm-up step
    assert steps_of(run) == [0, 1, 2] and run.notices == ()
    assert len(odd[1]["max-steps"][1].losses) == 5


def test_forked_data_loader_workers_write_nothing(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "workers")
    assert sorted(p.name for p in (odd[0] / "workers").iterdir()) == [
        "job.json",
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    ]
    data = run.spans.where(kind=Kind.DATA, lane=Lane.HOST, device=-1)
    assert run.spans.step[data].tolist() == [0, 1, 2] and set(run.spans.rank[data]) == {0}


def test_data_parallel_pipelines_are_told_apart(odd: tuple) -> None:  # type: ignore[type-arg]
    run = recording.read(odd[0] / "replicas")
    assert run.layout.data_parallel == 2 and run.layout.world_size == 4
    assert run.layout.replica.tolist() == [0, 0, 1, 1] and run.layout.pp.tolist() == [0, 1, 0, 1]
    assert run.layout.stage_rank == {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}


def test_the_wait_for_a_slow_replica_inside_ddps_last_backward_is_a_wait(tmp_path: Path) -> None:
    """Rank 1 is as fast as the first stage, and its replica, rank 3, takes three times as long."""
    job = SleepRun("1F1B", 2, 3, 0.005, 0.010, steps=4, replicas=2, ddp=True, slow=(3, 3.0), out=tmp_path / "x")
    assert {result.exitcode for result in run_pipeline(job)} == {0}
    run = recording.read(tmp_path / "x")
    waits = run.spans.where(kind=Kind.COLLECTIVE, lane=Lane.WAIT) & (run.spans.step > 0)
    for rank, group in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        mine = np.flatnonzero(waits & (run.spans.rank == rank))
        assert len(mine) == 3
        assert {run.names.texts[g].split(":")[1] for g in run.spans.group[mine]} == {group}
    backwards = run.spans.where(kind=Kind.BACKWARD, rank=1) & (run.spans.step > 0)
    assert np.median(run.spans.duration_ns[backwards & (run.spans.microbatch == 2)]) < 20e6
    assert np.median(run.spans.duration_ns[waits & (run.spans.rank == 1)]) > 60e6
    report = build(prepare(run), ReportOptions())
    assert report.slowdowns[3] == pytest.approx(3, rel=0.15)
    assert "because GPU 3 is " in first_screen(report).sentence
    (node,) = (row for row in report.data["advice"] if row["kind"] == "node")
    assert node["detail"]["rank"] == 3 and node["saved_seconds"] > 0.25 * node["now_seconds"]


def test_hooks_that_raise_cost_one_warning_and_a_count_at_the_end(odd: tuple) -> None:  # type: ignore[type-arg]
    results = odd[1]
    assert [r.losses for r in results["raise-in-hook"]] == [r.losses for r in results["plain"]]
    for result in results["raise-in-hook"]:
        assert result.restored
        assert len(result.log) == 2 and "made to raise" in result.log[0]
        assert "13 faults of its own in all" in result.log[1]  # 1 hook, 3 × 4 rows
        assert set(result.log[1].split(": ")[-1].split(", ")) == {"broken", "p2p_wait"}  # as the functions are named
    run = recording.read(odd[0] / "raise-in-hook")
    assert {"recorder-warning", "rows-dropped"} <= {notice.code for notice in run.notices}
    assert not run.spans.where(kind=Kind.FORWARD).any() and not run.spans.where(lane=Lane.WAIT).any()
    assert run.spans.where(kind=Kind.OPTIMIZER).sum() == 6  # the hooks that do not raise go on


def test_a_folder_that_cannot_be_written_costs_one_warning(odd: tuple) -> None:  # type: ignore[type-arg]
    results = odd[1]
    assert [r.losses for r in results["read-only"]] == [r.losses for r in results["plain"]]
    assert [len(result.log) for result in results["read-only"]] == [1, 1]


def test_after_kill_9_of_one_rank_every_finished_step_of_every_rank_is_there(odd: tuple) -> None:  # type: ignore[type-arg]
    folder, results = odd
    assert results["killed"][1].exitcode == -9
    run = recording.read(folder / "killed")
    for rank in range(3):
        rows = run.spans.rank == rank
        assert sorted(set(run.spans.step[rows].tolist())) == [0, 1, 2]
        for step in range(3):
            assert (rows & run.spans.where(step=step, kind=Kind.FORWARD)).sum() == 4
            assert (rows & run.spans.where(step=step, kind=Kind.BACKWARD)).sum() == 4
            assert (rows & run.spans.where(step=step, kind=Kind.OPTIMIZER)).sum() == 1
    early = [n.message for n in run.notices if n.code == "rank-ended-early"]
    assert len(early) == 1 and "rank 1" in early[0] and "killed" in early[0]
