"""`Run`: all that was measured, nothing concluded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.model.clock import Clock
from bubblescope.model.layout import Layout
from bubblescope.model.links import Links
from bubblescope.model.names import Names
from bubblescope.model.notice import Notice, counted
from bubblescope.model.spans import Spans


@dataclass(frozen=True)
class Source:
    """Where it came from. `format`: "recording", "kineto", "nsys", …; `timing`: what the spans' times are:
    "kernels" (device kernels), "events" (recorded CUDA events), "host" (a CPU rank's own clock)."""

    format: str = ""
    files: tuple[str, ...] = ()
    timing: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Run:
    """One job, or the part of it that was seen. Immutable; passes return a new one."""

    spans: Spans
    names: Names
    layout: Layout = field(default_factory=Layout)
    links: Links = field(default_factory=Links)
    clock: Clock = field(default_factory=Clock)
    notices: tuple[Notice, ...] = ()
    source: Source = field(default_factory=Source)

    def with_notices(self, *new: Notice) -> Run:
        return replace(self, notices=(*self.notices, *new))

    @classmethod
    def empty(cls) -> Run:
        return cls(spans=Spans.empty(), names=Names())

    def clock_part(self, rank: NDArray[np.integer]) -> NDArray[np.int64]:
        """The clock of each rank: times of ranks with the same number may be compared."""
        layout = self.layout
        if self.clock.aligned:
            return np.zeros(len(rank), dtype=np.int64)
        named = {h.host: part for h, part in zip(self.clock.hosts, self.clock.parts, strict=True)}
        of_rank = {
            r: named.get(self.names[h], len(named) + h)
            for r, h in zip(layout.ranks.tolist(), layout.host.tolist(), strict=False)
        }
        used, where = np.unique(rank, return_inverse=True)
        parts = np.array([of_rank.get(r, -1 - r) for r in used.tolist()], dtype=np.int64)
        result: NDArray[np.int64] = parts[where.reshape(-1)]
        return result

    def __repr__(self) -> str:
        return f"Run({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        """For notebooks: the same facts, and every notice."""
        notices = "".join(f"<li><code>{escape(n.code)}</code> {escape(n.message)}</li>" for n in self.notices)
        found = f"<ul>{notices}</ul>" if notices else ""
        return f"<p><b>Run</b>: {escape(', '.join(self._facts()))}</p>{found}"

    def _facts(self) -> list[str]:
        steps = np.unique(self.spans.step[self.spans.step >= 0])
        return [
            counted(len(self.ranks), "rank"),
            counted(len(steps), "step"),
            counted(len(self.spans), "span"),
            self.layout.schedule or "schedule not known",
            self.source.format or "no source",
            counted(len(self.notices), "notice"),
        ]

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks that have spans, ascending."""
        return [int(r) for r in np.unique(self.spans.rank)]
