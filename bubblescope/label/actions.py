"""What the name of a range says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bubblescope.model import Kind


@dataclass(frozen=True)
class RangeAction:
    """One parsed range; -1 where its name does not say (``Forward 3`` names no stage). neighbour: +1 the message is
    shared with the next stage, -1 with the previous one, 0 no message."""

    kind: Kind
    stage: int = -1
    microbatch: int = -1
    neighbour: int = 0
    chunk: int = -1


Parser = Callable[[str], tuple[RangeAction, ...]]
"""A name -> its actions: none when it is not known, two for an overlapped pair."""
