"""From idle seconds to GPU-hours and money: the plain arithmetic of ATTRIBUTION.md §9.

No price is ever guessed: without the user's own price there are hours and no money.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from bubblescope.errors import UsageError
from bubblescope.model.checks import amount

SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24.0


@dataclass(frozen=True)
class Loss:
    """What a repeated loss of time adds up to.

    gpu_hours: over all GPUs. hours_per_gpu: by how much each of them is held up. money: in the currency of the
    price, None when no price was given. days: calendar days of delay, hours_per_gpu / 24.
    """

    gpu_hours: float
    hours_per_gpu: float
    money: float | None
    days: float


def gpu_hours(seconds_per_step: float, *, steps: float = 1, gpus: float = 1) -> float:
    """GPU-hours that `seconds_per_step`, lost by each of `gpus` GPUs in each of `steps` steps, add up to.

    Where the GPUs lose different amounts, pass their sum and leave `gpus` at 1. Raises UsageError for a value
    that is negative or not finite.

    >>> round(gpu_hours(0.010, steps=10_000_000), 2)
    27.78
    >>> round(gpu_hours(0.010, steps=10_000_000, gpus=1024), 1)
    28444.4
    """
    seconds = amount("seconds per step", seconds_per_step, sys.float_info.max)
    return seconds * amount("steps", steps) * amount("gpus", gpus) / SECONDS_PER_HOUR


def money(hours: float | None, price_per_gpu_hour: float | None) -> float | None:
    """`hours` GPU-hours at a price; None when either is not known.

    >>> money(27.5, 2.0), money(27.5, None)
    (55.0, None)
    """
    if price_per_gpu_hour is None:
        return None
    price = amount("price per GPU-hour", price_per_gpu_hour)
    return None if hours is None else _finite("GPU-hours", hours) * price


def loss(seconds_per_step: float, *, steps: float, gpus: int = 1, price_per_gpu_hour: float | None = None) -> Loss:
    """All four figures at once.

    >>> found = loss(0.010, steps=10_000_000, gpus=8, price_per_gpu_hour=2.5)
    >>> [round(x, 2) for x in (found.hours_per_gpu, found.gpu_hours, found.money, found.days)]
    [27.78, 222.22, 555.56, 1.16]
    """
    each = gpu_hours(seconds_per_step, steps=steps)
    total = gpu_hours(seconds_per_step, steps=steps, gpus=gpus)
    return Loss(
        gpu_hours=total,
        hours_per_gpu=each,
        money=money(total, price_per_gpu_hour),
        days=each / HOURS_PER_DAY,
    )


def _finite(what: str, value: float) -> float:
    # Signed on purpose: a cause may save time (ATTRIBUTION.md §6), and then it costs a negative amount.
    if not math.isfinite(value):
        raise UsageError(f"{what} is {value!r}, but must be a finite number")
    return float(value)
