"""`bubblescope whatif`: what each change to a measured run would bring."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bubblescope.cli.output import (
    FiniteRange,
    json_option,
    limit_options,
    names_option,
    results,
    spare_inputs,
    warn,
    write_json,
)
from bubblescope.errors import UsageError
from bubblescope.model.notice import Notice

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\b
Without any of the options that name a change, all changes worth it are shown.
\b
--layer-times FILE is CSV (or JSON: a list of such objects), the model's layers in order:
  name,forward_s,backward_s,bytes,pinned
  embedding,0.0010,0.0012,1500000000,first
  layers.0,0.0021,0.0043,900000000,
bytes and pinned (first: stays on the first stage; last: on the last) may be left out.
\b
--json: step_seconds (measured), microbatches, replay {step_seconds, error_fraction, trusted},
  verdict (one sentence), layer_times ("measured", "file", null), cost {gpus, total_steps,
  price_per_gpu_hour, currency}, changes [as advice in report.json, and saved_fraction], refused [{action, why}]
\b
Examples:
  bubblescope whatif demo-out/recording
  bubblescope whatif demo-out/recording --microbatches 16 --schedule ZBVZeroBubble --price-per-gpu-hour 2.50
  bubblescope whatif demo-out/recording --rebalance --layer-times layers.csv --memory-limit 60GiB --json -
"""


@click.command(epilog=EPILOG)
@click.argument("path")
@click.option(
    "--microbatches", type=click.IntRange(min=1), multiple=True, metavar="M", help="M micro-batches of the same size."
)
@click.option("--schedule", "schedules", multiple=True, metavar="S", help="Another schedule; may be said again.")
@click.option("--rebalance", is_flag=True, help="Move layers between stages; with --schedule also both together.")
@click.option("--replace-node", is_flag=True, help="The slowest replica of a stage as fast as its peers.")
@click.option("--fix-input", is_flag=True, help="Data loading hidden behind compute.")
@click.option("--layer-times", metavar="FILE", help="Seconds of each layer, for the best cut of whole layers.")
@click.option(
    "--memory-limit", metavar="BYTES", help="What the layers of a stage may take, for example 60GiB; needs bytes."
)
@click.option(
    "--price-per-gpu-hour", "price", type=FiniteRange(min=0), metavar="P", help="Your price, for money figures."
)
@click.option("--currency", default="USD", show_default=True, metavar="C", help="Name beside the money.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of the whole job; else those seen.")
@click.option(
    "--total-steps", type=click.IntRange(min=1), metavar="N", help="Steps of the whole training; else those analysed."
)
@click.option("--format", "format_name", default="auto", show_default=True, metavar="F", help="Format of the input.")
@names_option
@limit_options
@json_option
def whatif(
    path: str,
    microbatches: tuple[int, ...],
    schedules: tuple[str, ...],
    rebalance: bool,
    replace_node: bool,
    fix_input: bool,
    layer_times: str | None,
    memory_limit: str | None,
    price: float | None,
    currency: str,
    gpus: int | None,
    total_steps: int | None,
    format_name: str,
    names_file: Path | None,
    max_events: int | None,
    max_bytes: int | None,
    json_to: str | None,
) -> None:
    """Predicted step time, hours and money of each change to a run, best first.

    Each change is replayed with the run's own times. Nothing is predicted when the replay does not reproduce the
    run itself to 5 %.
    """
    from bubblescope.cli.analyze import make_report
    from bubblescope.ingest import layertimes
    from bubblescope.replay.schedules import canonical
    from bubblescope.report.advice import Wanted, explore
    from bubblescope.report.build import ReportOptions

    wanted = Wanted(
        microbatches=tuple(dict.fromkeys(microbatches)),
        schedules=tuple(dict.fromkeys(canonical(name) for name in schedules)),
        rebalance=rebalance,
        replace_node=replace_node,
        fix_input=fix_input,
        layers=None if layer_times is None else tuple(layertimes.read(layer_times)),
        memory_limit=None if memory_limit is None else size(memory_limit),
    )
    options = ReportOptions(price_per_gpu_hour=price, currency=currency, gpus=gpus, total_steps=total_steps)
    report = make_report(
        [path],
        options,
        format_name=format_name,
        names_file=names_file,
        max_events=max_events,
        max_bytes=max_bytes,
    )
    spare_inputs([*report.run.source.files, layer_times, names_file], ("--json", json_to))
    found = explore(report, wanted)
    cost = {name: report.data["cost"][name] for name in ("gpus", "total_steps", "price_per_gpu_hour", "currency")}
    found["cost"] = cost
    if json_to:
        write_json(found, json_to)
    show(found, results(json_to))
    warn(Notice(w["code"], w["message"], w["file"] or "") for w in report.data["source"]["warnings"])


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\Z", re.IGNORECASE)


def size(text: str) -> float:
    """Bytes of ``60GiB``, ``80e9`` or ``80GB``. Raises UsageError.

    >>> size("60GiB"), size("2kb"), size("1e9")
    (64424509440.0, 2000.0, 1000000000.0)
    """
    found = _SIZE.match(text.strip())
    try:
        value = float(text) if found is None else float(found[1]) * _unit(found[2], found[3])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--memory-limit '{text}' is not a number of bytes", hint="for example 60GiB or 80e9")
    return value


def _unit(letter: str, binary: str) -> float:
    return float((1024 if binary else 1000) ** " KMGT".index(letter.upper() or " "))


def show(found: dict[str, Any], console: Console) -> None:
    """The sentence, one block a change, what could not be predicted, and how far to trust it."""
    from rich.text import Text

    from bubblescope.views import format as fmt

    console.print(Text(fmt.plain(found["verdict"]), "bold", overflow="fold"))
    for number, change in enumerate(found["changes"], 1):
        console.print(Text(f"{number}. {fmt.plain(change['action'])}", overflow="fold"))
        console.print(Text(f"   {_saving(change, found['cost']['currency'])}", overflow="fold"))
        if change["memory_note"]:
            console.print(Text(f"   memory: {fmt.plain(change['memory_note'])}", "dim", overflow="fold"))
        for assumption in change["assumptions"]:
            console.print(Text(f"   assuming {fmt.plain(assumption)}", "dim", overflow="fold"))
    for refusal in found["refused"]:
        text = f"not predicted: {refusal['action']}, because {refusal['why']}"
        console.print(Text(fmt.plain(text), "yellow", overflow="fold"))
    error = found["replay"]["error_fraction"]
    if error is not None:
        trust = "trusted" if found["replay"]["trusted"] else "not trusted"
        text = f"the replay of the run itself is off by {fmt.percent(error)} of the step: {trust}"
        console.print(Text(text, "dim" if found["replay"]["trusted"] else "bold yellow", overflow="fold"))


def _saving(change: dict[str, Any], currency: str) -> str:
    from bubblescope.views import format as fmt

    saved = change["saved_seconds"]
    word = "saves" if saved >= 0 else "costs"
    parts = [
        f"step {fmt.seconds(change['step_seconds'])}, {word} {fmt.seconds(abs(saved))}"
        f" ({fmt.percent(abs(change['saved_fraction']))})"
    ]
    per_work = change["detail"].get("step_seconds_per_same_work")
    if per_work is not None:
        parts[0] += f", counting {fmt.seconds(per_work)} for the work of one step now"
    parts.append(fmt.gpu_hours(change["saved_gpu_hours"]))
    if change["saved_money"] is not None:
        parts.append(fmt.money(change["saved_money"], currency))
    return " · ".join(parts)
