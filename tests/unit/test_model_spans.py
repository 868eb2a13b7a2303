"""Spans are columns of equal length with fixed types; every way to make them says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from bubblescope.model import Kind, Lane, SpanBuilder, Spans
from bubblescope.model.spans import COLUMNS, DEFAULTS


def three() -> Spans:
    return Spans.from_columns(
        3,
        rank=np.array([1, 0, 0]),
        start_ns=np.array([5, 9, 2]),
        end_ns=np.array([7, 12, 4]),
        kind=np.array([Kind.FORWARD, Kind.BACKWARD, Kind.FORWARD]),
        microbatch=np.array([0, 1, 2]),
    )


def test_a_missing_column_takes_its_default_in_every_row() -> None:
    spans = three()
    assert set(spans.peer) == {-1}
    assert set(spans.lane) == {Lane.COMPUTE}
    assert DEFAULTS.keys() == set(COLUMNS)


def test_columns_have_the_documented_types_whatever_was_passed() -> None:
    spans = Spans.from_columns(1, start_ns=[1.0], rank=np.array([3], dtype=np.uint8))
    assert spans.start_ns.dtype == np.int64
    assert spans.rank.dtype == np.int32
    assert spans.lane.dtype == np.int8


def test_a_time_of_day_in_nanoseconds_survives_exactly() -> None:
    moment = 1_790_000_000_123_456_789
    assert int(Spans.from_columns(1, start_ns=np.array([moment])).start_ns[0]) == moment


def test_a_column_of_another_length_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="end_ns has 2 rows, not 3"):
        Spans.from_columns(3, end_ns=np.array([1, 2]))


def test_an_unknown_column_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="colour"):
        Spans.from_columns(1, colour=1)
    with pytest.raises(TypeError, match="colour"):
        SpanBuilder().add(colour=1)


def test_duration_is_end_minus_start() -> None:
    assert three().duration_ns.tolist() == [2, 3, 2]


def test_sorted_is_by_rank_then_start_and_keeps_the_rows_whole() -> None:
    spans = three().sorted()
    assert spans.rank.tolist() == [0, 0, 1]
    assert spans.start_ns.tolist() == [2, 9, 5]
    assert spans.microbatch.tolist() == [2, 1, 0]


def test_sorted_keeps_the_written_order_of_equal_rows() -> None:
    spans = Spans.from_columns(3, microbatch=np.array([2, 0, 1])).sorted()
    assert spans.microbatch.tolist() == [2, 0, 1]


def test_take_accepts_masks_positions_and_slices() -> None:
    spans = three()
    assert spans.take(spans.where(rank=0)).start_ns.tolist() == [9, 2]
    assert spans.take(np.array([2, 0])).start_ns.tolist() == [2, 5]
    assert len(spans.take(slice(0, 1))) == 1


def test_where_means_all_conditions_and_any_of_several_values() -> None:
    spans = three()
    assert spans.where(rank=0, kind=Kind.FORWARD).tolist() == [False, False, True]
    assert spans.where(kind=(Kind.FORWARD, Kind.BACKWARD)).all()
    assert not spans.where(kind=()).any()


def test_with_columns_replaces_in_a_copy_only() -> None:
    spans = three()
    moved = spans.with_columns(start_ns=spans.start_ns + 1)
    assert moved.start_ns.tolist() == [6, 10, 3]
    assert spans.start_ns.tolist() == [5, 9, 2]


def test_concat_keeps_all_rows_in_order_and_nothing_gives_an_empty_table() -> None:
    both = Spans.concat([three(), Spans.empty(), three()])
    assert both.start_ns.tolist() == [5, 9, 2, 5, 9, 2]
    assert len(Spans.concat([])) == 0
    assert len(Spans.concat([Spans.empty(), Spans.empty()])) == 0
    assert Spans.concat([]).start_ns.dtype == np.int64


def test_a_builder_gives_the_same_spans_as_columns() -> None:
    builder = SpanBuilder()
    for row in three().rows():
        builder.add(**row)
    assert list(builder.build().rows()) == list(three().rows())
    assert len(builder) == 3
