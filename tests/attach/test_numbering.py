"""Ranks that were attached at different steps get the same numbers for the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.attach.numbering import make_common, shifts
from bubblescope.errors import InputError


@given(
    stages=st.integers(2, 8),
    microbatches=st.integers(1, 12),
    forward=st.integers(1, 50),
    backward=st.integers(1, 50),
    late=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    steps=st.integers(4, 12),
)
def test_a_1f1b_pipeline_is_numbered_alike_whatever_its_shape(
    stages: int, microbatches: int, forward: int, backward: int, late: list[int], steps: int
) -> None:
    # Closed form: stage s forwards first at s·F and its last backward ends at T - s·B.
    period = 1000 * (microbatches + stages - 1) * (forward + backward)
    middles: dict[int, dict[int, int]] = {}
    for stage in range(stages):
        middle = (1000 * stage * forward + period - 1000 * stage * backward) // 2
        middles[stage] = {i: (i + late[stage]) * period + middle for i in range(steps)}
    found = shifts(middles)
    assert {stage: found[stage] - found[0] for stage in found} == {s: late[s] - late[0] for s in range(stages)}


def step(number: int, start: int, length: int = 80, **flags: Any) -> dict[str, Any]:
    columns = {"kind": ["F", "B"], "start_ns": [start, start + 40], "end_ns": [start + 40, start + length]}
    return {"kind": "step", "step": number, "columns": columns, **flags}


END = {"kind": "end", "steps": 0}


def write(folder: Path, rank: int, lines: list[dict[str, Any]], offset: int = 0, end: bool = True) -> Path:
    header = {"kind": "header", "schema_version": 1, "rank": rank, "clock": [0, offset], "host": "h", "pid": 70 + rank}
    path = folder / f"rank-{rank:05d}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines, *([END] if end else [])]))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def starts(path: Path) -> dict[int, int]:
    return {x["step"]: x["columns"]["start_ns"][0] for x in read(path) if x["kind"] == "step"}


def test_first_and_partial_steps_go_and_the_common_ones_are_counted_from_0(tmp_path: Path) -> None:
    zero = write(tmp_path, 0, [step(i, 100 * i) for i in range(6)] + [step(6, 600, partial=True)])
    one = write(tmp_path, 1, [step(i, 100 * (i + 2) + 5) for i in range(4)])
    made = make_common(tmp_path)
    assert (made.ranks, made.silent, made.steps) == ((0, 1), (), 3)
    assert starts(zero) == {0: 300, 1: 400, 2: 500}
    assert starts(one) == {0: 305, 1: 405, 2: 505}
    assert read(zero)[0]["common"] == {"first_recorded": 3, "steps": 3}


def test_no_more_steps_than_asked_for_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [step(i, 100 * i) for i in range(9)])
    assert make_common(tmp_path, keep=5).steps == 5
    assert list(starts(path)) == [0, 1, 2, 3, 4]


def test_doing_it_again_changes_nothing(tmp_path: Path) -> None:
    paths = [write(tmp_path, r, [step(i, 100 * (i + r)) for i in range(6)]) for r in range(2)]
    first = make_common(tmp_path), [p.read_bytes() for p in paths]
    second = make_common(tmp_path), [p.read_bytes() for p in paths]
    assert first[0].steps == second[0].steps
    assert [starts(p) for p in paths] == [starts(paths[0]), starts(paths[1])]
    assert [len(b) for b in first[1]] == [len(b) for b in second[1]]


def test_ranks_of_a_second_host_join_the_numbers_of_the_first(tmp_path: Path) -> None:
    first = write(tmp_path, 0, [step(i, 100 * i) for i in range(8)])
    make_common(tmp_path)
    second = write(tmp_path, 1, [step(i, 100 * (i + 2) + 3 - 7_000) for i in range(6)], offset=7_000)
    make_common(tmp_path)
    assert list(starts(first)) == list(starts(second))
    assert [t + 7_000 - 3 for t in starts(second).values()] == list(starts(first).values())


def test_what_another_host_still_writes_is_left_alone_until_it_is_done(tmp_path: Path) -> None:
    """Renamed over, the file would lose what its rank writes from then on."""
    here = write(tmp_path, 0, [step(i, 100 * i) for i in range(8)], end=False)
    there = write(tmp_path, 1, [step(i, 100 * (i + 2) + 3) for i in range(4)], end=False)
    before = there.read_bytes()
    with there.open("a") as writer:
        made = make_common(tmp_path, mine=[("h", 70)])
        assert (made.ranks, made.recording, there.read_bytes()) == ((0,), (1,), before)
        writer.write(json.dumps(step(4, 603)) + "\n" + json.dumps(END) + "\n")
    made = make_common(tmp_path, mine=[("other", 70)])
    assert (made.ranks, made.recording) == ((1,), (0,)), "the pid of another host says nothing"
    assert make_common(tmp_path, mine=[("h", 70)]).ranks == (0, 1)
    assert [t - 3 for t in starts(there).values()] == list(starts(here).values()) == [300, 400, 500, 600]


def test_a_rank_without_whole_steps_is_named_and_costs_the_others_nothing(tmp_path: Path) -> None:
    write(tmp_path, 0, [step(i, 100 * i) for i in range(4)])
    write(tmp_path, 1, [step(0, 0, partial=True)])
    assert make_common(tmp_path).silent == (1,)


def test_windows_that_do_not_overlap_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 0, [step(0, 0), step(1, 100)])
    write(tmp_path, 1, [step(0, 0, partial=True)])
    write(tmp_path, 2, [])
    assert make_common(tmp_path).steps == 1
    for path in tmp_path.glob("rank-*"):
        path.unlink()
    write(tmp_path, 0, [step(0, 0)])
    with pytest.raises(InputError, match="no whole step"):
        make_common(tmp_path)


def test_a_cut_tail_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [step(i, 100 * i) for i in range(4)], end=False)
    path.write_text(path.read_text() + '{"kind": "st')
    assert make_common(tmp_path, mine=[("h", 70)]).steps == 3


def test_nothing_is_written_through_a_link_that_somebody_put_there(tmp_path: Path) -> None:
    """Root may attach to the job of a user, to whom the folder belongs."""
    folder, precious = tmp_path / "recording", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    write(folder, 0, [step(i, 100 * i) for i in range(4)])
    (folder / "rank-00000.tmp").symlink_to(precious)
    assert make_common(folder).steps == 3
    (folder / ".numbering.lock").unlink()
    (folder / ".numbering.lock").symlink_to(precious)
    with pytest.raises(OSError):
        make_common(folder)
    assert precious.read_text() == "precious"
