"""Ranges of sail-sg's zero-bubble schedules: ``F3.1.0`` is forward, micro-batch 3, chunk 1, sequence split 0.

``B`` is the input gradient where ``W`` ranges stand beside it, else the whole backward; ``W_clear`` runs what weight
gradients are left and names no micro-batch. Splits of a sequence count as micro-batches of their own.
"""

from __future__ import annotations

import re

from bubblescope.label.actions import Parser, RangeAction
from bubblescope.model import Kind, Run

_NAME = re.compile(r"(F|B|W|BW)(\d{1,6})\.(\d{1,4})\.(\d{1,4})\Z")
_CLEAR = re.compile(r"W_clear\.(\d{1,4})\.(\d{1,4})\Z")
_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT, "BW": Kind.BACKWARD}


def parser(run: Run) -> Parser:
    """How the names of `run` are read: the number of splits, and whether weight gradients are apart, are the run's."""
    found = [m for text in run.names.texts if (m := _NAME.match(text))]
    splits = 1 + max((int(m[4]) for m in found), default=0)
    apart = any(m[1] == "W" for m in found) or any(_CLEAR.match(text) for text in run.names.texts)
    return lambda text: parse(text, splits, apart=apart)


def parse(text: str, splits: int = 1, *, apart: bool = True) -> tuple[RangeAction, ...]:
    """The action of a range name, or none. apart: ``B`` is only the input gradient.

    >>> parse("F3.1.0")[0].chunk, parse("F3.0.1", 2)[0].microbatch, parse("B0.0.0")[0].kind.name, parse("F3")
    (1, 7, 'BACKWARD_INPUT', ())
    >>> parse("W_clear.0.0")[0].microbatch, parse("B0.0.0", apart=False)[0].kind.name
    (-1, 'BACKWARD')
    """
    found = _NAME.match(text)
    if found:
        letter, microbatch, chunk, split = found.groups()
        kind = _KINDS[letter] if apart or letter != "B" else Kind.BACKWARD
        return (RangeAction(kind, microbatch=int(microbatch) * splits + int(split), chunk=int(chunk)),)
    clear = _CLEAR.match(text)
    return (RangeAction(Kind.BACKWARD_WEIGHT, chunk=int(clear[1])),) if clear else ()
