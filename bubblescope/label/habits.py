"""What forwards and backwards look like, learned from rows that surely are one, and where one meets the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bubblescope.label.evidence import Int
from bubblescope.model import Run

F, B = 1, -1
"""Forward and backward, so that one is minus the other."""
_FAR = 3.0
"""So many times more frequent in one of them, a name tells it from the other."""


@dataclass(eq=False)
class _Seen:
    """How many kernels operations had, and how long they were."""

    kernels: dict[int, list[int]] = field(default_factory=lambda: {F: [], B: []})
    times: dict[int, list[int]] = field(default_factory=lambda: {F: [], B: []})
    _typical: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def typical(self, sense: int) -> tuple[float, float]:
        """(kernels, ns) of an operation; (0, 0) when none was seen."""
        seen = (sense, len(self.kernels[sense]))
        if seen not in self._typical:
            lists = (self.kernels[sense], self.times[sense])
            self._typical[seen] = (float(np.median(lists[0])), float(np.median(lists[1]))) if seen[1] else (0.0, 0.0)
        return self._typical[seen]


@dataclass(eq=False)
class Habits:
    """names: how often a kernel name is in F and in B, over all ranks. sense: per row, see `backward_evidence`."""

    run: Run
    sense: NDArray[np.int8]
    names: dict[int, Counter[int]] = field(default_factory=lambda: {F: Counter(), B: Counter()})
    _all: _Seen = field(default_factory=_Seen)
    _own: dict[int, _Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._length = self.run.spans.duration_ns

    def learn(self, rank: int, kind: int, rows: Int) -> None:
        """`rows` are one operation of `kind` (F or B)."""
        self.names[kind].update(self.run.spans.name[rows].tolist())
        for seen in (self._all, self._own.setdefault(rank, _Seen())):
            seen.kernels[kind].append(len(rows))
            seen.times[kind].append(int(self._length[rows].sum()))

    def typical_kernels(self, rank: int, kind: int) -> int:
        """Kernels of an operation on `rank`, 0 when none was seen there."""
        return int(self._own.get(rank, self._all).typical(kind)[0])

    def telling(self) -> Int:
        """Per name F or B where it is far more frequent in operations of that kind, and among their kernels, else 0."""
        seen = self._all.kernels
        out = np.zeros(len(self.run.names), dtype=np.int64)
        if seen[F] and seen[B]:
            each, part = len(seen[F]) / len(seen[B]), sum(seen[F]) / sum(seen[B])
            for name in self.names[F].keys() | self.names[B].keys():
                one, two = self.names[F][name], self.names[B][name]
                out[name] = F if one > _FAR * max(each, part) * two else B if one * _FAR < min(each, part) * two else 0
        return out

    def split(self, rows: Int, first: int, rank: int) -> int:
        """Where in `rows` the first of two operations ends: by autograd, else by the most likely place."""
        strong = np.flatnonzero(self.sense[rows] < 0)
        if len(strong):
            return int(strong[0]) if first == F else int(strong[-1]) + 1
        if len(rows) < 2:
            return len(rows)
        cost = self._name_cost(rows, first)
        seen = self._own.get(rank)
        if seen is None or not (seen.kernels[first] or seen.kernels[-first]):
            seen = self._all
        places = np.arange(1, len(rows))
        kernels = np.array([seen.typical(first)[0], seen.typical(-first)[0]])
        total = kernels.sum()
        if total > 0:
            expected = kernels[0] / total if kernels.all() else 0.0
            if kernels.all():
                cost += 4.0 * np.abs(places / len(rows) - expected)
            else:
                known = 0 if kernels[0] else 1
                count = places if known == 0 else len(rows) - places
                cost += 4.0 * np.abs(count - kernels[known]) / kernels[known]
        times = np.array([seen.typical(first)[1], seen.typical(-first)[1]])
        if times.all():
            done = np.cumsum(self._length[rows])
            cost += np.abs(done[:-1] / max(int(done[-1]), 1) - times[0] / times.sum())
        return int(places[np.argmin(cost)])

    def _name_cost(self, rows: Int, first: int) -> NDArray[np.float64]:
        """Minus log likelihood, per split place, that the names before it are of `first` and the rest are not."""
        names = self.run.spans.name[rows].tolist()
        one, two = self.names[first], self.names[-first]
        all_one, all_two = sum(one.values()) + 1.0, sum(two.values()) + 1.0
        gain = np.array([np.log((one[n] + 0.5) / all_one) - np.log((two[n] + 0.5) / all_two) for n in names])
        ahead = np.cumsum(gain)[:-1]
        result: NDArray[np.float64] = -(ahead - (gain.sum() - ahead)) / 2
        return result
