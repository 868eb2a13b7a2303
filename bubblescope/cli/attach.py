"""`bubblescope attach`: record a job that is training already, and leave it as it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bubblescope.cli.analyze import Outputs, deliver, make_report
from bubblescope.cli.output import OUTPUT_FOLDER, FiniteRange, json_option, leave_closed, results, terminals, warn
from bubblescope.errors import AttachError, InputError
from bubblescope.model.notice import Notice, counted

if TYPE_CHECKING:
    from bubblescope.attach.session import Attached


@click.command(
    epilog="\b\nExample:\n"
    "  bubblescope attach all --steps 20 --out look\n"
    "  bubblescope attach 12345 --duration 10\n"
    "  bubblescope attach runs/x --via kineto --duration 2"
)
@click.argument("target", metavar="TARGET")
@click.option(
    "--duration", type=FiniteRange(0, 3600, min_open=True), metavar="S", help="Seconds to record.  [default: 5]"
)
@click.option("--steps", type=click.IntRange(1, 10_000), metavar="N", help="Training steps to record, instead.")
@click.option(
    "--via",
    type=click.Choice(["auto", "agent", "kineto", "inject", "gdb"]),
    default="auto",
    show_default=True,
    help="The way in; auto takes agent, then kineto, and never injects.",
)
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    metavar="DIR",
    help="For the recording and the report.  [default: attach-TIME]",
)
@click.option("--yes", is_flag=True, help="Confirm the risk of --via inject and --via gdb.")
@json_option
def attach(
    target: str,
    duration: float | None,
    steps: int | None,
    via: str,
    out: Path | None,
    yes: bool,
    json_to: str | None,
) -> int:
    """Record a job that is training, detach, report.

    TARGET is a process id (of a rank, or of a launcher: then all its ranks here), a job's folder, or 'all': your
    ranks on this host. On several hosts, run the same command on each (srun, pdsh, kubectl) with one --out.

    Ctrl-C, SIGTERM and SIGHUP end the recording early: the hooks come out, and what was recorded is reported.
    """
    from bubblescope.attach import session
    from bubblescope.attach.early import EndedEarly
    from bubblescope.report.build import ReportOptions

    folder = out or Path(time.strftime("attach-%Y%m%d-%H%M%S"))
    plan = session.Plan(target, folder, via, duration, steps)
    screens = terminals()

    def tell(text: str) -> None:
        leave_closed(screens)  # closing it ends the recording early, as SIGHUP does
        click.echo(text, err=True)

    try:
        done = session.attach(plan, lambda risk: _confirmed(risk, yes), tell)
    finally:
        leave_closed(screens)
    warn(Notice("attach", text) for text in done.warnings)
    try:
        report = make_report([str(done.folder)], ReportOptions())
    except InputError as error:
        if done.early:
            raise EndedEarly(done.early, error.what) from error
        raise
    deliver(report, Outputs(out=folder, json=json_to))
    console = results(json_to)
    console.print(f"{closing(done)}\nagain:  bubblescope analyze {done.folder}", markup=False, soft_wrap=True)
    return done.early.exit_status


def closing(done: Attached) -> str:
    """What the user should know last: whether the job is as it was."""
    many = counted(done.detached, "rank")
    if done.via == "kineto":
        return f"detached: Kineto traced {many}; nothing was placed into the job"
    parts = []
    if done.detached:
        waited = f"no training thread waited more than {done.stall_ms:.1f} ms for them"
        parts.append(f"detached: hooks are out of {many}, {waited}")
        if done.via != "agent":
            parts.append("the sleeping agents stay, so that attaching again needs no injection")
    if done.hooked:
        parts.append(f"hooks are still in {counted(done.hooked, 'rank')}, and come out at the next step there")
    if done.ended:
        parts.append(f"{counted(done.ended, 'rank')} ended while being recorded")
    if done.failed:
        parts.append(f"{counted(done.failed, 'rank')} gave up (see the warnings)")
    return "; ".join(parts)


def _confirmed(risk: str, yes: bool) -> bool:
    """Ask on a terminal; elsewhere only --yes will do."""
    click.echo(f"warning: {risk}", err=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise AttachError("injecting needs your confirmation", hint="add --yes if you accept the risk above")
    return click.confirm("Go on?", default=False, err=True)
