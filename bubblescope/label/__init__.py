"""What every kernel is for: names and messages -> kind, stage, micro-batch. A pass is a function Run -> Run."""

from __future__ import annotations

from collections.abc import Callable

from bubblescope.label import flow, generic, lacking, messages, peers, ranges, schedule, structure
from bubblescope.model import Run

Pass = Callable[[Run], Run]

LABELS: list[Pass] = [
    ranges.label,
    generic.label_optimizer,
    structure.label,
    structure.place_chunks,
    flow.label,
    ranges.label_messages,
    ranges.label_loss,
    generic.label,
    peers.label,
    messages.label,
    generic.label_waits,
    generic.bridge_host_operators,
    generic.label_chunks,
    generic.label_microbatch_count,
    structure.forget_open,
    lacking.label,
    schedule.label,
]
"""In this order: the surest evidence first. Each only fills what is still open."""


def label(run: Run) -> Run:
    """All passes. A recording knows what it recorded, and passes through as it is."""
    if run.source.format == "recording":
        return run
    for one in LABELS:
        run = one(run)
    return run
