"""`bubblescope cost`: the plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import asdict

import click

from bubblescope.cli.output import FiniteRange, json_option, results, write_json
from bubblescope.cost.prices import Loss, loss
from bubblescope.errors import UsageError
from bubblescope.model.notice import counted
from bubblescope.views.format import gpu_hours, plain, seconds


@click.command(
    epilog="\b\nExample:\n  bubblescope cost --bubble-ms 10 --steps 10000000 --gpus 1024 --price-per-gpu-hour 2.50"
)
@click.option(
    "--bubble-ms", type=FiniteRange(min=0), required=True, metavar="B", help="Idle milliseconds per GPU and step."
)
@click.option(
    "--steps", type=click.IntRange(min=1), required=True, metavar="N", help="Optimizer steps of the whole training."
)
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="G",
    help="GPUs that each lose this time.",
)
@click.option(
    "--price-per-gpu-hour",
    "price",
    type=FiniteRange(min=0),
    metavar="P",
    help="Your price; without one, no money figure.",
)
@click.option("--currency", default="USD", show_default=True, metavar="C", help="Name printed beside the money.")
@json_option
def cost(bubble_ms: float, steps: int, gpus: int, price: float | None, currency: str, json_to: str | None) -> None:
    """What a bubble of so many milliseconds costs.

    GPU-hours = GPUs x steps x seconds per step / 3600; money = GPU-hours x your price.
    """
    found = _loss(bubble_ms / 1000, steps=steps, gpus=gpus, price=price)
    if json_to:
        write_json(asdict(found), json_to)
    console = results(json_to)
    for line in _lines(found, gpus=gpus, currency=currency):
        console.print(line, markup=False)


def _loss(seconds: float, *, steps: int, gpus: int, price: float | None) -> Loss:
    """As `loss`; UsageError where the figures do not fit a number any more."""
    try:
        found = loss(seconds, steps=steps, gpus=gpus, price_per_gpu_hour=price)
        finite = all(math.isfinite(x) for x in asdict(found).values() if x is not None)
    except OverflowError:
        finite = False
    if not finite:
        raise UsageError(
            "together these numbers are too large to be counted", hint="check --bubble-ms, --steps, --gpus"
        )
    return found


def _lines(found: Loss, *, gpus: int, currency: str) -> list[str]:
    """With as many decimals as show something: a bubble of a millisecond is not 0.00 hours."""
    small = found.hours_per_gpu < 0.01
    hours = seconds(found.hours_per_gpu * 3600) if small else f"{found.hours_per_gpu:,.2f} hours"
    delay = f" ({found.days:,.2f} days of delay)" if found.days >= 0.01 else ""
    lines = [
        f"{hours} per GPU{delay}",
        f"{gpu_hours(found.gpu_hours) if small else f'{found.gpu_hours:,.2f} GPU-hours'} on {counted(gpus, 'GPU')}",
    ]
    if found.money is None:
        lines.append("no money figure: give your own --price-per-gpu-hour")
    else:
        tiny = 0 < found.money < 0.005
        lines.append(f"{'under 0.01' if tiny else f'{found.money:,.2f}'} {plain(currency)}")
    return lines
