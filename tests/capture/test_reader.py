"""The recording reader: what it must make of whole, cut, damaged and foreign files."""

from __future__ import annotations

import codecs
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bubblescope.align import prepare
from bubblescope.errors import BubblescopeError, InputError
from bubblescope.ingest import recording
from bubblescope.model import Kind, Lane
from bubblescope.replay.attribution import attribute
from tests.support.recordings import end, header, layout, step, text, write

STEP0 = step(0, [{"start_ns": 10, "end_ns": 30}, {"kind": "B", "start_ns": 30, "end_ns": 70}])


def two_ranks(folder: Path, last: dict[int, int] | None = None, ended: tuple[int, ...] = (0, 1)) -> Path:
    """Ranks 0 and 1; rank r has steps 0..last[r]; rank 0 sends one message per step to rank 1."""
    for rank in range(2):
        lines = [header(rank, 2), layout(rank, 2)]
        for number in range((last or {0: 1, 1: 1})[rank] + 1):
            base = 1000 * number
            message = {"kind": "SEND" if rank == 0 else "RECV", "stage": rank, "peer": 1 - rank, "seq": 3,
                       "bytes": 64, "group": 1, "name": 2}  # fmt: skip
            lines.append(
                step(
                    number,
                    [
                        {"stage": rank, "start_ns": base, "end_ns": base + 100},
                        message | {"lane": "post", "start_ns": base + 100, "end_ns": base + 110},
                        message | {"lane": "wait", "start_ns": base + 110, "end_ns": base + 150},
                    ],
                )
            )
        if rank in ended:
            lines.append(end())
        write(folder, rank, *lines)
    return folder


def codes(run: object) -> list[str]:
    return [notice.code for notice in run.notices]  # type: ignore[attr-defined]


def test_a_whole_recording_gives_spans_layout_and_linked_messages(tmp_path: Path) -> None:
    run = recording.read(two_ranks(tmp_path))
    assert codes(run) == []
    assert len(run.spans) == 12
    assert (run.layout.stages, run.layout.chunks, run.layout.schedule) == (2, 1, "1F1B")
    assert run.layout.stage_rank == {(0, 0): 0, (0, 1): 1}
    assert run.clock.aligned and run.source.timing == "host"
    assert len(run.links.p2p) == 2
    spans = run.spans
    for (send, recv), (send_wait, recv_wait) in zip(run.links.p2p, run.links.p2p_wait, strict=True):
        assert (spans.kind[send], spans.kind[recv]) == (Kind.SEND, Kind.RECV)
        assert spans.lane[send] == spans.lane[recv] == Lane.POST
        assert spans.lane[send_wait] == spans.lane[recv_wait] == Lane.WAIT
        assert spans.step[send] == spans.step[recv] == spans.step[send_wait] == spans.step[recv_wait]
        assert (spans.rank[send_wait], spans.rank[recv_wait]) == (0, 1)


def test_times_start_at_zero_and_the_origin_is_kept(tmp_path: Path) -> None:
    run = recording.read(two_ranks(tmp_path))
    assert run.spans.start_ns.min() == 0
    assert run.source.details["origin_ns"] == 1_000_000_000_000


def test_a_pipe_in_a_recording_is_named_and_not_waited_for(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    (tmp_path / "rank-00000.jsonl").unlink()
    os.mkfifo(tmp_path / "rank-00000.jsonl")
    assert recording.has_header(tmp_path)
    run = recording.read(tmp_path)
    assert [n.where for n in run.notices if "it is a pipe" in n.message] == [str(tmp_path / "rank-00000.jsonl")]
    assert set(run.spans.rank.tolist()) == {1}


@pytest.mark.parametrize("cut", range(1, 280, 31))
def test_a_cut_tail_costs_only_the_line_that_was_cut(tmp_path: Path, cut: int) -> None:
    whole = text(header(), layout(), STEP0, step(1, [{"start_ns": 100, "end_ns": 120}]))
    (tmp_path / "rank-00000.jsonl").write_bytes(whole[:-cut])
    run = recording.read(tmp_path)
    if cut == 1:  # only the newline is gone
        assert 1 in run.spans.step and "tail-cut" not in codes(run)
    else:
        assert set(run.spans.step.tolist()) == {0}
        message = next(notice.message for notice in run.notices if notice.code == "tail-cut")
        assert "rank 0" in message and "after step 0" in message


def test_a_corrupt_line_in_the_middle_is_skipped_and_counted(tmp_path: Path) -> None:
    lines = text(header(), layout(), STEP0, step(1, [{"start_ns": 100, "end_ns": 120}]), end()).split(b"\n")
    lines[2] = lines[2][:50] + b"\xff\x00" + lines[2][60:]
    (tmp_path / "rank-00000.jsonl").write_bytes(b"\n".join(lines))
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {1}
    assert "1 of 5 lines" in next(n.message for n in run.notices if n.code == "line-skipped")


def test_a_step_that_stands_there_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, header(), layout(), STEP0, STEP0, step(1, [{"start_ns": 100, "end_ns": 120}]), end())
    run = recording.read(tmp_path)
    assert [n.message for n in run.notices] == [
        "1 of 6 lines cannot be read and are left out: line 4 (step 0 a second time)"
    ]
    assert sorted(run.spans.step.tolist()) == [0, 0, 1]


def test_a_rank_that_recorded_no_step_is_not_said_to_end_after_one(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    write(tmp_path, 1, header(1, 2), layout(1, 2))
    (early,) = (n.message for n in recording.read(tmp_path).notices if n.code == "rank-ended-early")
    assert "before its first step ended; the longest rank has step 1" in early


@pytest.mark.parametrize(
    "damage",
    [
        {"step": 2**40},
        {"texts": []},
        {"columns": {}},
        {"columns": step(0, [{}])["columns"] | {"end_ns": [1, 2]}},
        {"columns": step(0, [{"kind": "Q"}])["columns"]},
        {"columns": step(0, [{"device": 10**6}])["columns"]},
        {"columns": step(0, [{"start_ns": 2**63}])["columns"]},
        {"columns": step(0, [{"name": 77}])["columns"]},
    ],
)
def test_a_step_line_that_makes_no_sense_is_skipped(tmp_path: Path, damage: dict[str, object]) -> None:
    write(tmp_path, 0, header(), layout(), STEP0 | damage, step(1, [{"start_ns": 1, "end_ns": 2}]), end())
    run = recording.read(tmp_path)
    assert codes(run) == ["line-skipped"]
    assert set(run.spans.step.tolist()) == {1}


def test_rows_that_end_before_they_start_are_dropped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, 0, header(), layout(), step(0, [{"start_ns": 9, "end_ns": 5}, {"end_ns": 5}]), end())
    run = recording.read(tmp_path)
    assert len(run.spans) == 1
    assert codes(run) == ["rows-dropped"]


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    write(tmp_path, 0, header(0, 4), layout(0, 4), STEP0, end())
    write(tmp_path, 2, header(2, 4), layout(2, 4), STEP0, end())
    run = recording.read(tmp_path)
    assert run.layout.missing_ranks == [1, 3]
    assert "2 of 4 ranks have no file: 1, 3" in next(n.message for n in run.notices if n.code == "rank-missing")


def test_a_rank_that_ended_early_is_named(tmp_path: Path) -> None:
    run = recording.read(two_ranks(tmp_path, last={0: 3, 1: 1}, ended=(0,)))
    early = [notice.message for notice in run.notices if notice.code == "rank-ended-early"]
    assert len(early) == 1 and "rank 1" in early[0] and "killed" in early[0] and "after step 1" in early[0]


def test_a_recording_that_is_still_written_says_so(tmp_path: Path) -> None:
    assert codes(recording.read(two_ranks(tmp_path, ended=()))) == ["recording-open"]


def test_a_partial_step_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, 0, header(), layout(), STEP0, step(1, [{}], partial=True), end(error="RuntimeError"))
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {0}
    assert "RuntimeError" in next(n.message for n in run.notices if n.code == "step-partial")


def test_a_recording_without_forwards_says_that_they_are_what_is_missing(tmp_path: Path) -> None:
    for rank in range(2):
        rows = [{"kind": "B", "stage": rank, "start_ns": 30, "end_ns": 70}, {"kind": "OPTIMIZER", "start_ns": 80}]
        rows[1] |= {"end_ns": 90, "stage": -1, "microbatch": -1}
        write(tmp_path, rank, header(rank, 2), step(0, rows), end())
    found = attribute(prepare(recording.read(tmp_path)))
    assert found.replay_refused == "no pipeline was found: only backwards of micro-batches were seen, and no forward"


def test_a_warning_that_the_end_line_repeats_is_one_notice(tmp_path: Path) -> None:
    said = {"warnings": ["cannot write"]}
    write(tmp_path, 0, header(), layout(), STEP0 | said, end() | said)
    assert codes(recording.read(tmp_path)) == ["recorder-warning"]


def test_of_two_files_of_a_rank_the_newest_is_read(tmp_path: Path) -> None:
    write(tmp_path, 0, header(), layout(), STEP0, end())
    again = text(header(clock=[0, 2_000_000_000_000]), layout(), step(7, [{"end_ns": 4}]), end())
    (tmp_path / "rank-00000.4711.jsonl").write_bytes(again)
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {7}
    assert codes(run) == ["rank-duplicate"]


def test_a_rank_whose_attach_goes_on_is_left_out_as_its_steps_have_other_numbers(tmp_path: Path) -> None:
    write(tmp_path, 0, header(0, 2, common={"first_recorded": 3, "steps": 1}), layout(0, 2), STEP0, end())
    write(tmp_path, 1, header(1, 2), layout(1, 2), STEP0)
    run = recording.read(tmp_path)
    assert run.ranks == [0] and run.layout.missing_ranks == [1]
    assert "rank 1 is left out: the attach that records it has not ended" in run.notices[0].message
    assert codes(run) == ["steps-differ", "rank-missing"]


def test_of_two_jobs_in_a_folder_the_newest_is_read(tmp_path: Path) -> None:
    write(tmp_path, 0, header(0, 2), layout(0, 2), STEP0, end())
    write(tmp_path, 1, header(1, 2, job="job-2", clock=[0, 2_000_000_000_000]), layout(1, 2), STEP0, end())
    run = recording.read(tmp_path)
    assert run.ranks == [1]
    assert "several-jobs" in codes(run)


def test_two_runs_of_different_size_are_two_jobs_although_their_launcher_gave_them_one_name(tmp_path: Path) -> None:
    later = {"clock": [0, 2_000_000_000_000]}
    for rank in range(3):
        write(tmp_path, rank, header(rank, 3), layout(rank, 3), STEP0, end())
    for rank in range(2):
        again = text(header(rank, 2, **later), layout(rank, 2), step(7, [{"end_ns": 4}]), end())
        (tmp_path / f"rank-0000{rank}.4711.jsonl").write_bytes(again)
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {0}
    assert run.ranks == [0, 1, 2]
    assert "several-jobs" in codes(run) and "rank-duplicate" not in codes(run)


def test_ranks_of_one_host_keep_their_common_clock_despite_different_anchors(tmp_path: Path) -> None:
    write(tmp_path, 0, header(0, 2), layout(0, 2), STEP0, end())
    write(tmp_path, 1, header(1, 2, clock=[0, 1_000_000_000_500]), layout(1, 2), STEP0, end())
    run = recording.read(tmp_path)
    assert run.spans.start_ns[run.spans.rank == 0].tolist() == run.spans.start_ns[run.spans.rank == 1].tolist()


def test_two_hosts_are_not_called_aligned(tmp_path: Path) -> None:
    write(tmp_path, 0, header(0, 2), layout(0, 2), STEP0, end())
    write(tmp_path, 1, header(1, 2, boot_id="boot-b", host="node-b"), layout(1, 2), STEP0, end())
    run = recording.read(tmp_path)
    assert not run.clock.aligned and len(run.clock.hosts) == 2 and run.clock.half_width_ns is None


def test_a_newer_format_is_refused_with_a_hint(tmp_path: Path) -> None:
    write(tmp_path, 0, {"kind": "header", "schema_version": 99, "surprise": True})
    with pytest.raises(InputError) as caught:
        recording.read(tmp_path)
    assert "99" in caught.value.what and "upgrade" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}", b'{"kind":"step"}\n', b"\x00" * 4000, b"[" * 100_000])
def test_a_file_without_a_header_is_refused_with_a_hint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank-00000.jsonl").write_bytes(content)
    with pytest.raises(InputError) as caught:
        recording.read(tmp_path)
    assert caught.value.hint


def test_an_empty_file_beside_good_ones_is_only_noticed(tmp_path: Path) -> None:
    write(tmp_path, 0, header(0, 2), layout(0, 2), STEP0, end())
    (tmp_path / "rank-00001.jsonl").write_bytes(b"")
    assert set(codes(recording.read(tmp_path))) == {"file-empty", "rank-missing"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"rank": -5}, "rank -5 of a job of 2 ranks"),
        ({"rank": 2}, "rank 2 of a job of 2 ranks"),
        ({"rank": 2**40, "world": None}, f"rank {2**40}"),
        ({"world": 0}, "a world size of 0"),
        ({"world": -1}, "a world size of -1"),
        ({"world": 10**12}, "a world size of 1000000000000"),
        ({"clock": [0, -1]}, "the clock reading (0, -1)"),
    ],
)
def test_an_impossible_header_costs_that_rank_alone(tmp_path: Path, damage: dict[str, object], said: str) -> None:
    folder = two_ranks(tmp_path)
    path = folder / "rank-00001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(lines[0]) | damage) + "\n" + "".join(lines[1:]))
    run = recording.read(folder)
    assert run.ranks == [0]
    (notice,) = [n for n in run.notices if n.code == "file-unreadable"]
    assert notice.message == f"its header names {said}; this rank is left out"
    assert notice.where == str(path)
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        recording.read(path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"microbatches": 0}, "0 micro-batches"),
        ({"num_stages": 0, "stage_ranks": []}, "a stage out of range of its 0"),
        ({"stages": [2]}, "a stage out of range of its 2"),
        ({"pp_ranks": [0, 2]}, "a rank in it is out of range"),
        ({"pp_ranks": [0, 0]}, "a rank stands twice"),
    ],
)
def test_an_impossible_layout_is_left_out_and_said(tmp_path: Path, damage: dict[str, object], said: str) -> None:
    write(tmp_path, 0, header(0, 2), layout(0, 2), STEP0, end())
    write(tmp_path, 1, header(1, 2), layout(1, 2, **damage), STEP0, end())
    run = recording.read(tmp_path)
    assert run.ranks == [0, 1]
    (notice,) = [n for n in run.notices if n.code == "line-skipped"]
    assert said in notice.message


def test_a_step_with_a_stage_that_its_layout_lacks_is_left_out(tmp_path: Path) -> None:
    damaged = step(1, [{"stage": 2, "start_ns": 100, "end_ns": 120}])
    write(tmp_path, 0, header(0, 2), layout(0, 2), STEP0, damaged, end())
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {0}
    assert ["a stage out of range of its 2" in n.message for n in run.notices if n.code == "line-skipped"] == [True]


@pytest.mark.parametrize("stated", [[2, 3], [2, 1, 0]])
def test_of_layouts_that_contradict_each_other_that_of_most_ranks_holds(tmp_path: Path, stated: list[int]) -> None:
    """Rank 2 would be in a pipeline of its own, and the job have two replicas."""
    for rank in range(4):
        write(
            tmp_path,
            rank,
            header(rank, 4),
            layout(rank, 4, **({"pp_ranks": stated} if rank == 2 else {})),
            STEP0,
            end(),
        )
    run = recording.read(tmp_path)
    assert run.layout.pp.tolist() == [0, 1, 2, 3]
    assert run.layout.data_parallel == 1
    assert run.layout.stage_rank == {(0, rank): rank for rank in range(4)}
    (notice,) = [n for n in run.notices if n.code == "layout-contradicts"]
    assert notice.message.startswith("rank 2: its layout, a pipeline of ranks")
    assert notice.message.endswith("; theirs is used")


def test_a_layout_that_takes_ranks_of_a_whole_pipeline_is_not_used(tmp_path: Path) -> None:
    for rank in range(3):
        of_two = {"num_stages": 2, "stages": [rank % 2], "pp_ranks": [0, 1], "stage_ranks": [0, 1]}
        alone = {"num_stages": 2, "stages": [1], "pp_ranks": [1, 2], "stage_ranks": [1, 2]}
        write(tmp_path, rank, header(rank, 3), layout(rank, 3, **(alone if rank == 2 else of_two)), STEP0, end())
    run = recording.read(tmp_path)
    assert run.layout.pp.tolist() == [0, 1, -1]
    (notice,) = [n for n in run.notices if n.code == "layout-contradicts"]
    assert notice.message.endswith("contradicts other ranks'; it is not used")


def in_turn(folder: Path, *layouts: dict[str, object], ranks: int = 2) -> Path:
    """Two steps under each layout, one after the other, of ranks that each run all its stages' forwards."""
    for rank in range(ranks):
        lines = [header(rank, ranks)]
        for number, changes in enumerate(layouts):
            of = layout(rank, ranks, **changes)
            lines.append(of)
            for k in (2 * number, 2 * number + 1):
                rows = [{"stage": s, "start_ns": 100 * k + s, "end_ns": 100 * k + s + 1} for s in of["stages"]]
                lines.append(step(k, rows, warmup=k % 2 == 0))
        write(folder, rank, *lines, end())
    return folder


OF_FOUR = {"stages": [1, 3], "num_stages": 4, "stage_ranks": [0, 1, 0, 1], "schedule": "Interleaved1F1B"}


@pytest.mark.parametrize("others", [[OF_FOUR, {}], [{}, OF_FOUR], [{}, OF_FOUR, {}], [{"schedule": "GPipe"}, {}]])
def test_of_several_pipelines_the_newest_is_read_and_the_steps_of_others_are_named(
    tmp_path: Path, others: list[dict[str, object]]
) -> None:
    run = recording.read(in_turn(tmp_path, *others))
    newest = layout(0, 2, **others[-1])
    mine = [k for number, of in enumerate(others) for k in (2 * number, 2 * number + 1) if of == others[-1]]
    assert sorted(set(run.spans.step.tolist())) == mine
    assert set(run.spans.stage.tolist()) <= set(range(newest["num_stages"]))
    assert run.layout.schedule == newest["schedule"]
    assert run.layout.chunks == newest["num_stages"] // 2
    (notice,) = [n for n in run.notices if n.code == "several-pipelines"]
    assert f"the newest is analysed, {newest['schedule']} with {newest['num_stages']} stages" in notice.message
    left = [k for k in range(2 * len(others)) if k not in mine]
    assert notice.message.endswith(f"({', '.join(map(str, left))})")


def test_a_rank_that_was_lost_with_the_pipeline_before_does_not_say_what_the_newest_is(tmp_path: Path) -> None:
    in_turn(tmp_path / "before", OF_FOUR)
    in_turn(tmp_path, OF_FOUR, {})
    (tmp_path / "before" / "rank-00000.jsonl").replace(tmp_path / "rank-00000.jsonl")
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {2, 3} and set(run.spans.rank.tolist()) == {1}
    assert (run.layout.schedule, run.layout.chunks, run.layout.pp.tolist()) == ("1F1B", 1, [0, 1])
    assert {"several-pipelines", "rank-ended-early"} <= set(codes(run))


def test_ranks_that_never_ran_their_newest_pipelines_together_are_refused(tmp_path: Path) -> None:
    in_turn(tmp_path / "other", {}, OF_FOUR)
    in_turn(tmp_path, OF_FOUR, {})
    lines = (tmp_path / "other" / "rank-00001.jsonl").read_bytes().split(b"\n")
    swapped = [lines[0], *lines[4:7], *lines[1:4], *lines[7:]]  # steps 2 and 3 first
    (tmp_path / "rank-00001.jsonl").write_bytes(b"\n".join(swapped))
    with pytest.raises(InputError, match="in no step all ranks their newest one"):
        recording.read(tmp_path)


def test_another_number_of_microbatches_makes_no_other_pipeline(tmp_path: Path) -> None:
    run = recording.read(in_turn(tmp_path, {}, {"microbatches": 8}))
    assert set(run.spans.step.tolist()) == {0, 1, 2, 3} and codes(run) == []


def test_a_pipeline_that_has_only_begun_is_not_the_one_to_analyse(tmp_path: Path) -> None:
    """Of the newest one there is nothing but its first step, with what only first steps do."""
    rows = [{"start_ns": 900, "end_ns": 901}]
    for path in sorted(in_turn(tmp_path, {}).iterdir()):
        rank = int(path.name[5:10])
        more = text(layout(rank, 2, schedule="GPipe"), step(2, rows, warmup=True), step(3, rows, partial=True))
        path.write_bytes(path.read_bytes() + more)
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {0, 1} and run.layout.schedule == "1F1B"


def test_a_byte_order_mark_before_a_recording_is_no_fault(tmp_path: Path) -> None:
    whole = recording.read(two_ranks(tmp_path / "plain"))
    two_ranks(tmp_path / "marked")
    for path in (tmp_path / "marked").iterdir():
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    marked = recording.read(tmp_path / "marked")
    assert codes(marked) == codes(whole) == []
    assert np.array_equal(marked.spans.start_ns, whole.spans.start_ns)
    renamed = (tmp_path / "marked" / "rank-00000.jsonl").rename(tmp_path / "kept.jsonl")
    renamed.write_bytes(codecs.BOM_UTF8 + text(header()).replace(b": ", b":").replace(b", ", b","))
    assert recording.can_read(renamed)


def test_can_read_knows_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 0, header(), end())
    other = tmp_path / "trace.json"
    other.write_text('{"traceEvents": []}')
    renamed = tmp_path / "kept.jsonl"
    renamed.write_bytes(text(header()).replace(b": ", b":").replace(b", ", b","))
    assert [recording.can_read(p) for p in (path, path.parent, renamed)] == [True] * 3
    assert [recording.can_read(p) for p in (other, tmp_path, tmp_path / "nothing")] == [False] * 3


def test_gradient_accumulation_counts_as_one_steps_microbatches(tmp_path: Path) -> None:
    rows = [{"microbatch": mb, "start_ns": mb, "end_ns": mb + 1} for mb in range(6)]
    write(tmp_path, 0, header(), layout(microbatches=3), step(0, rows), step(1, rows), end())
    assert recording.read(tmp_path).layout.microbatches == 6


def own_loop(folder: Path, stage: int, microbatches: list[list[int]], world: int = 2) -> Path:
    """Two ranks that mark their operations themselves, the first stage numbered `stage`; one list for each step."""
    for rank in range(2):
        lines = [
            step(number, [
                {"kind": kind, "stage": stage + rank, "microbatch": m, "start_ns": i * 10, "end_ns": i * 10 + 9}
                for i, (kind, m) in enumerate((kind, m) for kind in "FB" for m in counted)
            ])
            for number, counted in enumerate(microbatches)
        ]  # fmt: skip
        write(folder, rank, header(rank, world), *lines, end())
    return folder


@pytest.mark.parametrize(("stage", "first"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_loop_of_ones_own_may_count_from_one(tmp_path: Path, stage: int, first: int) -> None:
    run = recording.read(own_loop(tmp_path, stage, [[first, first + 1, first + 2]] * 2))
    assert (run.layout.stages, run.layout.microbatches) == (2, 3)
    assert np.unique(run.spans.stage).tolist() == [0, 1]
    assert np.unique(run.spans.microbatch).tolist() == [0, 1, 2]
    assert codes(run) == ["numbered-from-one"] * (stage + first)


def again(number: int, rank: int) -> dict[str, object]:
    """A step line that holds two steps: everything comes twice."""
    order = [(kind, m) for _ in range(2) for kind in "FB" for m in (0, 1)]
    rows: list[dict[str, object]] = [{"kind": kind, "stage": rank, "microbatch": m} for kind, m in order]
    for i, row in enumerate(rows):
        row["start_ns"] = 1000 * number + i * 10
        row["end_ns"] = 1000 * number + i * 10 + 9
    return step(number, rows)


def test_a_loop_that_never_says_where_a_step_ends_is_told_so(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, header(rank, 2), again(0, rank), end())
    with pytest.raises(InputError, match="does not say where steps end: in step 0 rank 0 runs micro-batch 0") as caught:
        recording.read(tmp_path)
    assert "bubblescope.step()" in (caught.value.hint or "")


def test_a_step_whose_end_was_not_said_is_left_out_and_named(tmp_path: Path) -> None:
    own_loop(tmp_path, 0, [[0, 1]] * 3)
    with (tmp_path / "rank-00001.jsonl").open("ab") as file:
        file.write(text(again(3, 1)))
    run = recording.read(tmp_path)
    assert set(run.spans.step.tolist()) == {0, 1, 2}
    (notice,) = [n for n in run.notices if n.code == "step-not-ended"]
    assert notice.message.startswith("1 of 4 steps left out (3): in step 3 rank 1 runs micro-batch 0 of stage 1")


def test_numbers_that_begin_elsewhere_stay_as_they_are_and_it_is_said(tmp_path: Path) -> None:
    """Stage 1 is the first of a job that lacks a rank, and one rank lacks its first micro-batches."""
    own_loop(tmp_path, 1, [[0, 1, 2]] * 2, world=3)
    lacking = own_loop(tmp_path / "other", 1, [[0, 1, 2], [2]], world=3) / "rank-00001.jsonl"
    lacking.replace(tmp_path / lacking.name)
    run = recording.read(tmp_path)
    assert np.unique(run.spans.stage).tolist() == [1, 2]
    assert run.layout.microbatches == 3
    assert {"stages-not-from-zero", "microbatches-not-from-zero"} <= set(codes(run))


def test_a_loop_of_ones_own_may_count_on_from_step_to_step(tmp_path: Path) -> None:
    run = recording.read(own_loop(tmp_path, 0, [[0, 1, 2], [3, 4, 5]]))
    assert np.unique(run.spans.microbatch).tolist() == [0, 1, 2]
    assert codes(run) == ["microbatches-count-on"]


def test_a_step_has_as_many_microbatches_as_it_has_numbers(tmp_path: Path) -> None:
    rows = [{"microbatch": mb, "start_ns": mb, "end_ns": mb + 1} for mb in (1, 2, 5)]
    write(tmp_path, 0, header(), layout(microbatches=3), step(0, rows), step(1, rows), end())
    assert recording.read(tmp_path).layout.microbatches == 3


def test_device_times_are_put_on_the_host_clock_with_their_drift(tmp_path: Path) -> None:
    """The device clock is 5 ms off and gains 20 ppm; events start 3 us to 2 ms after the host recorded them."""
    rng = np.random.default_rng(3)
    lines, truth = [header(), layout()], []
    for number in range(200):
        host = 50_000_000 * number + np.arange(20) * 2_000_000
        started = host + np.where(rng.random(20) < 0.2, 3_000, rng.integers(3_000, 2_000_000, 20))
        device = np.rint((started - 5_000_000) * (1 + 20e-6)).astype(int)
        truth += started.tolist()
        rows = [{"start_ns": int(d), "end_ns": int(d) + 1000} for d in device]
        made = step(number, rows, timing="events")
        made["columns"] |= {"host_start_ns": host.tolist(), "host_end_ns": (host + 500).tolist()}
        lines.append(made)
    write(tmp_path, 0, *lines, end())
    run = recording.read(tmp_path)
    error = run.spans.start_ns + run.source.details["origin_ns"] - 1_000_000_000_000 - np.sort(np.array(truth))
    assert run.source.timing == "events"
    assert np.abs(error).max() < 10_000


def test_evaluation_rows_have_no_step(tmp_path: Path) -> None:
    write(tmp_path, 0, header(), layout(), STEP0, step(-1, [{"start_ns": 80, "end_ns": 90}], eval=True), end())
    run = recording.read(tmp_path)
    # The evaluation's own row is evidence only; one busy row covers it.
    assert run.spans.step.tolist() == [0, 0, -1, -1]
    assert run.spans.device.tolist() == [0, 0, -1, 0]
    assert run.names[run.spans.name[3]] == "evaluation"
    assert run.source.details["evaluations"] == 1


GOOD = text(header(), layout(), STEP0, step(1, [{"start_ns": 100, "end_ns": 120}]), end())


@settings(max_examples=200, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 40), st.binary(max_size=12)), max_size=6))
def test_no_damage_ends_in_anything_but_a_run_or_our_own_error(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, int, bytes]]
) -> None:
    data = GOOD
    for at, gone, new in cuts:
        data = data[:at] + new + data[at + gone :]
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "rank-00000.jsonl").write_bytes(data)
    try:
        run = recording.read(folder)
    except BubblescopeError as error:
        assert error.hint
        return
    assert (run.spans.end_ns >= run.spans.start_ns).all()
    assert len(run.links.p2p) == len(run.links.p2p_wait)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    line=st.sampled_from([header(), layout(), STEP0, end()]),
    changes=st.dictionaries(st.sampled_from([*header(), *layout(), *STEP0, *end()]), json_values, max_size=3),
    cells=st.dictionaries(
        st.sampled_from([*STEP0["columns"], "host_start_ns", "host_end_ns"]),
        st.lists(st.integers(-(2**64), 2**64) | st.integers(-2, 2), min_size=2, max_size=2),
        max_size=3,
    ),
)
def test_no_value_of_any_field_ends_in_anything_but_a_run_or_our_own_error(
    tmp_path_factory: pytest.TempPathFactory,
    line: dict[str, object],
    changes: dict[str, object],
    cells: dict[str, object],
) -> None:
    folder = tmp_path_factory.mktemp("fields")
    odd = STEP0 | {"columns": STEP0["columns"] | cells}
    write(folder, 0, header(), line | changes, layout(), STEP0, odd, end())
    try:
        recording.read(folder)
    except BubblescopeError as error:
        assert error.hint
