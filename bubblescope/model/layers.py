"""How long one layer of the model takes for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTime:
    """One layer, in the model's order. stage: the (virtual) stage that ran it, -1 unknown. bytes: what it needs of
    its GPU's memory, None unknown. pinned: "first" (an embedding) or "last" (a head, the loss) for what cannot move
    off that stage, "" for what can.
    """

    name: str
    forward_s: float
    backward_s: float
    stage: int = -1
    bytes: int | None = None
    pinned: str = ""
