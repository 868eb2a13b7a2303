"""Calls that ran a forward and a backward mixed: their time is divided, and none of it is lost or made."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.ingest.combined import COMBINED, split_combined
from bubblescope.model import Kind, Lane, Names, Spans

FORWARD, BACKWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
Row = tuple[Kind, int, int]


def divided(*rows: Row, handed_over: int | None = None) -> list[Row]:
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
    if handed_over is not None:
        post = Spans.from_columns(
            1, lane=Lane.POST, kind=Kind.SEND, name=names.intern("grad"), stage=2, microbatch=0, start_ns=handed_over
        )
        call = Spans.concat([call, post])
    made, _ = split_combined(call, names)
    made = made.take(np.flatnonzero(made.lane == Lane.COMPUTE))
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


def test_a_backward_has_ended_when_its_gradient_is_handed_over() -> None:
    rows = [(FORWARD, 0, 60), (INPUT, 0, 60), (FORWARD, 65, 105), (INPUT, 65, 105)]
    assert divided(*rows, handed_over=60) == [
        (FORWARD, 0, 10),
        (INPUT, 10, 60),
        (Kind.OTHER, 65, 105),
    ]


pieces = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=6)


@given(pieces, st.booleans(), st.floats(0, 1), st.integers(0, 300))
def test_the_same_time_stays_busy(shape: list[tuple[int, int]], mixed: bool, late: float, handed_over: int) -> None:
    rows: list[Row] = []
    busy: set[int] = set()
    now = 0
    for length, pause in shape:
        rows += [(FORWARD, now, now + length)] * mixed + [(INPUT, now, now + length)]
        rows += [(WEIGHT, now, now + int(length * late))] * (late > 0)
        busy |= set(range(now, now + length))
        now += length + pause
    made = divided(*rows, handed_over=handed_over)
    covered = [ns for _, start, end in made for ns in range(start, end)]
    assert len(covered) == len(set(covered)) and set(covered) == busy
    put_off = sum(end - start for kind, start, end in rows if kind is WEIGHT)
    assert sum(end - start for kind, start, end in made if kind is WEIGHT) == put_off
