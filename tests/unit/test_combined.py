"""Calls that ran a forward and a backward mixed: their time is divided, and none of it is lost or made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bubblescope.ingest.combined import COMBINED, split_combined
from bubblescope.model import Kind, Names, Spans

FORWARD, BACKWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
Row = tuple[Kind, int, int]


def divided(*rows: Row) -> list[Row]:
    """The rows of one call, divided: forward of stage 1, micro-batch 3; backward of stage 2, micro-batch 0."""
    names = Names()
    place = [(1, 3) if kind is FORWARD else (2, 0) for kind, _, _ in rows]
    stage, microbatch = zip(*place, strict=True)
    kind, start, end = zip(*rows, strict=True)
    call = Spans.from_columns(
        len(rows),
        name=names.intern(COMBINED),
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        start_ns=start,
        end_ns=end,
    )
    made, _ = split_combined(call, names)
    return [
        (Kind(k), s, e)
        for k, s, e in zip(made.kind.tolist(), made.start_ns.tolist(), made.end_ns.tolist(), strict=True)
    ]


def test_a_backward_takes_twice_as_long_as_a_forward() -> None:
    assert divided((FORWARD, 0, 90), (BACKWARD, 0, 90)) == [(FORWARD, 0, 30), (BACKWARD, 30, 90)]


def test_weight_gradients_that_were_put_off_come_last_and_take_what_was_measured() -> None:
    rows = [(FORWARD, 0, 100), (INPUT, 0, 100), (WEIGHT, 20, 35), (WEIGHT, 90, 95)]
    assert divided(*rows) == [(FORWARD, 0, 40), (INPUT, 40, 80), (WEIGHT, 80, 100)]


def test_a_backward_alone_keeps_its_time_but_for_the_weight_gradients() -> None:
    assert divided((INPUT, 0, 100), (WEIGHT, 20, 60)) == [(INPUT, 0, 60), (WEIGHT, 60, 100)]


@given(st.integers(0, 1000), st.booleans(), st.lists(st.integers(0, 50), max_size=5))
def test_the_same_time_stays_busy(rest: int, mixed: bool, put_off: list[int]) -> None:
    """And the weight gradients keep what was measured."""
    end = rest + sum(put_off)
    rows: list[Row] = [(FORWARD, 0, end)] * mixed + [(INPUT, 0, end)]
    rows += [(WEIGHT, sum(put_off[:i]), sum(put_off[: i + 1])) for i in range(len(put_off))]
    made = divided(*rows)
    assert [start for _, start, _ in made] == [0, *(until for _, _, until in made[:-1])] and made[-1][2] == end
    assert sum(until - start for kind, start, until in made if kind is WEIGHT) == sum(put_off)
