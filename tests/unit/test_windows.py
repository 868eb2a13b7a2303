"""Step windows tile time, and share their edges where clocks allow it."""

from __future__ import annotations

from dataclasses import replace

from bubblescope.analysis.windows import find_windows
from bubblescope.model import Clock, Kind, Lane, Names, Run, Source, SpanBuilder


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
