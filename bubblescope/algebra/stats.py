"""Small statistics that say what they do with nothing: the answer for no values is nan, never 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]
Statistic = Callable[[Float], Any]
"""Reduces the last axis, for example `row_median` or `row_mean`."""


def quantile(values: ArrayLike, q: float) -> float:
    """Quantile `q` in 0..1 by linear interpolation; nan for no values.

    >>> quantile([4.0, 1.0, 2.0], 0.5), quantile([], 0.5)
    (2.0, nan)
    """
    array = np.asarray(values, dtype=np.float64)
    return float(np.quantile(array, q)) if array.size else float("nan")


def median(values: ArrayLike) -> float:
    """The middle value; nan for no values.

    >>> median([4.0, 1.0, 2.0, 3.0])
    2.5
    """
    return quantile(values, 0.5)


def mean(values: ArrayLike) -> float:
    """The arithmetic mean; nan for no values."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else float("nan")


def row_median(values: Float) -> Float:
    """Median over the last axis."""
    return np.asarray(np.median(values, axis=-1), dtype=np.float64)


def row_mean(values: Float) -> Float:
    """Mean over the last axis."""
    return np.asarray(values.mean(axis=-1), dtype=np.float64)


def masked_median(values: ArrayLike, mask: ArrayLike, axis: int = -1) -> Float:
    """Median over `axis` of the values where `mask` is true; nan where none is.

    >>> masked_median([[1.0, 9.0, 3.0], [4.0, 5.0, 6.0]], [[True, False, True], [False, False, False]]).tolist()
    [2.0, nan]
    """
    array = np.asarray(values, dtype=np.float64)
    use = np.broadcast_to(np.asarray(mask, dtype=np.bool_), array.shape)
    count = use.sum(axis=axis, keepdims=True)
    ordered = np.sort(np.where(use, array, np.inf), axis=axis)
    size = array.shape[axis]
    if not size:
        return np.full(np.delete(np.array(array.shape), axis), np.nan)
    low = np.take_along_axis(ordered, np.clip((count - 1) // 2, 0, size - 1), axis=axis)
    high = np.take_along_axis(ordered, np.clip(count // 2, 0, size - 1), axis=axis)
    with np.errstate(invalid="ignore"):
        middle = np.where(count > 0, (low + high) / 2, np.nan)
    return np.asarray(middle.squeeze(axis), dtype=np.float64)


def masked_mean(values: ArrayLike, mask: ArrayLike, axis: int = -1) -> Float:
    """Mean over `axis` of the values where `mask` is true; nan where none is.

    >>> masked_mean([[1.0, 9.0, 3.0]], [[True, False, True]]).tolist()
    [2.0]
    """
    array = np.asarray(values, dtype=np.float64)
    use = np.broadcast_to(np.asarray(mask, dtype=np.bool_), array.shape)
    count = use.sum(axis=axis)
    total = np.where(use, array, 0.0).sum(axis=axis)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan), dtype=np.float64)


def median_by(values: ArrayLike, group: ArrayLike, n_groups: int) -> Float:
    """Median of the values of each group 0..n_groups-1, shape (n_groups,); nan for an empty group.

    >>> median_by([5.0, 1.0, 2.0, 3.0], [0, 2, 2, 0], 3).tolist()
    [4.0, nan, 1.5]
    """
    array, label = np.asarray(values, dtype=np.float64), np.asarray(group, dtype=np.int64)
    ordered = array[np.lexsort((array, label))]
    count = np.bincount(label, minlength=n_groups)
    first = np.cumsum(count) - count
    result = np.full(n_groups, np.nan)
    some = count > 0
    low, high = (first + (count - 1) // 2)[some], (first + count // 2)[some]
    result[some] = (ordered[low] + ordered[high]) / 2
    return result


def mean_by(values: ArrayLike, group: ArrayLike, n_groups: int) -> Float:
    """Mean of the values of each group 0..n_groups-1, shape (n_groups,); nan for an empty group.

    >>> mean_by([5.0, 1.0, 2.0, 3.0], [0, 2, 2, 0], 3).tolist()
    [4.0, nan, 1.5]
    """
    label = np.asarray(group, dtype=np.int64)
    count = np.bincount(label, minlength=n_groups)
    total = np.bincount(label, weights=np.asarray(values, dtype=np.float64), minlength=n_groups)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def count_distinct(groups: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each group, ascending, and how many different values it has.

    >>> [column.tolist() for column in count_distinct(np.array([7, 7, 7, 3]), np.array([1, 1, 2, 1]))]
    [[3, 7], [1, 2]]
    """
    pairs = np.stack([groups, values])
    # Where neighbours are often equal, most of the sorting is saved.
    new = np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))[: len(groups)]
    pairs = pairs[:, new]
    pairs = pairs[:, np.lexsort(pairs[::-1])]
    different = np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))[: pairs.shape[1]]
    found, counts = np.unique(pairs[0, different], return_counts=True)
    return found, counts


def usual(values: NDArray[np.int64]) -> int:
    """The most frequent value, of equally frequent ones the largest.

    >>> usual(np.array([4, 8, 8, 4, 2]))
    8
    """
    count = Counter(values.tolist())
    return int(max(count, key=lambda value: (count[value], value)))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation; nan for fewer than two pairs, or where one side does not vary.

    >>> round(pearson([1.0, 2.0, 3.0], [2.0, 4.0, 7.0]), 4), pearson([1.0, 1.0], [1.0, 2.0])
    (0.9934, nan)
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 2 or len(a) != len(b):
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(np.clip((a @ b) / scale, -1.0, 1.0)) if scale > 0 else float("nan")


class Interval(NamedTuple):
    """An estimate with a confidence interval."""

    value: float
    low: float
    high: float


def bootstrap(
    values: ArrayLike,
    statistic: Statistic = row_median,
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap (Efron 1979) of a statistic of one sample. The seed is fixed: same input, same answer.

    One value has an interval of no width; no values give nan.

    >>> bootstrap([1.0, 2.0, 3.0, 4.0, 5.0])
    Interval(value=3.0, low=1.0, high=5.0)
    """
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        return Interval(float("nan"), float("nan"), float("nan"))
    again = _resample(sample, statistic, draws, np.random.default_rng(seed))
    return _interval(float(statistic(sample)), again, level)


def bootstrap_difference(
    before: ArrayLike,
    after: ArrayLike,
    statistic: Statistic = row_median,
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of statistic(after) - statistic(before), for two independent samples.

    >>> bootstrap_difference([1.0, 1.0, 1.0], [3.0, 3.0])
    Interval(value=2.0, low=2.0, high=2.0)
    """
    old, new = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not old.size or not new.size:
        return Interval(float("nan"), float("nan"), float("nan"))
    random = np.random.default_rng(seed)
    again = _resample(new, statistic, draws, random) - _resample(old, statistic, draws, random)
    return _interval(float(statistic(new)) - float(statistic(old)), again, level)


def _resample(sample: Float, statistic: Statistic, draws: int, random: np.random.Generator) -> Float:
    picks = random.integers(0, len(sample), size=(draws, len(sample)))
    return np.asarray(statistic(sample[picks]), dtype=np.float64)


def _interval(value: float, again: Float, level: float) -> Interval:
    tail = (1.0 - level) / 2
    return Interval(value, quantile(again, tail), quantile(again, 1.0 - tail))
