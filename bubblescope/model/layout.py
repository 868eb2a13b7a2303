"""Who is who: ranks, stages, replicas, hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


def _none() -> Int:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """The job's shape. Scalars are None when not known; `inferred` says how each inferred one was found.

    ranks: shape (r,), the ranks seen, ascending. pp, replica, tp: shape (r,), beside `ranks`: position in the
    pipeline 0..p-1, number of the data-parallel pipeline, tensor-parallel position; -1 unknown.
    host: shape (r,), index into `Run.names`. stages: GPUs in one pipeline (p). chunks: virtual stages per GPU (v).
    microbatches: per optimizer step (m). schedule: a name of CONTRACT.md, or None. device_type: "cuda", "cpu", …
    stage_rank: {(replica, global stage): rank}.
    """

    ranks: Int = field(default_factory=_none)
    pp: Int = field(default_factory=_none)
    replica: Int = field(default_factory=_none)
    tp: Int = field(default_factory=_none)
    host: Int = field(default_factory=_none)
    world_size: int | None = None
    stages: int | None = None
    chunks: int | None = None
    microbatches: int | None = None
    data_parallel: int | None = None
    schedule: str | None = None
    framework: str | None = None
    device_type: str | None = None
    stage_rank: dict[tuple[int, int], int] = field(default_factory=dict)
    inferred: dict[str, str] = field(default_factory=dict)

    def index_of(self, rank: int) -> int:
        """Row of `rank` in the per-rank columns. Raises KeyError when it was not seen."""
        i = int(np.searchsorted(self.ranks, rank))
        if i >= len(self.ranks) or self.ranks[i] != rank:
            raise KeyError(rank)
        return i

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that the world size promises and no file showed; where it is not known, those between the seen ones.

        >>> Layout(ranks=np.array([1, 3])).missing_ranks, Layout(ranks=np.array([1, 3]), world_size=5).missing_ranks
        ([2], [0, 2, 4])
        """
        seen = {int(r) for r in self.ranks}
        between = range(min(seen, default=0), max(seen, default=0))
        return sorted(set(between if self.world_size is None else range(self.world_size)) - seen)
