"""`bubblescope diff`: what changed between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bubblescope.cli.output import (
    OUTPUT_FILE,
    FiniteRange,
    check_targets,
    json_option,
    limit_options,
    markdown_option,
    names_option,
    results,
    spare_inputs,
    stdout_owner,
    warn,
    write_json,
    write_text,
)
from bubblescope.errors import ThresholdExceeded, writing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bubblescope.report.compare import Comparison

EPILOG = """\b
Intervals are 95 %, from a bootstrap over the steps of each run with a fixed seed: same input, same answer. Causes
that come from base times over all steps (warmup, cooldown, imbalance, slow worker) get the relative noise of compute.
A change is marked with * where its interval leaves out 0.
\b
Where the two runs have different numbers of micro-batches in a step, they are compared per micro-batch: sentence,
--fail-if-worse, idle, causes. Micro-batches are taken to be of the same size.
\b
--json: unit ("step" or "micro-batch"); step_seconds, of a whole step; step_seconds_per_microbatch (null where unit is
"step"), fraction, idle, busy, and causes {<cause>}: each {before, after, difference, low, high, sure}, seconds per GPU
and unit; worse_fraction, of the unit; stages [{stage, idle, causes}]; warnings [{code, message}]. What a run does not
show is null.
\b
Examples:
  bubblescope diff runs/monday runs/tuesday --html diff.html
  bubblescope diff main.recording branch.recording --markdown comment.md --fail-if-worse 0.02
"""


@click.command(epilog=EPILOG)
@click.argument("before")
@click.argument("after")
@click.option(
    "--fail-if-worse",
    type=FiniteRange(min=0),
    is_flag=False,
    flag_value=0.0,
    metavar="[FRACTION]",
    help="Exit with 5 when a step (a micro-batch, where their number differs) takes longer by more than this share of "
    "the one before (by default: at all), and by more than the noise.",
)
@click.option("--format", "format_name", default="auto", show_default=True, metavar="F", help="Format of the inputs.")
@names_option
@limit_options
@click.option("--html", type=OUTPUT_FILE, metavar="FILE", help="Write the comparison as one HTML file.")
@markdown_option
@json_option
def diff(
    before: str,
    after: str,
    fail_if_worse: float | None,
    format_name: str,
    names_file: Path | None,
    max_events: int | None,
    max_bytes: int | None,
    html: Path | None,
    markdown_to: str | None,
    json_to: str | None,
) -> None:
    """Two runs: what changed per cause, with the noise beside it.

    BEFORE and AFTER are what `bubblescope analyze` takes: a file, a folder, a glob or a URL.
    """
    from bubblescope.cli.analyze import make_report
    from bubblescope.report.build import ReportOptions
    from bubblescope.report.compare import compare

    owner = stdout_owner(json=json_to, markdown=markdown_to)
    targets = (("--html", html), ("--json", json_to), ("--markdown", markdown_to))
    check_targets(*targets)
    reports = [
        make_report(
            [path],
            ReportOptions(),
            format_name=format_name,
            names_file=names_file,
            max_events=max_events,
            max_bytes=max_bytes,
        )
        for path in (before, after)
    ]
    spare_inputs([*(f for r in reports for f in r.run.source.files), names_file], *targets)
    found = compare(*reports)
    deliver(found, (before, after), html=html, markdown_to=markdown_to, json_to=json_to)
    show(found, results(owner))
    warn(found.notices)
    check(found, fail_if_worse)


def deliver(
    found: Comparison, names: tuple[str, str], *, html: Path | None, markdown_to: str | None, json_to: str | None
) -> None:
    """Write what was asked for."""
    from bubblescope.views import markdown
    from bubblescope.views.html import comparison

    if json_to:
        write_json(found.document(), json_to)
    if markdown_to:
        write_text(markdown.render_comparison(found), markdown_to)
    if html is not None:
        with writing(html):
            html.parent.mkdir(parents=True, exist_ok=True)
            comparison.write(found, names, html)


def check(found: Comparison, fail_if_worse: float | None) -> None:
    """Raise ThresholdExceeded when the unit of work got longer by more than the limit and by more than the noise."""
    taken = found.unit_seconds
    if fail_if_worse is None or not taken.sure or found.worse_fraction <= fail_if_worse:
        return
    raise ThresholdExceeded(
        f"a {found.unit} takes {found.worse_fraction:.2%} longer than before ({taken.before:.4g} s → "
        f"{taken.after:.4g} s), above the limit of {fail_if_worse:.2%}"
    )


def show(found: Comparison, console: Console) -> None:
    """One sentence and one table."""
    from rich.text import Text

    from bubblescope.views.comparison import verdict

    console.print(Text(verdict(found).sentence, "bold", overflow="fold"))
    console.print(_table(found))


def _table(found: Comparison) -> Table:
    from rich.table import Table

    from bubblescope.views.comparison import HEAD, rows

    unit = "" if found.unit == "step" else f"per {found.unit}"
    table = Table(unit, *HEAD, "", box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in rows(found):
        table.add_row("  " * row.part + row.name, *row.cells, "*" if row.sure else "")
    return table
