"""The `bubblescope` command: finds the sub-command, turns errors into messages and exit codes.

A new command is one file in this folder and one line in `COMMANDS`. Only the chosen command's module is
imported, so `bubblescope --help` stays quick whatever the commands need.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from bubblescope._version import __version__
from bubblescope.errors import BubblescopeError, UsageError


@dataclass(frozen=True)
class Entry:
    """Where a command lives, and its line in `bubblescope --help`."""

    target: str
    summary: str


COMMANDS = {
    "analyze": Entry("bubblescope.cli.analyze:analyze", "Traces or recordings → attribution, cost, report."),
    "attach": Entry("bubblescope.cli.attach:attach", "Record a job that is training, detach, report."),
    "cost": Entry("bubblescope.cli.cost:cost", "What a bubble of so many milliseconds costs."),
    "demo": Entry("bubblescope.cli.demo:demo", "Train a small pipeline here, record it, report its bubbles."),
    "diff": Entry("bubblescope.cli.diff:diff", "Two runs: what changed per cause, with the noise beside it."),
    "doctor": Entry("bubblescope.cli.doctor:doctor", "What can be recorded on this machine, and what is missing."),
    "run": Entry(
        "bubblescope.cli.run:run", "Start COMMAND, your own launcher, with the recorder loaded in every rank."
    ),
    "simulate": Entry(
        "bubblescope.cli.simulate:simulate",
        "Replay a schedule with the times you give: makespan, ratios, idle time by GPU and phase.",
    ),
    "watch": Entry("bubblescope.cli.watch:watch", "Live page and metrics over a recording that is being written."),
    "whatif": Entry(
        "bubblescope.cli.whatif:whatif", "Predicted step time, hours and money of each change to a run, best first."
    ),
}

ROOM = "make room there, or send the output elsewhere"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXIT_BUG = 1
EXIT_INTERRUPTED = 130


@dataclass
class State:
    """What the outermost level must know after a command failed."""

    debug: bool = False


class ReaderGone(Exception):
    """stdout was closed by who read it. Not a BrokenPipeError: click would turn that into exit status 1."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if all(p.name != "debug" for p in command.params):
            command.params.append(_debug_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no such command '{args[0]}'; there are: {', '.join(sorted(COMMANDS))}")
        return super().resolve_command(ctx, args)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    state = ctx.find_object(State)
    if value and state is not None:
        state.debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=_set_debug,
        help="Show the traceback of an error.",
    )


root = LazyGroup(
    name="bubblescope",
    help="Shows where pipeline-parallel training loses GPU time to bubbles, why, and what it costs.",
    epilog="\b\nExample:\n  bubblescope demo",
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
click.version_option(__version__, prog_name="bubblescope")(root)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; the only place where errors become messages."""
    state = State()
    try:
        result = root.main(
            args=None if arguments is None else list(arguments),
            prog_name="bubblescope",
            standalone_mode=False,
            obj=state,
        )
        sys.stdout.flush()
    except (BrokenPipeError, ReaderGone):
        return _reader_is_gone()
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        _say_usage(error)
        return error.exit_code
    except BubblescopeError as error:
        _say(error, debug=state.debug)
        return error.exit_code
    except OSError as error:
        if not _stdout_is_full(error):
            _say_bug(error, debug=state.debug)
            return EXIT_BUG
        _say(UsageError(f"cannot write to stdout: {error.strerror}", hint=ROOM), debug=state.debug)
        _silence_stdout()
        return UsageError.exit_code
    except Exception as error:  # whatever else arrives here is a bug, and must still be one line
        _say_bug(error, debug=state.debug)
        return EXIT_BUG
    return result if isinstance(result, int) else 0


def main() -> NoReturn:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "→" is no reason to fail
    sys.exit(run())


def _say(error: BubblescopeError, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)


def _say_usage(error: click.UsageError) -> None:
    click.echo(f"error: {error.format_message()}", err=True)
    if error.ctx is not None:
        click.echo(f"hint: {error.ctx.command_path} --help shows what it takes", err=True)


def _say_bug(error: Exception, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    first_line = (str(error).splitlines() or [""])[0]
    click.echo(f"error: {type(error).__name__}: {first_line} (this is a bug in bubblescope)", err=True)
    if not debug:
        click.echo("hint: run it again with --debug and report the traceback it prints", err=True)


def _stdout_is_full(error: OSError) -> bool:
    # Errors of files name their file, and commands turn them into UsageErrors (`output.writing`).
    return error.filename is None and error.errno in FULL


def _reader_is_gone() -> int:
    # `bubblescope … | head` has all it wanted.
    _silence_stdout()
    return 0


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more at exit; give it somewhere to write, or it would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
