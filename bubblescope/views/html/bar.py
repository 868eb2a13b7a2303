"""The bar of all GPU time: useful work, then what each cause takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bubblescope.views import format as fmt
from bubblescope.views.summary import mean_causes, mean_gpu
from bubblescope.views.words import CAUSES


@dataclass(frozen=True)
class Slice:
    """A part of the bar of all GPU time; offset and share in percent of the bar."""

    name: str
    label: str
    colour: str
    offset: str
    share: str
    text: str


def slices(data: dict[str, Any]) -> list[Slice]:
    """All GPU time: useful work, then the causes that take time, largest family first as in `CAUSES`."""
    busy, window, causes = mean_gpu(data, "busy"), mean_gpu(data, "window"), mean_causes(data)
    if busy is None or not window:
        return []
    parts = [("work", "useful work", "", busy)]
    parts += [(c.name, c.label, c.colour, causes[c.name] or 0.0) for c in CAUSES]
    drawn = [p for p in parts if p[3] > 5e-4 * window]  # what would print as 0.0 % has no width either
    whole, at, found = sum(p[3] for p in drawn), 0.0, []
    for name, label, colour, length in drawn:
        share = 100 * length / whole
        found.append(Slice(name, label, colour, f"{at:.3f}", f"{share:.3f}", fmt.percent(length / window)))
        at += share
    return found
