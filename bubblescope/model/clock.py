"""How far the hosts' clocks can be trusted against each other (ATTRIBUTION.md §4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostClock:
    """Correction of one host against the reference host, already applied to `Run.spans`.

    offset_ns: what was added. drift: seconds per second. low_ns, high_ns: the interval in which the true
    offset lies; None when nothing bounds it. part: hosts with the same number were put on one clock, that of the first
    of them; -1 alone.
    """

    host: str
    offset_ns: int = 0
    drift: float = 0.0
    low_ns: int | None = None
    high_ns: int | None = None
    part: int = -1


@dataclass(frozen=True)
class Clock:
    """`aligned`: whether times of all ranks may be compared. If not, those of hosts of one part may be."""

    hosts: tuple[HostClock, ...] = ()
    aligned: bool = False
    how: str = ""

    @property
    def parts(self) -> tuple[int, ...]:
        """Beside `hosts`: those with the same number are on one clock.

        >>> Clock((HostClock("a"), HostClock("b", part=1), HostClock("c", part=1))).parts
        (0, 1, 1)
        """
        return tuple(0 if self.aligned else i if h.part < 0 else h.part for i, h in enumerate(self.hosts))

    @property
    def half_width_ns(self) -> int | None:
        """Largest half-width over the hosts; None when some host has no bound."""
        widths = [
            (h.high_ns - h.low_ns + 1) // 2 if h.low_ns is not None and h.high_ns is not None else None
            for h in self.hosts
        ]
        known = [w for w in widths if w is not None]
        return max(known, default=0) if len(known) == len(widths) else None
