"""torch.distributed.pipelining's own ranges: ``PP:2F0``, ``PP:(0F3;3B1)OVERLAP_F_B``, ``Forward 3``, ``Backward 3``.

Such ranges hold waits for receives as well; `label.ranges` says what is labelled by them.
"""

from __future__ import annotations

import re

from bubblescope.label.actions import RangeAction
from bubblescope.model import Kind

_ACTION = r"(\d{1,6})(SEND_F|SEND_B|RECV_F|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|I|B|W)(\d{0,6})"
_SINGLE = re.compile(rf"PP:{_ACTION}\Z")
_OVERLAP = re.compile(rf"PP:\({_ACTION};{_ACTION}\)OVERLAP_F_B\Z")
_PLAIN = re.compile(r"(Forward|Backward) (\d{1,6})\Z")

_KINDS = {
    "F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT,
    "SEND_F": Kind.SEND, "SEND_B": Kind.SEND, "RECV_F": Kind.RECV, "RECV_B": Kind.RECV,
    "UNSHARD": Kind.OTHER, "RESHARD": Kind.OTHER, "REDUCE_GRAD": Kind.OTHER,
}  # fmt: skip
_NEIGHBOUR = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1}


def parse(text: str) -> tuple[RangeAction, ...]:
    """The actions a range name stands for: none, one, or the two of an overlapped pair.

    >>> parse("PP:2F0")
    (RangeAction(kind=<Kind.FORWARD: 1>, stage=2, microbatch=0, neighbour=0, chunk=-1),)
    >>> [a.stage for a in parse("PP:(0F3;3B1)OVERLAP_F_B")], parse("PP:1RECV_B3")[0].neighbour
    ([0, 3], 1)
    >>> parse("Forward 3")[0].microbatch, parse("forward pass")
    (3, ())
    """
    single = _SINGLE.match(text)
    if single:
        return (_action(*single.groups()),)
    overlap = _OVERLAP.match(text)
    if overlap:
        parts = overlap.groups()
        return _action(*parts[:3]), _action(*parts[3:])
    plain = _PLAIN.match(text)
    if plain:
        kind = Kind.FORWARD if plain[1] == "Forward" else Kind.BACKWARD
        return (RangeAction(kind, -1, int(plain[2])),)
    return ()


def _action(stage: str, word: str, microbatch: str) -> RangeAction:
    return RangeAction(_KINDS[word], int(stage), int(microbatch) if microbatch else -1, _NEIGHBOUR.get(word, 0))
