"""Where the steps of one rank are: ProfilerStep ranges, else the optimizer, else the period of the kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

STEP_NAME = re.compile(r"ProfilerStep#?\s*(\d{1,9})|iter_\d{1,7}_(\d{1,9})\Z")
"""torch's profiler, and the zero-bubble schedules' ``iter_{rank}_{step}``."""
OPTIMIZER_RANGE = re.compile(r"Optimizer\.step#")
OPTIMIZER_KERNEL = re.compile(
    r"multi_tensor_apply|fused_?adam|adamw?_|_adam|\bsgd|lamb(?!da)|adagrad|FusedOptimizer", re.IGNORECASE
)
"""Names of optimizer kernels. Half of torch's elementwise kernels have a ``{lambda()#1}`` in theirs."""
MARKS = ("ProfilerStep", "the user's names")
"""Of `Steps.how`, those by which a step has the same number on every rank."""
_LONGEST_PERIOD = 20_000
_FEW_PLACES = 1 << 10
_MOST_PLACES = 1 << 15


@dataclass(frozen=True, eq=False)
class Steps:
    """Windows of one rank, ascending; `on_host`: their limits are host times (launches), else device times.

    how: one of `MARKS`, "optimizer", "optimizer kernels", "period" or "whole trace".
    """

    index: Int
    start_ns: Int
    end_ns: Int
    how: str
    on_host: bool

    def __len__(self) -> int:
        return len(self.index)

    def of(self, at_ns: Int, launched: NDArray[np.bool_]) -> Int:
        """The step of each time; -1 outside. `launched`: the time is a launch (host) time.

        A device time may lie past the host end of the last step, since kernels run late; half a step is
        allowed for that. Between two steps the earlier one is meant.
        """
        if len(self) == 0:
            return np.full(len(at_ns), -1, dtype=np.int64)
        row = np.searchsorted(self.start_ns, at_ns, side="right") - 1
        inside = row >= 0
        row = np.maximum(row, 0)
        last = row == len(self) - 1
        late = np.where(launched == self.on_host, 0, (self.end_ns - self.start_ns)[row] // 2)
        inside &= ~last | (at_ns < self.end_ns[row] + late)
        return np.where(inside, self.index[row], -1).astype(np.int64)


def from_profiler(index: Int, start: Int, end: Int) -> Steps | None:
    """ProfilerStep ranges; zero-length ones and the longer of two with one number are left out."""
    keep = end > start
    index, start, end = index[keep], start[keep], end[keep]
    order = np.lexsort((end, start))
    index, start, end = index[order], start[order], end[order]
    _, first = np.unique(index, return_index=True)
    first.sort()
    if len(first) == 0:
        return None
    return Steps(index[first], start[first], end[first], "ProfilerStep", on_host=True)


def from_boundaries(ends: Int, first: int, how: str, *, on_host: bool) -> Steps | None:
    """Steps that end where an optimizer does. `first`: where the first one begins."""
    ends = np.unique(ends)
    ends = ends[ends > first]
    if len(ends) == 0:
        return None
    starts = np.concatenate(([first], ends[:-1])).astype(np.int64)
    return Steps(np.arange(len(ends), dtype=np.int64), starts, ends, how, on_host=on_host)


def optimizer_kernel_ends(is_optimizer: NDArray[np.bool_], end: Int) -> Int:
    """End of every run of optimizer kernels, the kernels being in time order."""
    if not is_optimizer.any() or is_optimizer.all():
        return np.empty(0, dtype=np.int64)
    closes = is_optimizer & ~np.append(is_optimizer[1:], False)
    result: Int = end[closes]
    return result


def from_period(codes: Int, start: Int, end: Int) -> Steps | None:
    """Steps as the shortest period of the sequence of kernels (`codes`), where it repeats at least twice.

    >>> at = np.arange(6) * 10
    >>> found = from_period(np.array([1, 2, 3, 1, 2, 3]), at, at + 10)
    >>> found.start_ns.tolist(), found.end_ns.tolist()
    ([0, 30], [30, 60])
    """
    n = len(codes)
    others = np.flatnonzero(codes != codes[0]) if n else codes
    if len(others) == 0:
        return None
    places = _places(n)
    for period in range(max(2, int(others[0]) + 1), min(n // 2, _LONGEST_PERIOD) + 1):
        if codes[0] != codes[period] or codes[n - 1] != codes[n - 1 - period]:
            continue
        if _repeats(codes, period, places):
            at = np.arange(0, n - period + 1, period)
            limits = np.append(start[at], end.max())
            limits[-1] = end[at[-1] : at[-1] + period].max()
            return Steps(np.arange(len(at), dtype=np.int64), limits[:-1], limits[1:], "period", on_host=False)
    return None


def _places(n: int) -> tuple[Int, Int]:
    """Where a sequence of `n` kernels is compared with itself: at a few places, drawn with a fixed seed, and at all of
    them. Of a long sequence these are drawn too, so that twenty thousand periods are tried in seconds."""
    drawn = np.random.default_rng(0)
    few = drawn.integers(0, n, _FEW_PLACES)
    if n <= 4 * _MOST_PLACES:
        return few, np.arange(n)
    return few, drawn.integers(0, n - _LONGEST_PERIOD, _MOST_PLACES)


def _repeats(codes: Int, period: int, places: tuple[Int, Int]) -> bool:
    """Whether nearly all of `places` hold what stands one `period` later. The few tell most periods apart."""
    for some, share in zip(places, (0.9, 0.98), strict=True):
        inside = some[some < len(codes) - period]
        if np.mean(codes[inside] == codes[inside + period]) < share:
            return False
    return True


def whole(start: int, end: int) -> Steps:
    """One step that is everything."""
    one = np.zeros(1, dtype=np.int64)
    return Steps(one, one + start, one + end, "whole trace", on_host=False)
