"""Following files that grow: new lines only, whatever is done to the files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bubblescope.live.follow import LEAST_CHUNK, Follower, newest_job
from tests.live import jobs
from tests.live.jobs import Recorded
from tests.support import recordings


@pytest.fixture(scope="module")
def job() -> Recorded:
    return jobs.steady()


def _steps(follower: Follower, path: Path) -> list[int]:
    return [step for step, _ in follower.files[path].steps]


def test_only_new_lines_are_read(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(3), [0])
    follower, path = Follower(tmp_path), job.file(tmp_path, 0)
    assert follower.poll()
    assert _steps(follower, path) == [0, 1, 2]
    before = follower.files[path].offset
    assert not follower.poll()
    job.write(tmp_path, [3], [0])
    assert follower.poll()
    assert _steps(follower, path) == [0, 1, 2, 3]
    assert follower.files[path].offset - before == len(job.steps[0][3])


def test_an_unfinished_line_is_taken_when_it_is_whole(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, [0], [0])
    path, line = job.file(tmp_path, 0), job.steps[0][1]
    follower = Follower(tmp_path)
    follower.poll()
    for part, known in ((line[:100], [0]), (line[100:-1], [0]), (line[-1:], [0, 1])):
        with path.open("ab") as file:
            file.write(part)
        follower.poll()
        assert _steps(follower, path) == known
    assert follower.files[path].bad_lines == 0


def test_a_line_that_was_torn_by_a_full_disk_is_counted_and_the_next_is_taken(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, [0], [0])
    path = job.file(tmp_path, 0)
    with path.open("ab") as file:
        file.write(job.steps[0][1][:200] + b"\n" + job.steps[0][2])
    follower = Follower(tmp_path)
    follower.poll()
    assert _steps(follower, path) == [0, 2]
    assert [notice.code for notice in follower.notices] == ["line-skipped"]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(4), [0])
    path = job.file(tmp_path, 0)
    follower = Follower(tmp_path)
    follower.poll()
    os.truncate(path, len(job.head[0]) + len(job.steps[0][0]))
    follower.poll()
    assert _steps(follower, path) == [0]
    assert [notice.code for notice in follower.notices] == ["file-replaced"]


def test_a_file_that_another_run_replaced_is_read_anew_though_it_is_longer(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(2), [0])
    path = job.file(tmp_path, 0)
    follower = Follower(tmp_path)
    follower.poll()
    path.unlink()
    other = jobs.steady(job="job-2", clock=[5, 2_000_000_000_000])
    other.write(tmp_path, range(6), [0])
    follower.poll()
    assert _steps(follower, path) == [0, 1, 2, 3, 4, 5]


def test_a_copy_kept_in_step_by_rsync_goes_on_where_it_was(tmp_path: Path, job: Recorded) -> None:
    """rsync writes a new file and renames it: another inode, the same beginning."""
    job.write(tmp_path / "here", range(2), [0])
    path = job.file(tmp_path / "here", 0)
    follower = Follower(tmp_path / "here")
    follower.poll()
    follower.files[path].forget(1)
    job.write(tmp_path / "there", range(4), [0])
    shutil.copy(job.file(tmp_path / "there", 0), tmp_path / "here" / "incoming")
    (tmp_path / "here" / "incoming").replace(path)
    follower.poll()
    assert _steps(follower, path) == [1, 2, 3]
    assert follower.notices == []


def test_ranks_that_appear_late_and_files_that_go_away_are_noticed(tmp_path: Path, job: Recorded) -> None:
    follower = Follower(tmp_path)
    assert not follower.poll()
    job.write(tmp_path, range(2), [0])
    follower.poll()
    job.write(tmp_path, range(2), [1])
    follower.poll()
    assert len(follower.files) == 2
    job.file(tmp_path, 0).unlink()
    assert follower.poll()
    assert list(follower.files) == [job.file(tmp_path, 1)]


def test_a_folder_that_holds_the_recording_will_do(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path / "recording", range(2), [0])
    follower = Follower(tmp_path)
    follower.poll()
    assert _steps(follower, job.file(tmp_path / "recording", 0)) == [0, 1]


def test_a_pipe_is_not_waited_for(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(2), [0])
    os.mkfifo(job.file(tmp_path, 1))
    follower = Follower(tmp_path)
    follower.poll()
    assert list(follower.files) == [job.file(tmp_path, 0)]


def test_what_is_held_stays_within_bounds_however_long_the_file(tmp_path: Path, job: Recorded) -> None:
    lines = b"".join(job.steps[0][1].replace(b'"step":1,', b'"step":%d,' % step) for step in range(1, 400))
    path = job.file(tmp_path, 0)
    path.write_bytes(job.head[0] + lines)
    follower, seen = Follower(tmp_path, most_held=LEAST_CHUNK), []
    while True:
        follower.poll()
        file = follower.files[path]
        assert file.held <= 2 * LEAST_CHUNK
        new = [step for step, _ in file.steps]
        if not new:
            break
        seen += new
        file.forget(new[-1] + 1)
    assert seen == list(range(1, 400))
    assert path.stat().st_size > 3 * LEAST_CHUNK


def test_a_line_longer_than_a_chunk_is_read(tmp_path: Path, job: Recorded) -> None:
    line = job.steps[0][1].replace(b'"texts":["",', b'"texts":["' + b"x" * (3 * LEAST_CHUNK) + b'",')
    path = job.file(tmp_path, 0)
    path.write_bytes(job.head[0] + line + job.steps[0][2])
    follower = Follower(tmp_path, most_held=LEAST_CHUNK)
    for _ in range(6):
        follower.poll()
    assert _steps(follower, path)[0] == 1


def test_of_a_long_history_the_end_is_read_and_the_rest_is_named(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(12), [0])
    path = job.file(tmp_path, 0)
    follower = Follower(tmp_path, most_history=3 * len(job.steps[0][1]))
    follower.poll()
    file = follower.files[path]
    assert file.header is not None and file.layout is not None
    assert _steps(follower, path)[-1] == 11 and 2 <= len(file.steps) <= 3
    assert file.skipped_bytes > 0
    assert [notice.code for notice in follower.notices] == ["history-skipped"]
    assert f"step {file.first_step}" in follower.notices[0].message


def test_of_several_jobs_the_newest_is_chosen(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(2), [0, 1])
    newer = jobs.steady(job="job-2", clock=[0, 2_000_000_000_000])
    newer.write(tmp_path, range(1), [1], suffix=".77")
    follower = Follower(tmp_path)
    follower.poll()
    chosen, left = newest_job(follower.files.values())
    assert [file.path.name for file in chosen.values()] == ["rank-00001.77.jsonl"]
    assert len(left) == 2


def test_a_restart_under_the_same_name_leaves_the_files_of_before_out(tmp_path: Path, job: Recorded) -> None:
    """The second run began at 3000 s; rank 1 has not come back yet, and its old file has not changed since."""
    job.write(tmp_path, range(2), [0, 1])
    for rank in (0, 1):
        os.utime(job.file(tmp_path, rank), (2000, 2000))
    again = jobs.steady(clock=[0, 3_000_000_000_000])
    again.write(tmp_path, range(1), [0], suffix=".77")
    follower = Follower(tmp_path)
    follower.poll()
    chosen, _ = newest_job(follower.files.values())
    assert [file.path.name for file in chosen.values()] == ["rank-00000.77.jsonl"]


@pytest.mark.parametrize(
    "rubbish", [b"\x00\xff\n", b"[" * 5000 + b"\n", b'{"kind":"step"}\n', b'{"kind":"x"}\n', b"1\n"]
)
def test_rubbish_is_counted_and_harms_nothing(tmp_path: Path, job: Recorded, rubbish: bytes) -> None:
    path = job.file(tmp_path, 0)
    path.write_bytes(rubbish + job.head[0] + rubbish + job.steps[0][0] + rubbish + job.steps[0][1])
    follower = Follower(tmp_path)
    follower.poll()
    assert _steps(follower, path) == [0, 1]
    assert follower.files[path].bad_lines == 3


def test_evaluations_and_unfinished_steps_are_no_training_steps(tmp_path: Path) -> None:
    rows = [{"end_ns": 5}]
    path = recordings.write(
        tmp_path, 0, recordings.header(), recordings.layout(), recordings.step(0, rows),
        recordings.step(1, rows, eval=True), recordings.step(1, rows), recordings.step(2, rows, partial=True),
    )  # fmt: skip
    follower = Follower(tmp_path)
    follower.poll()
    assert _steps(follower, path) == [0, 1]
    assert follower.files[path].bad_lines == 0


def test_each_step_comes_with_the_layout_that_holds_for_it(tmp_path: Path) -> None:
    rows = [{"end_ns": 5}]
    head, of_two, of_four, evaluated = recordings.header(), *(recordings.layout(microbatches=m) for m in (2, 4, 1))
    steps = [recordings.step(number, rows) for number in range(5)]
    path = recordings.write(
        tmp_path, 0, head, of_two, *steps[:3], evaluated, recordings.step(-1, rows, eval=True), of_four, *steps[3:]
    )
    follower = Follower(tmp_path)
    follower.poll()
    file = follower.files[path]
    assert file.text(1, 3) == recordings.text(head, of_two, *steps[1:3], of_four, steps[3])
    file.forget(3)
    assert file.text(0, 4) == recordings.text(head, of_four, *steps[3:])
