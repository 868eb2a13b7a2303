"""Statistics: equal to NumPy's on every group, repeatable, and nan where there is nothing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bubblescope.algebra import stats

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(FLOATS, st.integers(0, 4)), max_size=40))
def test_grouped_medians_and_means_equal_numpy_on_each_group(pairs: list[tuple[float, int]]) -> None:
    values = np.array([v for v, _ in pairs])
    group = np.array([g for _, g in pairs], dtype=int)
    medians, means = stats.median_by(values, group, 5), stats.mean_by(values, group, 5)
    for g in range(5):
        mine = values[group == g]
        if len(mine):
            assert math.isclose(medians[g], np.median(mine), abs_tol=1e-9)
            assert math.isclose(means[g], mine.mean(), abs_tol=1e-6)
        else:
            assert math.isnan(medians[g])
            assert math.isnan(means[g])


@given(hnp.arrays(np.float64, (4, 5), elements=FLOATS), hnp.arrays(np.bool_, (4, 5)), st.sampled_from([0, 1, -1]))
def test_masked_median_and_mean_equal_numpy_on_the_chosen_values(
    values: np.ndarray, mask: np.ndarray, axis: int
) -> None:
    got = stats.masked_median(values, mask, axis), stats.masked_mean(values, mask, axis)
    rows, masks = np.moveaxis(values, axis, -1), np.moveaxis(mask, axis, -1)
    for i, (row, use) in enumerate(zip(rows, masks, strict=True)):
        if use.any():
            assert math.isclose(got[0][i], np.median(row[use]), abs_tol=1e-9)
            assert math.isclose(got[1][i], row[use].mean(), abs_tol=1e-6)
        else:
            assert math.isnan(got[0][i])
            assert math.isnan(got[1][i])


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=2, max_size=30))
def test_pearson_equals_numpy_wherever_both_sides_vary(pairs: list[tuple[float, float]]) -> None:
    x, y = np.array(pairs).T
    if x.std() > 1e-3 and y.std() > 1e-3:
        assert math.isclose(stats.pearson(x, y), np.corrcoef(x, y)[0, 1], abs_tol=1e-9)


@given(st.lists(FLOATS, min_size=1, max_size=30))
def test_a_bootstrap_interval_is_repeatable_and_lies_within_the_sample(values: list[float]) -> None:
    first = stats.bootstrap(values, draws=200)
    assert first == stats.bootstrap(values, draws=200)
    assert min(values) <= first.low <= first.high <= max(values)


def test_the_interval_of_a_mean_has_about_the_width_that_theory_gives() -> None:
    sample = np.random.default_rng(1).normal(10, 2, 400)
    interval = stats.bootstrap(sample, stats.row_mean)
    assert math.isclose(interval.high - interval.low, 2 * 1.96 * sample.std() / 20, rel_tol=0.1)


def test_a_difference_that_is_there_excludes_zero_and_one_that_is_not_includes_it() -> None:
    random = np.random.default_rng(2)
    before, same, slower = random.normal(10, 1, 50), random.normal(10, 1, 50), random.normal(12, 1, 50)
    assert stats.bootstrap_difference(before, slower).low > 1
    assert stats.bootstrap_difference(before, same).low < 0 < stats.bootstrap_difference(before, same).high


def test_nothing_gives_nan_and_never_zero() -> None:
    assert all(map(math.isnan, stats.bootstrap([])))
    assert all(map(math.isnan, stats.bootstrap_difference([], [1.0])))
    assert all(map(math.isnan, (stats.median([]), stats.mean([]), stats.pearson([1.0], [1.0]))))
    assert np.isnan(stats.masked_median(np.empty((3, 0)), np.empty((3, 0), dtype=bool))).tolist() == [True] * 3
