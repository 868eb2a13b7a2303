"""What belongs together across ranks, on one clock. Works on a Run from any reader."""

from __future__ import annotations

from collections.abc import Callable

from bubblescope.align.clock import align
from bubblescope.align.hosts import in_one_unit, matched
from bubblescope.align.match import Messages, match, one_sided_transfer, wait_transfer
from bubblescope.label import label
from bubblescope.model import Run

__all__ = ["PASSES", "Messages", "align", "label", "match", "one_sided_transfer", "prepare", "wait_transfer"]

PASSES: list[Callable[[Run], Run]] = [in_one_unit, label, matched, align]
"""In this order. Each fills only what is open, so that a recording keeps what it knows."""


def prepare(run: Run) -> Run:
    """From what was measured to what can be analysed: labelled, matched, aligned."""
    for one in PASSES:
        run = one(run)
    return run
