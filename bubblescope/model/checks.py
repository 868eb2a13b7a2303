"""What a caller may give: whole numbers, amounts and paths; anything else is a UsageError that names the argument."""

from __future__ import annotations

import operator
import os
from numbers import Real
from typing import Any

from bubblescope.errors import UsageError

LARGEST = 10**15
"""Of a number of GPUs, steps or dollars. Products of such numbers still fit a float."""


def whole(name: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    """`value` as an int, from `least` to `most`. NumPy's integers will do; 8.0 and True are no whole numbers.

    >>> whole("gpus", 8)
    8
    >>> whole("gpus", 0)
    Traceback (most recent call last):
    bubblescope.errors.UsageError: gpus is 0, but must be a whole number from 1 to 1,000,000,000,000,000
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or not least <= found <= most:
        raise UsageError(f"{name} is {shown(value)}, but must be a whole number from {least} to {most:,}")
    return found


def amount(name: str, value: Any, most: float = float(LARGEST)) -> float:
    """`value` as a float, from 0 to `most`.

    >>> amount("price", 2)
    2.0
    >>> amount("price", float("nan"))
    Traceback (most recent call last):
    bubblescope.errors.UsageError: price is nan, but must be a number from 0 to 1e+15
    """
    try:
        found = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    except OverflowError:
        found = -1.0
    if not 0 <= found <= most:
        raise UsageError(f"{name} is {shown(value)}, but must be a number from 0 to {most:g}")
    return found


def path(name: str, value: Any) -> str:
    """`value`, a text or an `os.PathLike`, as a text.

    >>> path("folder", "runs/x")
    'runs/x'
    """
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str) or not found:
        raise UsageError(f"{name} is {shown(value)}, but must be a path")
    return found


def shown(value: object) -> str:
    """How a message quotes a value: short, and whatever its type makes of `repr`."""
    try:
        text = repr(value)
    except Exception:  # ours is the message about it, not its own trouble
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
