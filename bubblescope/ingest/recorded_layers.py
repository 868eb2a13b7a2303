"""Layers that the recorder timed in a few steps: rows ``layer F 0003 layers.3`` of lane RANGE."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from bubblescope.model import Kind, Lane, Names, Spans
from bubblescope.model.layers import LayerTime
from bubblescope.model.units import NS

Float = NDArray[np.float64]
_NAME = re.compile(r"layer ([FB]) (\d+) (.*)\Z")


def take_layers(spans: Spans, names: Names) -> tuple[Spans, list[LayerTime]]:
    """The spans without these rows, and one `LayerTime` a layer, by stage and place in it: medians over
    micro-batches, steps and replicas.

    Where no whole backward of a layer was seen (its stage splits it into I and W), its backward is the stage's
    backward time, in proportion to the layer's share of the stage's forward.
    """
    named = {i: found for i, text in enumerate(names.texts) if (found := _NAME.match(text)) is not None}
    if not named:
        return spans, []
    rows = np.flatnonzero((spans.lane == Lane.RANGE) & np.isin(spans.name, list(named)))
    seconds = (spans.end_ns - spans.start_ns)[rows] * NS
    samples: dict[tuple[int, int, str], dict[str, list[float]]] = {}
    columns = (spans.stage[rows], spans.name[rows], seconds)
    for stage, name, length in zip(*(column.tolist() for column in columns), strict=True):
        letter, index, text = named[name].groups()
        samples.setdefault((stage, int(index), text), {"F": [], "B": []})[letter].append(length)
    keep = np.ones(len(spans), dtype=np.bool_)
    keep[rows] = False
    layers = []
    for (stage, _, text), seen in sorted(samples.items()):
        if seen["F"]:
            forward = float(np.median(seen["F"]))
            backward = float(np.median(seen["B"])) if seen["B"] else forward * _ratio(spans, stage)
            layers.append(LayerTime(text, forward, backward, stage))
    return spans.take(keep), layers


def _ratio(spans: Spans, stage: int) -> float:
    """Backward over forward of a stage: medians, B or else I + W."""
    compute = (spans.lane == Lane.COMPUTE) & (spans.stage == stage)
    length = (spans.end_ns - spans.start_ns).astype(np.float64)

    def median(kind: Kind) -> float:
        mine = length[compute & (spans.kind == kind)]
        return float(np.median(mine)) if len(mine) else 0.0

    forward = median(Kind.FORWARD)
    backward = median(Kind.BACKWARD) or median(Kind.BACKWARD_INPUT) + median(Kind.BACKWARD_WEIGHT)
    return backward / forward if forward > 0 else 0.0
