"""Where a command's words go: results to stdout, everything else to stderr, JSON alone when asked for."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from bubblescope.errors import UsageError, writing
from bubblescope.model.notice import Notice

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])

MOST_WARNINGS = 20


class FiniteRange(click.FloatRange):
    """As click's, without nan and infinity: nan is neither below nor above any bound, and would pass them all."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class OutputPath(click.Path):
    """As click's, without the empty text, which is a variable that was not set, and without '-' where it would become a
    file of that name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == "":
            self.fail("an empty text names no place to write to.", param, ctx)
        if str(value) == "-" and not self.allow_dash:
            self.fail("this does not go to stdout; name a place ('./-' would be one).", param, ctx)
        return super().convert(value, param, ctx)


OUTPUT_FILE = OutputPath(dir_okay=False, path_type=Path)
OUTPUT_FILE_OR_STDOUT = OutputPath(dir_okay=False, allow_dash=True)
OUTPUT_FOLDER = OutputPath(file_okay=False, path_type=Path)


def json_option(command: Command) -> Command:
    """Add ``--json FILE|-``; the command gets it as `json_to`."""
    return click.option(
        "--json",
        "json_to",
        type=OUTPUT_FILE_OR_STDOUT,
        metavar="FILE|-",
        help="Write the result as JSON; '-' writes it, and nothing else, to stdout.",
    )(command)


def markdown_option(command: Command) -> Command:
    """Add ``--markdown FILE|-``; the command gets it as `markdown_to`."""
    return click.option(
        "--markdown",
        "markdown_to",
        type=OUTPUT_FILE_OR_STDOUT,
        metavar="FILE|-",
        help="Write a summary for a pull request; '-' writes it, and nothing else, to stdout.",
    )(command)


def names_option(command: Command) -> Command:
    """Add ``--names FILE``, for every command that reads traces; the command gets it as `names_file`."""
    return click.option(
        "--names",
        "names_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="TOML: what your own names of ranges and kernels mean (docs/traces.md).",
    )(command)


def limit_options(command: Command) -> Command:
    """Add the limits of one file, for every command that reads traces; None where they are not given."""
    add_events = click.option(
        "--max-events",
        type=click.IntRange(min=1),
        metavar="N",
        help="Events of one file at most; default: 50 million.",
    )
    add_bytes = click.option(
        "--max-bytes",
        type=click.IntRange(min=1),
        metavar="N",
        help="Bytes of one file, unpacked, at most; default: 16 GiB.",
    )
    return add_events(add_bytes(command))


def stdout_owner(**targets: str | None) -> str | None:
    """'-' when one of the targets is stdout, for `results`; UsageError when several are.

    >>> stdout_owner(json="-", markdown=None), stdout_owner(json="x.json")
    ('-', None)
    """
    owners = [name for name, target in targets.items() if target == "-"]
    if len(owners) > 1:
        wanted = " and ".join(f"--{name} -" for name in owners)
        raise UsageError(f"{wanted} both want stdout", hint="write one of them to a file")
    return "-" if owners else None


def check_targets(*targets: tuple[str, str | Path | None]) -> None:
    """Raise UsageError when two options (name, target) want one file; devices such as /dev/null may be named twice.

    >>> check_targets(("--json", "a.json"), ("--html", None), ("--markdown", "-"), ("--perfetto", "-"))
    """
    taken: dict[str, str] = {}
    for option, target in targets:
        if target is None or str(target) == "-":
            continue
        if Path(target).exists() and not Path(target).is_file():
            continue
        other = taken.setdefault(os.path.realpath(target), option)
        if other != option:
            raise UsageError(f"{other} and {option} both want {target}", hint="write one of them to another file")


def spare_inputs(inputs: Iterable[str | Path | None], *targets: tuple[str, str | Path | None]) -> None:
    """Raise UsageError before a file that was read is written over: a recording cannot be made again."""
    wanted = {os.path.realpath(target): str(target) for _, target in targets if target is not None and target != "-"}
    for path in inputs:
        if path is not None and os.path.realpath(path) in wanted:
            raise UsageError(
                f"the output {wanted[os.path.realpath(path)]} is one of the files that were read",
                hint="write to another file",
            )


def require(what: str, extra: str, *modules: str) -> None:
    """Raise UsageError, before any work is done, when `what` needs modules of an extra that is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}", hint=f"pip install 'bubblescope[{extra}]'")


def write_json(data: object, json_to: str) -> None:
    """Write `data` as indented JSON. Figures that are not finite are a bug of the caller (ValueError)."""
    write_text(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n", json_to)


def write_text(text: str, target: str) -> None:
    """Write `text` to a file, making its folder; '-' is stdout. Raises UsageError when it cannot be written."""
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(target)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def results(json_to: str | None) -> Console:
    """The console for results: stdout, or nowhere when stdout belongs to JSON."""
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich's own way is exit status 1 without a word; `main` knows a better one

    # Piped, rich would cut tables at 80 columns; a file has no such edge.
    width = None if sys.stdout.isatty() else 120
    return Results(quiet=json_to == "-", highlight=False, soft_wrap=False, width=width)


def terminals() -> list[TextIO]:
    """Those of stdout and stderr that are a terminal now, for `leave_closed`."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]


def leave_closed(streams: Iterable[TextIO]) -> None:
    """What is said to a terminal that has been closed goes nowhere from now on; each write to it would fail."""
    for stream in streams:
        if not stream.isatty():
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(notices: Iterable[Notice]) -> None:
    """Every finding on stderr, at most `MOST_WARNINGS` lines of them and the number of the rest."""
    found = list(notices)
    for notice in found[:MOST_WARNINGS]:
        where = f", in {notice.where}" if notice.where else ""
        click.echo(f"warning: {notice.message}{where}", err=True)
    if len(found) > MOST_WARNINGS:
        click.echo(f"warning: {len(found) - MOST_WARNINGS} more; the report and --json have them all", err=True)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """A spinner while the block runs, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception would, so that its workers are ended too; the exit status is 143."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def reading() -> Iterator[None]:
    """While files are read: a bar with what is done, the rate and the time left, on a terminal only."""
    from bubblescope.ingest.parallel import watched

    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("reading {task.fields[files]} files"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, watched(_Bar(bar)):
        yield


class _Bar:
    """What `ingest.parallel` tells, on a rich progress bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None

    def begin(self, files: int, size: int) -> None:
        self._task = self._bar.add_task("", total=size or None, files=files)

    def done(self, size: int) -> None:
        self._bar.advance(self._task, size)
