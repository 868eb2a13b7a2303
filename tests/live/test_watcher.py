"""What the watcher concludes while a recording grows: the same as an analysis of the whole of it."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bubblescope import analyze, load
from bubblescope.live import follow, totals, watcher
from bubblescope.live.watcher import Watcher, WatchOptions
from tests.live import jobs
from tests.live.jobs import MS, Recorded
from tests.support import synthetic
from tests.support.synthetic import Job

OUTSIDE = ("exposed_collective", "optimizer", "host_launch", "data_loading")


@dataclass
class Watch:
    """A watcher with a clock that a test moves."""

    folder: Path
    options: WatchOptions = field(default_factory=lambda: WatchOptions(steps=5, patience_s=10.0))
    time: float = 0.0

    def __post_init__(self) -> None:
        self.time = 5000.0
        self.watcher = Watcher(self.folder, self.options, now=lambda: self.time)

    def look(self) -> Any:
        """Refresh until there is no more to do."""
        while self.watcher.refresh():
            pass
        return self.watcher.snapshot

    def states(self) -> list[str]:
        return [rank.state for rank in self.look().ranks]


@pytest.fixture(scope="module")
def job() -> Recorded:
    return jobs.steady()


def _counted(snapshot: Any) -> dict[int, float]:
    return {rank: float(gpu.idle.sum()) for rank, gpu in snapshot.totals.gpus.items()}


def _analysed(folder: Path) -> dict[int, float]:
    report = analyze(load(folder))
    return {gpu["rank"]: gpu["idle"] * gpu["steps"] for gpu in report.data["gpus"]}


def test_the_sums_are_those_of_an_analysis_of_the_whole_recording(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    for step in range(12):
        job.write(tmp_path, [step])
        watch.look()
    job.end(tmp_path)
    found = watch.look()
    assert found.state == "ended"
    assert found.totals.steps == 11  # step 0 warms up
    assert _counted(found) == pytest.approx(_analysed(tmp_path), abs=1e-6)
    report = analyze(load(tmp_path)).data
    lost = sum(g["steps"] * (g["idle"] - sum(g["causes"][c] for c in OUTSIDE)) for g in report["gpus"])
    assert found.totals.lost_s == pytest.approx(lost, abs=1e-6)


def test_history_gives_the_same_sums_as_having_watched(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(12))
    job.end(tmp_path)
    found = Watch(tmp_path).look()
    assert _counted(found) == pytest.approx(_analysed(tmp_path), abs=1e-6)
    assert found.report.data["steps"]["analysed"] == 5
    assert found.report.data["steps"]["skipped"] == []
    assert not found.report.attribution.windows.first.any(), "a step's window begins where the one before ends"


def test_batches_of_history_meet_without_gap_or_overlap(
    tmp_path: Path, job: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "BATCH", 3)
    job.write(tmp_path, range(12))
    job.end(tmp_path)
    found = Watch(tmp_path, WatchOptions(steps=2)).look()
    assert found.totals.steps == 11
    assert _counted(found) == pytest.approx(_analysed(tmp_path), abs=1e-6)


def test_sums_only_grow_while_steps_of_changing_length_arrive(tmp_path: Path) -> None:
    def length(step: int, replica: int, rank: int, action: Any) -> int:
        return (10 + (step * 5 + action.stage * 3 + action.microbatch) % 4) * (2 if action.stage == 2 else 1) * MS

    job, watch, before = jobs.record(Job(steps=9, comm=MS, origin=10 * MS), length), Watch(tmp_path), None
    negative = 0.0
    for step in range(9):
        job.write(tmp_path, [step])
        found = watch.look()
        now = np.array([gpu.idle for _, gpu in sorted(found.totals.gpus.items())])
        if before is not None and len(before):
            assert (now >= before).all()
        before = now
        if found.report is not None:
            negative = min([negative, *(v for gpu in found.report.data["gpus"] for v in gpu["causes"].values())])
    assert negative < -1e-3  # there were signed causes to be netted


@given(hnp.arrays(np.float64, (4, 13), elements=st.floats(-1e3, 1e3)))
@settings(max_examples=200, deadline=None)
def test_netted_causes_are_never_negative_and_sum_to_idle(causes: Any) -> None:
    causes[:, 0] += np.maximum(0.0, -causes.sum(axis=1))  # idle time itself is never negative
    made = totals.net(causes)
    assert (made >= 0).all()
    assert made.sum(axis=1) == pytest.approx(causes.sum(axis=1), abs=1e-6)


def test_nothing_is_shown_before_a_step_that_counts(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    assert watch.look().state == "waiting"
    job.write(tmp_path, [])
    assert watch.look().state == "waiting"
    job.write(tmp_path, [0])
    assert watch.look().state == "waiting", "a warm-up step says nothing of the training"
    assert len(watch.look().ranks) == 4
    job.write(tmp_path, [1])
    assert watch.look().state == "training"


def test_a_rank_that_comes_late_is_waited_for_then_counted_from_where_it_is(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(3), [0, 1, 2])
    found = watch.look()
    assert found.state == "waiting" and [r.state for r in found.ranks][3] == "not seen"
    watch.time += 11
    found = watch.look()
    assert found.report.data["source"]["missing_ranks"] == [3]
    assert found.report.data["bubble"]["fraction"] is None
    job.write(tmp_path, range(8), [3])
    job.write(tmp_path, range(3, 8), [0, 1, 2])
    found = watch.look()
    assert found.report.data["bubble"]["fraction"] == pytest.approx(0.456, abs=0.03)
    assert 3 in found.totals.gpus


def test_a_rank_that_falls_silent_is_named_and_the_others_go_on(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(4))
    watch.look()
    watch.time += 8
    job.write(tmp_path, range(4, 6), [0, 1, 3])
    assert watch.states() == ["training"] * 4
    watch.time += 8
    job.write(tmp_path, [6], [0, 1, 3])
    found = watch.look()
    assert [r.state for r in found.ranks] == ["training", "training", "silent", "training"]
    assert [r.rank for r in found.silent] == [2]
    assert found.state == "training"
    assert found.totals.gpus[0].steps == 5 and found.totals.gpus[2].steps == 3
    job.write(tmp_path, range(4, 9), [2])
    job.write(tmp_path, range(7, 9), [0, 1, 3])
    assert watch.states() == ["training"] * 4


def test_a_job_of_which_nothing_is_heard_is_silent_not_ended(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(6))
    watch.look()
    watch.time += 60
    assert watch.look().state == "silent"
    job.end(tmp_path, error="RuntimeError: boom")
    found = watch.look()
    assert found.state == "ended"
    assert {rank.error for rank in found.ranks} == {"RuntimeError: boom"}


def test_a_stall_of_a_job_loses_no_step(tmp_path: Path) -> None:
    """Stopped between the last operations of a step: some ranks have written it, the others do when it goes on."""
    slow = synthetic.constant(5 * MS, 10 * MS)

    def length(step: int, replica: int, rank: int, action: Any) -> int:
        return slow(step, replica, rank, action) + 5_000 * MS * (step == 6 and rank == 0 and action.microbatch == 3)

    job, watch = jobs.record(Job(steps=12, comm=MS // 5, origin=10 * MS), length), Watch(tmp_path)
    for step in range(6):
        job.write(tmp_path, [step])
        watch.look()
    job.write(tmp_path, [6], [1, 2, 3])
    for _ in range(4):
        watch.time += 5
        watch.look()
    assert watch.look().state == "silent"
    job.write(tmp_path, [6], [0])
    for step in range(7, 12):
        job.write(tmp_path, [step])
        watch.look()
    job.end(tmp_path)
    found, whole = watch.look(), Watch(tmp_path).look()
    assert found.errors == 0
    assert found.totals.steps == 11
    assert _counted(found) == pytest.approx(_analysed(tmp_path), abs=1e-6)
    assert found.totals.lost_s == pytest.approx(whole.totals.lost_s, rel=1e-6)
    assert found.totals.buckets == whole.totals.buckets and found.totals.step_seconds > 5.0


def test_a_last_step_that_a_rank_lacks_has_its_own_length(tmp_path: Path, job: Recorded) -> None:
    """It is not replayed, so it is none of the steps that figures are means over."""
    job.write(tmp_path, range(6))
    job.write(tmp_path, [6], [0, 1, 3])
    job.end(tmp_path)
    found = Watch(tmp_path, WatchOptions(steps=20)).look()
    assert found.errors == 0 and found.totals.steps == 6
    windows = found.report.attribution.windows
    length = windows.end_ns - windows.start_ns
    assert found.totals.step_seconds == pytest.approx(
        sum(length[windows.step == step].mean() for step in range(1, 7)) / 1e9
    )


def test_of_a_killed_job_the_last_step_counts_for_who_looks_once(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(6))
    watch.look()
    watch.time += 60
    assert watch.look().totals.steps == 4
    watch.watcher.read_all()
    assert watch.watcher.snapshot.totals.steps == 5


@pytest.mark.parametrize("suffix", [".99", ""])
def test_when_a_job_starts_anew_all_watchers_show_its_newest_run(tmp_path: Path, job: Recorded, suffix: str) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(8))
    assert watch.look().totals.steps == 6
    again = jobs.steady(job="job-1 RESTART_COUNT=1", clock=[0, 2_000_000_000_000], slow=3.0)
    for path in [] if suffix else tmp_path.iterdir():
        path.unlink()  # the second run writes over the first
    again.write(tmp_path, [0], suffix=suffix)
    assert watch.look().state == "waiting"
    again.write(tmp_path, range(1, 5), suffix=suffix)
    found, new = watch.look(), Watch(tmp_path).look()
    assert [n.code for n in found.notices if n.code != "file-replaced"][-1] == "job-restarted"
    assert found.totals.steps == new.totals.steps == 3
    assert _counted(found) == _counted(new)
    assert found.report.data["gpus"] == new.report.data["gpus"]


def test_a_file_that_is_gone_for_a_moment_is_no_new_run(tmp_path: Path, job: Recorded) -> None:
    watch, folder = Watch(tmp_path / "run"), tmp_path / "run"
    job.write(folder, range(6))
    before = watch.look().totals
    folder.rename(tmp_path / "away")
    assert watch.look().totals.steps == before.steps
    (tmp_path / "away").rename(folder)
    job.write(folder, range(6, 12))
    job.end(folder)
    found = watch.look()
    assert "job-restarted" not in [n.code for n in found.notices]
    assert found.totals.steps == 11
    assert _counted(found) == pytest.approx(_analysed(folder), abs=1e-6)


@pytest.mark.parametrize("after_end", [False, True])
def test_an_unfinished_last_line_is_not_history_to_catch_up_with(
    tmp_path: Path, job: Recorded, after_end: bool
) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(6))
    if after_end:
        job.end(tmp_path)
    line = job.steps[1][6]
    with job.file(tmp_path, 1).open("ab") as file:
        file.write(line[:-20])
    assert not all(watch.watcher.refresh() for _ in range(20)), "it turns in circles"
    found = watch.watcher.snapshot
    assert found.behind == 0
    assert found.totals.steps == (5 if after_end else 4)
    assert found.state == ("ended" if after_end else "training")
    watch.time += 60
    assert [n.message for n in watch.look().notices] == [
        f"rank 1: the file ends in {len(line) - 20} bytes of an unfinished line; it is not counted"
    ]


def test_files_that_were_cut_are_not_counted_twice(tmp_path: Path, job: Recorded) -> None:
    watch = Watch(tmp_path)
    job.write(tmp_path, range(8))
    before = watch.look().totals
    for rank in job.ranks:
        os.truncate(job.file(tmp_path, rank), len(job.head[rank]) + sum(len(job.steps[rank][s]) for s in range(3)))
    assert _steps_and_idle(watch.look().totals) == _steps_and_idle(before)
    job.write(tmp_path, range(3, 12))
    found = watch.look()
    assert found.totals.steps == 10  # 1 to 10; 11 waits for what follows it
    assert found.totals.gpus[0].steps == 10


def _steps_and_idle(t: totals.Totals) -> tuple[int, float]:
    return t.steps, sum(float(gpu.idle.sum()) for gpu in t.gpus.values())


def test_a_pass_that_fails_is_counted_and_the_watch_goes_on(
    tmp_path: Path, job: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, real = Watch(tmp_path), watcher.build
    job.write(tmp_path, range(4))
    watch.look()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(watcher, "build", broken)
    job.write(tmp_path, range(4, 6))
    found = watch.look()
    assert found.errors == 1 and found.report is not None
    assert "pass-failed" in [n.code for n in found.notices]
    assert "made to fail" in caplog.text
    monkeypatch.setattr(watcher, "build", real)
    job.write(tmp_path, range(6, 10))
    assert watch.look().totals.steps > 4


def test_sampled_recordings_say_that_they_are(tmp_path: Path, job: Recorded) -> None:
    sampled = jobs.steady(options={"every": 4})
    sampled.write(tmp_path, [0, 4, 8])
    found = Watch(tmp_path).look()
    assert "steps-sampled" in [n.code for n in found.notices]
    assert found.totals.steps == 1


def test_hundreds_of_ranks_are_watched_within_bounds(tmp_path: Path) -> None:
    """64 pipelines of four stages: 256 files; what is held follows from steps and ranks, not from the run's length."""
    job = jobs.steady(steps=4, replicas=64)
    watch = Watch(tmp_path, WatchOptions(steps=2, price_per_gpu_hour=2.0))
    job.write(tmp_path, range(3))
    found = watch.look()
    assert len(found.ranks) == 256 and found.state == "training"
    assert len(found.totals.gpus) == 256
    assert found.report.data["bubble"]["fraction"] == pytest.approx(0.456, abs=0.02)
    held = sum(file.held for file in watch.watcher.follower.files.values())
    tracemalloc.start()
    job.write(tmp_path, [3])
    watch.look()
    assert tracemalloc.get_traced_memory()[0] < 150e6
    tracemalloc.stop()
    assert sum(file.held for file in watch.watcher.follower.files.values()) <= held * 1.01
    assert found.pass_seconds < 60


def test_steps_larger_than_the_memory_they_may_take_are_watched_all_the_same(
    tmp_path: Path, job: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LEAST_CHUNK", 700)
    watch = Watch(tmp_path)
    watch.watcher.follower = follow.Follower(tmp_path, now=lambda: watch.time, most_held=1)
    job.write(tmp_path, range(12))
    job.end(tmp_path)
    found = watch.look()
    assert found.state == "ended" and found.totals.steps == 11
    assert _counted(found) == pytest.approx(_analysed(tmp_path), abs=1e-6)
    assert max(len(file.steps) for file in watch.watcher.follower.files.values()) <= 3


def test_the_first_step_shown_begins_where_the_one_before_ended_though_few_are_held(
    tmp_path: Path, job: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LEAST_CHUNK", 6 * len(job.steps[0][1]))
    watch = Watch(tmp_path, WatchOptions(steps=20))
    watch.watcher.follower = follow.Follower(tmp_path, now=lambda: watch.time, most_held=1)
    for step in range(12):
        job.write(tmp_path, [step])
        found = watch.look()
    assert 2 <= found.report.data["steps"]["analysed"] < 11
    assert not found.report.attribution.windows.first.any()


def test_the_shape_of_the_job_changes_what_is_counted_not_whether(tmp_path: Path) -> None:
    """One stage has no bubbles: all idle time is counted as lost."""
    job = jobs.record(Job(stages=1, microbatches=2, steps=5, origin=10 * MS, host=3 * MS), synthetic.constant(MS, MS))
    job.write(tmp_path, range(5))
    found = Watch(tmp_path).look()
    assert found.report.data["bubble"]["fraction"] == 0
    assert 0 < found.totals.lost_s == pytest.approx(found.totals.gpus[0].idle.sum())
