"""From the readings that a recording's hosts took of rank 0's clock to one time for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

_MAX_DRIFT = 1e-3
_APART_NS = 10_000_000_000
"""Readings closer than this say nothing about drift: their error is larger."""


class Reading(msgspec.Struct, tag="clock", tag_field="kind"):
    """A line of the recording: `bubblescope.capture.hostclocks.Reading`, and when it was taken ("start", "end")."""

    phase: str
    reference: str
    at_ns: int
    offset_ns: int
    half_ns: int


@dataclass(frozen=True)
class Relation:
    """What to add to a host's monotonic time t for the reference host's: offset_ns + drift * (t - at_ns), which is
    wrong by at most half_ns."""

    at_ns: int = 0
    offset_ns: int = 0
    drift: float = 0.0
    half_ns: int = 0

    def at(self, times: Int) -> Int:
        """What to add to each time."""
        moved: Int = self.offset_ns + np.rint((times - self.at_ns) * self.drift).astype(np.int64)
        return moved


def relation(readings: Sequence[Reading]) -> Relation:
    """One host's relation: a line through the readings of start and end, else the best one alone.

    >>> a = Reading("start", "r", 0, 1000, 50)
    >>> b = Reading("end", "r", 100_000_000_000, 3000, 70)
    >>> relation([a, b])
    Relation(at_ns=0, offset_ns=1000, drift=2e-08, half_ns=70)
    """
    best = min(readings, key=lambda reading: reading.half_ns)
    first, last = min(readings, key=lambda r: r.at_ns), max(readings, key=lambda r: r.at_ns)
    apart = last.at_ns - first.at_ns
    drift = (last.offset_ns - first.offset_ns) / apart if apart >= _APART_NS else 0.0
    if not 0 < abs(drift) <= _MAX_DRIFT:
        return Relation(best.at_ns, best.offset_ns, 0.0, best.half_ns)
    return Relation(first.at_ns, first.offset_ns, drift, max(first.half_ns, last.half_ns))


def relations(readings: Mapping[str, Sequence[Reading]]) -> tuple[str, dict[str, Relation]] | None:
    """(reference host, relation of each host) when every host has a reading against the same reference, else None.

    readings: by host key; the reference itself needs none.
    """
    references = {reading.reference for taken in readings.values() for reading in taken}
    if len(references) != 1:
        return None
    reference = references.pop()
    made = {host: relation(taken) for host, taken in readings.items() if taken and host != reference}
    made[reference] = Relation()
    return (reference, made) if made.keys() >= readings.keys() else None


def sane(reading: Reading) -> bool:
    """Whether the numbers can be true."""
    return max(abs(reading.at_ns), abs(reading.offset_ns)) < 2**61 and 0 <= reading.half_ns < 2**40
