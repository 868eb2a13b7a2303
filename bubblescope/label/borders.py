"""Where messages lie between the kernels of a step: the borders of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bubblescope.algebra import intervals
from bubblescope.label.evidence import Int, Mask
from bubblescope.model import Kind, Lane, Run


@dataclass(frozen=True)
class Border:
    """A message between rows `position` - 1 and `position` of its step, at time `when`."""

    position: int
    when: int
    sends: bool
    row: int


@dataclass(frozen=True, eq=False)
class Borders:
    """at: when the host issued each row. ordered_by_host: rows for which that is known."""

    run: Run
    at: Int
    ordered_by_host: Mask

    def of_rank(self, rank: int) -> list[tuple[int, Int, list[Border]]]:
        """(step, its unlabelled compute rows in order, the messages between them) of every step of `rank`."""
        spans = self.run.spans
        none = np.empty(0, dtype=np.int64)
        work, talk = (rows.get(rank, none) for rows in self._by_rank)
        posts_of = {step: talk[picked] for step, picked in intervals.rows_by(spans.step[talk])}
        out = []
        for step, picked in intervals.rows_by(spans.step[work]):
            if step < 0:
                continue
            rows, posts = work[picked], posts_of.get(step, talk[:0])
            by_host = bool(self.ordered_by_host[rows].all() and self.ordered_by_host[posts].all())
            rows = rows[np.argsort(self.at[rows] if by_host else spans.start_ns[rows], kind="stable")]
            out.append((step, rows, self._between(rows, posts, by_host)))
        return out

    @cached_property
    def _by_rank(self) -> tuple[dict[int, Int], dict[int, Int]]:
        """Unlabelled compute rows of each rank, and its messages."""
        spans = self.run.spans
        work = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.kind == Kind.OTHER))
        talk = np.flatnonzero(np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST)))
        of_work, of_talk = (
            {rank: rows[picked] for rank, picked in intervals.rows_by(spans.rank[rows])} for rows in (work, talk)
        )
        return of_work, of_talk

    def _between(self, rows: Int, posts: Int, by_host: bool) -> list[Border]:
        spans = self.run.spans
        arrival = self._arrivals(posts)
        out = []
        for i, row in enumerate(posts.tolist()):
            sends = bool(spans.kind[row] == Kind.SEND)
            if self.run.source.timing != "kernels":
                when = int(spans.start_ns[row]) if sends else int(arrival[i])
                position = int(np.searchsorted(spans.start_ns[rows], when))
            elif by_host:
                # The host issues a receive before what needs it, and a send after what made it.
                when = int(self.at[row])
                position = int(np.searchsorted(self.at[rows], when))
            else:
                # Stamps are rounded, and streams start a little apart: a kernel is before a moment if its middle is.
                when = int(spans.start_ns[row] if sends else spans.end_ns[row])
                middle = (spans.start_ns[rows] + spans.end_ns[rows]) // 2
                position = int(np.searchsorted(np.maximum.accumulate(middle), when))
            out.append(Border(position, when, sends, row))
        # At one place a send belongs to what was before it, a receive to what comes after.
        return sorted(out, key=lambda b: (b.position, not b.sends, b.when))

    def _arrivals(self, posts: Int) -> Int:
        """When each message had arrived: the end of the kernel, or of the wait that belongs to the post."""
        spans = self.run.spans
        ends = spans.end_ns[posts].copy()
        if self._waited_until:
            for i, row in enumerate(posts.tolist()):
                ends[i] = self._waited_until.get((int(spans.rank[row]), int(spans.corr[row])), int(ends[i]))
        return ends

    @cached_property
    def _waited_until(self) -> dict[tuple[int, int], int]:
        """(rank, post's number) -> when the wait for it ended."""
        spans = self.run.spans
        waits = np.flatnonzero((spans.lane == Lane.WAIT) & (spans.corr >= 0))
        columns = (spans.rank[waits].tolist(), spans.corr[waits].tolist(), spans.end_ns[waits].tolist())
        return {(rank, corr): end for rank, corr, end in zip(*columns, strict=True)}
