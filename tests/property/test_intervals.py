"""Interval algebra against a set of points, which cannot be wrong."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.algebra import intervals
from bubblescope.algebra.intervals import Set

RAW = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=12)


def points(raw: list[tuple[int, int]]) -> set[int]:
    return {x for a, b in raw for x in range(a, b)}


def made(raw: list[tuple[int, int]]) -> Set:
    return intervals.union([a for a, _ in raw], [b for _, b in raw])


def covered(a: Set) -> set[int]:
    return points(list(zip(a[0].tolist(), a[1].tolist(), strict=True)))


def is_proper(a: Set) -> bool:
    """Sorted, non-empty, disjoint, and never touching."""
    return bool((a[1] > a[0]).all() and (a[0][1:] > a[1][:-1]).all())


@given(RAW)
def test_a_union_covers_the_points_of_its_parts_in_proper_form(raw: list[tuple[int, int]]) -> None:
    assert is_proper(made(raw))
    assert covered(made(raw)) == points(raw)
    assert intervals.total(made(raw)) == len(points(raw))


@given(st.lists(RAW, max_size=4))
def test_merge_is_the_union_of_all(raws: list[list[tuple[int, int]]]) -> None:
    merged = intervals.merge([made(raw) for raw in raws])
    assert is_proper(merged)
    assert covered(merged) == set().union(*map(points, raws))


@given(RAW, RAW)
def test_intersect_and_subtract_are_those_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    both, rest = intervals.intersect(made(a), made(b)), intervals.subtract(made(a), made(b))
    assert is_proper(both)
    assert is_proper(rest)
    assert covered(both) == points(a) & points(b)
    assert covered(rest) == points(a) - points(b)


@given(RAW, st.lists(RAW, max_size=3))
def test_subtract_takes_away_all_that_is_given(raw: list[tuple[int, int]], others: list[list[tuple[int, int]]]) -> None:
    rest = intervals.subtract(made(raw), *map(made, others))
    assert is_proper(rest)
    assert covered(rest) == points(raw) - set().union(*map(points, others))


@given(RAW, st.integers(-25, 25), st.integers(-25, 25))
def test_clip_and_complement_share_out_the_window(raw: list[tuple[int, int]], low: int, high: int) -> None:
    window = set(range(low, high))
    inside, gaps = intervals.clip(made(raw), low, high), intervals.complement(made(raw), low, high)
    assert is_proper(inside)
    assert is_proper(gaps)
    assert covered(inside) == points(raw) & window
    assert covered(gaps) == window - points(raw)


@given(RAW, st.lists(st.integers(-25, 25), max_size=8))
def test_measure_before_counts_the_points_on_the_left(raw: list[tuple[int, int]], at: list[int]) -> None:
    got = intervals.measure_before(made(raw), np.array(at, dtype=np.int64))
    assert got.tolist() == [len({x for x in points(raw) if x < y}) for y in at]


def test_clipping_what_lies_inside_copies_nothing_and_cutting_changes_no_original() -> None:
    whole = made([(0, 3), (5, 9)])
    inside = intervals.clip(whole, 0, 9)
    assert np.shares_memory(inside[0], whole[0])
    assert covered(intervals.clip(whole, 1, 7)) == {1, 2, 5, 6}
    assert covered(whole) == {0, 1, 2, 5, 6, 7, 8}


@given(st.lists(st.integers(-3, 3), max_size=12), st.booleans())
def test_rows_by_shares_out_all_rows_in_order(keys: list[int], in_order: bool) -> None:
    key = np.array(sorted(keys) if in_order else keys, dtype=np.int16)
    found = {k: rows.tolist() for k, rows in intervals.rows_by(key)}
    assert found == {k: [i for i, x in enumerate(key.tolist()) if x == k] for k in sorted(set(keys))}
    assert list(found) == sorted(found)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=12))
def test_split_by_gives_each_value_its_rows(cells: list[tuple[int, bool]]) -> None:
    key, chosen = np.array([k for k, _ in cells], dtype=np.int32), np.flatnonzero([c for _, c in cells])
    found = {value: rows.tolist() for value, rows in intervals.split_by(chosen, key).items()}
    assert found == {v: [i for i in chosen.tolist() if key[i] == v] for v in sorted(set(key[chosen].tolist()))}
