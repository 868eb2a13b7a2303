"""How far the hosts' clocks can be trusted against each other (ATTRIBUTION.md §4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostClock:
    """Correction of one host against the reference host, already applied to `Run.spans`.

    offset_ns: what was added. drift: seconds per second. low_ns, high_ns: the interval in which the true
    offset lies; None when nothing bounds it.
    """

    host: str
    offset_ns: int = 0
    drift: float = 0.0
    low_ns: int | None = None
    high_ns: int | None = None


@dataclass(frozen=True)
class Clock:
    """`aligned`: whether times of different ranks may be compared at all."""

    hosts: tuple[HostClock, ...] = ()
    aligned: bool = False
    how: str = ""

    @property
    def half_width_ns(self) -> int | None:
        """Largest half-width over the hosts; None when some host has no bound."""
        widths = [
            (h.high_ns - h.low_ns + 1) // 2 if h.low_ns is not None and h.high_ns is not None else None
            for h in self.hosts
        ]
        known = [w for w in widths if w is not None]
        return max(known, default=0) if len(known) == len(widths) else None
