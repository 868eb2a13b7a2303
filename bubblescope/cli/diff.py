"""`bubblescope diff`: what changed between two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bubblescope.cli.output import json_option, results, warn, write_json
from bubblescope.errors import ThresholdExceeded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bubblescope.report.compare import Change, Comparison

EPILOG = """\b
Intervals are 95 %, from a bootstrap over the steps of each run with a fixed seed: same input, same answer. Causes
that come from base times over all steps (warmup, cooldown, imbalance, slow worker) get the relative noise of compute.
A change is marked with * where its interval leaves out 0.
\b
--json: step_seconds, step_seconds_per_microbatch (null unless their numbers differ), fraction, idle, busy, and
causes {<cause>}: each {before, after, difference, low, high, sure}, seconds per GPU and step; worse_fraction;
stages [{stage, idle, causes}]; warnings [{code, message}]. What a run does not show is null.
\b
Examples:
  bubblescope diff runs/monday runs/tuesday
  bubblescope diff main.recording branch.recording --fail-if-worse 0.02
"""


@click.command(epilog=EPILOG)
@click.argument("before")
@click.argument("after")
@click.option(
    "--fail-if-worse",
    type=click.FloatRange(min=0),
    is_flag=False,
    flag_value=0.0,
    metavar="[FRACTION]",
    help="Exit with 5 when a step takes longer by more than this share of the step before (by default: at all), "
    "and by more than the noise.",
)
@click.option("--format", "format_name", default="auto", show_default=True, metavar="F", help="Format of the inputs.")
@json_option
def diff(before: str, after: str, fail_if_worse: float | None, format_name: str, json_to: str | None) -> None:
    """Two runs: what changed per cause, with the noise beside it.

    BEFORE and AFTER are what `bubblescope analyze` takes: a file, a folder, a glob or a URL.
    """
    from bubblescope.cli.analyze import make_report
    from bubblescope.report.build import ReportOptions
    from bubblescope.report.compare import compare

    reports = [make_report([path], ReportOptions(), format_name=format_name) for path in (before, after)]
    found = compare(*reports)
    if json_to:
        write_json(found.document(), json_to)
    show(found, results(json_to))
    warn(found.notices)
    check(found, fail_if_worse)


def check(found: Comparison, fail_if_worse: float | None) -> None:
    """Raise ThresholdExceeded when a step got longer by more than the limit and by more than the noise."""
    step = found.step_seconds
    if fail_if_worse is None or not step.sure or found.worse_fraction <= fail_if_worse:
        return
    raise ThresholdExceeded(
        f"a step takes {found.worse_fraction:.2%} longer than before ({step.before:.4g} s → {step.after:.4g} s), above "
        f"the limit of {fail_if_worse:.2%}"
    )


def show(found: Comparison, console: Console) -> None:
    """One sentence and one table."""
    from rich.text import Text

    console.print(Text(verdict(found), "bold", overflow="fold"))
    console.print(_table(found))


def verdict(found: Comparison) -> str:
    """What happened to the step, and the cause that explains most of it."""
    from bubblescope.views import format as fmt
    from bubblescope.views.words import CAUSE

    step = found.step_seconds
    times = f"({fmt.seconds(step.before)} → {fmt.seconds(step.after)})"
    if not step.sure:
        return f"No change of the step time beyond the noise {times}."
    word = "longer" if found.worse_fraction > 0 else "shorter"
    sentence = f"A step takes {fmt.percent(abs(found.worse_fraction))} {word} {times}"
    longer = found.worse_fraction > 0
    same_way = {
        CAUSE[name].label: c.difference
        for name, c in found.causes.items()
        if c.sure and c.difference is not None and (c.difference > 0) == longer
    }
    if found.busy.sure and found.busy.difference is not None and (found.busy.difference > 0) == longer:
        same_way["compute"] = found.busy.difference
    if not same_way:
        return sentence + "."
    name = max(same_way, key=lambda n: abs(same_way[n]))
    return f"{sentence}; the largest part is {name} ({fmt.seconds(same_way[name], signed=True)})."


def _table(found: Comparison) -> Table:
    from rich.table import Table

    from bubblescope.views.words import CAUSE

    table = Table("", "before", "after", "change", "95 % interval", "", box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    _row(table, "step time", found.step_seconds)
    if found.per_microbatch is not None:
        _row(table, "per micro-batch", found.per_microbatch)
    _fraction_row(table, found.fraction)
    _row(table, "busy", found.busy)
    _row(table, "idle", found.idle)
    for name, change in found.causes.items():
        if any(abs(x) > 1e-9 for x in (change.before, change.after) if x is not None):
            _row(table, f"  {CAUSE[name].label}", change)
    for stage, change in found.stages.items():
        _row(table, f"idle, stage {stage if stage >= 0 else '?'}", change)
    return table


def _row(table: Table, name: str, change: Change) -> None:
    from bubblescope.views import format as fmt

    if change.difference is None:
        table.add_row(name, fmt.seconds(change.before), fmt.seconds(change.after), fmt.MISSING, fmt.MISSING, "")
        return
    interval = f"{fmt.seconds(change.low, signed=True)} … {fmt.seconds(change.high, signed=True)}"
    times = (fmt.seconds(change.before), fmt.seconds(change.after), fmt.seconds(change.difference, signed=True))
    table.add_row(name, *times, interval, "*" if change.sure else "")


def _fraction_row(table: Table, change: Change) -> None:
    from bubblescope.views import format as fmt

    interval = fmt.MISSING
    if change.difference is not None:
        interval = f"{fmt.percent(change.low)} … {fmt.percent(change.high)}"
    cells = (fmt.percent(change.before), fmt.percent(change.after), fmt.percent(change.difference))
    table.add_row("bubble fraction", *cells, interval, "*" if change.sure else "")
