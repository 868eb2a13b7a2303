"""Sets of half-open integer intervals [start, end), as pairs of int64 arrays.

A *set* is a pair ``(start, end)``, shape (n,) each, sorted, disjoint, non-empty intervals, never touching.
`union` makes one of any intervals; everything else takes and returns sets. All costs are O(n log n) at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int64]
Set = tuple[Int, Int]

EMPTY: Set = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def union(start: ArrayLike, end: ArrayLike) -> Set:
    """The set of all points in any [start_i, end_i); empty and backward intervals add nothing.

    >>> s, e = union([5, 0, 2, 9], [6, 2, 3, 9])
    >>> s.tolist(), e.tolist()
    ([0, 5], [3, 6])
    """
    s = np.asarray(start, dtype=np.int64)
    e = np.asarray(end, dtype=np.int64)
    keep = e > s
    if not keep.all():
        s, e = s[keep], e[keep]
    if len(s) == 0:
        return EMPTY
    if np.any(s[1:] < s[:-1]):
        order = np.argsort(s, kind="stable")
        s, e = s[order], e[order]
    reach = np.maximum.accumulate(e)
    opens = np.empty(len(s), dtype=np.bool_)
    opens[0] = True
    np.greater(s[1:], reach[:-1], out=opens[1:])
    closes = np.append(opens[1:], True)
    return s[opens], reach[closes]


def merge(sets: Sequence[Set]) -> Set:
    """The union of several sets."""
    if not sets:
        return EMPTY
    return union(np.concatenate([s for s, _ in sets]), np.concatenate([e for _, e in sets]))


def total(a: Set) -> int:
    """Length of a set.

    >>> total(union([0, 5], [3, 6]))
    4
    """
    return int((a[1] - a[0]).sum())


def complement(a: Set, low: int, high: int) -> Set:
    """[low, high) without `a`: the gaps.

    >>> s, e = complement(union([2, 5], [3, 6]), 0, 8)
    >>> s.tolist(), e.tolist()
    ([0, 3, 6], [2, 5, 8])
    """
    s, e = clip(a, low, high)
    starts, ends = np.concatenate(([low], e)), np.concatenate((s, [high]))
    # What lies between two intervals of a set is never empty; what lies before or after all may be.
    inner = slice(int(ends[0] <= starts[0]), len(s) + int(ends[-1] > starts[-1]))
    return starts[inner], ends[inner]


def clip(a: Set, low: int, high: int) -> Set:
    """`a` within [low, high): views of it where no interval is cut."""
    i = int(np.searchsorted(a[1], low, side="right"))
    j = int(np.searchsorted(a[0], high, side="left"))
    if j <= i or high <= low:
        return EMPTY
    s, e = a[0][i:j], a[1][i:j]
    if s[0] < low or e[-1] > high:
        s, e = s.copy(), e.copy()
        s[0], e[-1] = max(s[0], low), min(e[-1], high)
    return s, e


def intersect(a: Set, b: Set) -> Set:
    """Points in both sets.

    >>> s, e = intersect(union([0, 5], [4, 9]), union([3], [6]))
    >>> s.tolist(), e.tolist()
    ([3, 5], [4, 6])
    """
    if len(a[0]) == 0 or len(b[0]) == 0:
        return EMPTY
    first = np.searchsorted(b[1], a[0], side="right")
    last = np.searchsorted(b[0], a[1], side="left")
    count = np.maximum(last - first, 0)
    left = np.repeat(np.arange(len(a[0])), count)
    offset = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
    right = first[left] + offset
    return np.maximum(a[0][left], b[0][right]), np.minimum(a[1][left], b[1][right])


def subtract(a: Set, *others: Set) -> Set:
    """Points of `a` that are in none of `others`.

    >>> s, e = subtract(union([0], [10]), union([3], [4]), union([6], [12]))
    >>> s.tolist(), e.tolist()
    ([0, 4], [3, 6])
    """
    for b in others:
        if len(a[0]) and len(b[0]):
            a = intersect(a, complement(b, int(a[0][0]), int(a[1][-1])))
    return a


def measure_before(a: Set, points: ArrayLike) -> Int:
    """For each point x, the length of `a` within (-inf, x); differences give the length in any [x, y).

    >>> measure_before(union([0, 5], [3, 6]), [0, 2, 4, 6]).tolist()
    [0, 2, 3, 4]
    """
    x = np.asarray(points, dtype=np.int64)
    if len(a[0]) == 0:
        return np.zeros(x.shape, dtype=np.int64)
    length = a[1] - a[0]
    done = np.cumsum(length) - length
    i = np.searchsorted(a[0], x, side="right") - 1
    at = np.maximum(i, 0)
    inside = np.minimum(x, a[1][at])
    inside -= a[0][at]
    result: Int = done[at] + np.where(i >= 0, inside, 0)
    return result


def without_gaps(rows: Int) -> Int | slice:
    """Ascending row numbers as a slice where none is left out: then NumPy copies nothing.

    >>> without_gaps(np.array([3, 4, 5])), without_gaps(np.array([3, 5])).tolist()
    (slice(3, 6, None), [3, 5])
    """
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def rows_by(key: NDArray[np.integer]) -> list[tuple[int, Int]]:
    """Row numbers of each distinct key, ascending in both; one sort, however many keys there are, and none of keys in
    order.

    >>> [(k, rows.tolist()) for k, rows in rows_by(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    """
    if len(key) == 0:
        return []
    if np.all(key[1:] >= key[:-1]):
        order = np.arange(len(key))
    else:
        order = np.argsort(key, kind="stable")
        key = key[order]
    begins = np.flatnonzero(key[1:] != key[:-1]) + 1
    return list(zip(key[np.append(0, begins)].tolist(), np.split(order, begins), strict=True))


def split_by(rows: Int, key: NDArray[np.integer]) -> dict[int, Int]:
    """Those of `rows` in which `key`, a column of all rows, has a value: for each value, ascending. One sort in place
    of a mask for each value, whose cost is rows times values.

    >>> {k: rows.tolist() for k, rows in split_by(np.array([0, 1, 3]), np.array([7, 3, 3, 7])).items()}
    {3: [1], 7: [0, 3]}
    """
    return {value: rows[picked] for value, picked in rows_by(key[rows])}
