"""Step windows tile time, and share their edges where clocks allow it."""

from __future__ import annotations

from dataclasses import replace

from bubblescope.analysis.windows import find_windows
from bubblescope.ingest.settled import EVALUATION
from bubblescope.model import Clock, Kind, Lane, Names, Run, Source, SpanBuilder, Spans


def run_of(rows: list[tuple[int, int, Kind, int, int]], *, aligned: bool = True, warmup: tuple[int, ...] = ()) -> Run:
    """(rank, step, kind, start, end) of compute."""
    spans = SpanBuilder()
    for rank, step, kind, start, end in rows:
        spans.add(rank=rank, step=step, kind=kind, lane=Lane.COMPUTE, device=0, start_ns=start, end_ns=end)
    details = {"warmup_steps": warmup}
    return Run(
        spans.build(), Names(), clock=Clock(aligned=aligned), source=Source("test", timing="host", details=details)
    )


TWO_RANKS = [
    (0, 0, Kind.FORWARD, 10, 50),
    (0, 0, Kind.OPTIMIZER, 80, 90),
    (1, 0, Kind.FORWARD, 50, 90),
    (1, 0, Kind.OPTIMIZER, 90, 100),
    (0, 1, Kind.FORWARD, 110, 150),
    (0, 1, Kind.OPTIMIZER, 180, 190),
    (1, 1, Kind.FORWARD, 150, 190),
    (1, 1, Kind.OPTIMIZER, 190, 200),
]


def spans_of(run: Run) -> list[tuple[int, int, int, int]]:
    w = find_windows(run)
    return list(zip(w.rank.tolist(), w.step.tolist(), w.start_ns.tolist(), w.end_ns.tolist(), strict=True))


def test_on_one_clock_a_step_ends_for_all_when_it_ends_for_the_last() -> None:
    assert spans_of(run_of(TWO_RANKS)) == [(0, 0, 10, 100), (0, 1, 100, 200), (1, 0, 10, 100), (1, 1, 100, 200)]


def test_without_a_common_clock_each_rank_has_its_own_windows() -> None:
    found = spans_of(run_of(TWO_RANKS, aligned=False))
    assert found == [(0, 0, 10, 90), (0, 1, 90, 190), (1, 0, 50, 100), (1, 1, 100, 200)]


def test_a_rank_that_is_ahead_ends_its_window_where_it_goes_on() -> None:
    rows = [row if row[:2] != (0, 1) else (*row[:3], row[3] - 15, row[4] - 15) for row in TWO_RANKS]
    assert spans_of(run_of(rows))[:2] == [(0, 0, 10, 95), (0, 1, 95, 200)]


def test_a_step_without_its_optimizer_was_not_finished() -> None:
    found = spans_of(run_of(TWO_RANKS[:-1]))
    assert (1, 1, 100, 200) not in found
    assert len(found) == 3


def test_steps_that_no_rank_finished_are_named() -> None:
    rows = [row for row in TWO_RANKS if row[1:3] != (1, Kind.OPTIMIZER)]
    run = run_of(rows)
    marker = SpanBuilder()
    marker.add(rank=0, step=2, lane=Lane.RANGE, kind=Kind.STEP, start_ns=200, end_ns=300)
    windows = find_windows(replace(run, spans=Spans.concat([run.spans, marker.build()])))
    assert windows.steps.tolist() == [0]
    assert {s.index: s.why for s in windows.skipped} == {
        1: "no rank finished it: no optimizer was seen in it",
        2: "no work of a device is in it",
    }


def test_warm_up_steps_are_left_out_as_long_as_others_remain() -> None:
    w = find_windows(run_of(TWO_RANKS, warmup=(0,)))
    assert w.steps.tolist() == [1]
    assert [s.index for s in w.skipped] == [0]
    assert w.start_ns.tolist() == [100, 100]
    assert not w.notices


def test_steps_that_are_all_warm_up_are_analysed_and_that_is_said() -> None:
    w = find_windows(run_of(TWO_RANKS, warmup=(0, 1)))
    assert w.steps.tolist() == [0, 1] and not w.skipped
    (notice,) = w.notices
    assert notice.code == "warmup-only" and "(2 in all) is marked as warm-up" in notice.message


def test_without_any_optimizer_windows_end_with_the_last_operation_and_say_so() -> None:
    rows = [row for row in TWO_RANKS if row[2] != Kind.OPTIMIZER]
    w = find_windows(run_of(rows))
    assert w.end_ns.tolist() == [90, 190, 90, 190]
    assert [n.code for n in w.notices] == ["no-optimizer"] and "no optimizer step was seen" in w.notices[0].message


def test_of_steps_that_the_user_marks_none_is_said_to_be_unseen() -> None:
    run = run_of([row for row in TWO_RANKS if row[2] != Kind.OPTIMIZER])
    (notice,) = find_windows(replace(run, source=replace(run.source, details={"steps_marked": True}))).notices
    assert notice.code == "no-optimizer" and notice.message.startswith("steps are marked by bubblescope.step")


def test_an_empty_run_has_no_windows() -> None:
    assert len(find_windows(Run.empty())) == 0


def test_missing_steps_are_counted_without_being_listed() -> None:
    """A damaged number may lie a billion steps ahead; every tenth step recorded is no gap."""
    far = [(rank, {0: 0, 1: 10**9}[step], *row) for rank, step, *row in TWO_RANKS]
    rows = [(rank, 2, kind, start + 300, end + 300) for rank, step, kind, start, end in TWO_RANKS if step == 0]
    said = [n.message for n in find_windows(run_of([*far, *rows])).notices]
    assert said == ["499999998 steps are missing of every rank: 4, 6, 8, 10, 12, 14, 16, 18 …"]
    every_tenth = [(rank, 10 * step, *row) for rank, step, *row in TWO_RANKS]
    assert find_windows(run_of(every_tenth)).notices == ()


def evaluating(*covers: tuple[int, int, int]) -> Run:
    """Two ranks of three steps; each cover is (rank, start, end) of an evaluation."""
    third = [(rank, 2, kind, start + 100, end + 100) for rank, step, kind, start, end in TWO_RANKS if step == 1]
    run = run_of([*TWO_RANKS, *third])
    names = Names()
    rows = SpanBuilder()
    for rank, start, end in covers:
        rows.add(rank=rank, step=-1, kind=Kind.OTHER, lane=Lane.COMPUTE, device=0, start_ns=start, end_ns=end,
                 name=names.intern(EVALUATION))  # fmt: skip
    return replace(run, spans=Spans.concat([run.spans, rows.build()]).sorted(), names=names)


def test_a_step_after_an_evaluation_is_left_out_as_long_as_others_remain() -> None:
    w = find_windows(evaluating((0, 101, 104), (1, 102, 108)))
    assert w.steps.tolist() == [0, 2]
    (skipped,) = w.skipped
    assert skipped.index == 1 and "follows an evaluation" in skipped.why
    assert not w.notices


def test_an_evaluation_is_in_no_window_and_steps_begin_after_it() -> None:
    between = [(0, 1, 5), (1, 2, 8), (0, 101, 104), (1, 102, 108), (0, 201, 204), (1, 202, 208)]
    run = evaluating(*between)
    w = find_windows(run)
    assert [n.code for n in w.notices] == ["evaluations-between"]
    assert w.steps.tolist() == [0, 1, 2]
    assert w.start_ns.tolist() == [10, 108, 208] * 2
    assert w.end_ns.tolist() == [100, 200, 300] * 2
    assert w.base_ns.tolist() == [10, 108, 208] * 2


def test_a_gpu_that_trains_again_while_others_evaluate_begins_its_step_then() -> None:
    w = find_windows(evaluating((0, 1, 5), (1, 2, 8), (0, 101, 104), (1, 102, 120), (0, 201, 204), (1, 202, 208)))
    assert w.start_ns.tolist() == [10, 110, 208, 10, 120, 208]


def test_an_evaluation_within_a_step_is_part_of_it() -> None:
    w = find_windows(evaluating((0, 151, 160), (1, 152, 165)))
    assert w.steps.tolist() == [0, 1, 2] and not w.skipped and not w.notices
    assert w.start_ns.tolist() == [10, 100, 200] * 2


def test_a_gpu_that_evaluates_while_others_end_their_step_leaves_it_then() -> None:
    w = find_windows(evaluating((0, 91, 104), (1, 102, 108)))
    assert w.steps.tolist() == [0, 2]
    assert w.end_ns.tolist() == [91, 300, 100, 300]


def test_a_step_after_one_that_was_not_recorded_begins_when_the_last_rank_enters_it() -> None:
    """Rank 0 ends steps 10 early, as an early stage does before its cooldown, and enters the next one at once."""
    spans = SpanBuilder()
    for row in (row for row in TWO_RANKS if row[1] == 1):
        rank, step, kind, start, end = row
        spans.add(rank=rank, step=step, kind=kind, lane=Lane.COMPUTE, device=0, start_ns=start, end_ns=end)
    for rank, loads, entered in ((0, 91, 93), (1, 101, 103)):
        spans.add(rank=rank, step=1, kind=Kind.DATA, lane=Lane.HOST, device=-1, start_ns=loads, end_ns=entered)
        spans.add(rank=rank, step=1, kind=Kind.STEP, lane=Lane.RANGE, device=-1, start_ns=entered, end_ns=180)
    run = Run(spans.build(), Names(), clock=Clock(aligned=True), source=Source("test", timing="host"))
    assert spans_of(run) == [(0, 1, 101, 200), (1, 1, 101, 200)]
    assert find_windows(run).base_ns.tolist() == [101, 101]
