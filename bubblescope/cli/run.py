"""`bubblescope run`: the user's own launch command, with the recorder loaded in every rank."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from bubblescope.attach import launcher
from bubblescope.capture import notes
from bubblescope.capture.environment import FRAMEWORKS, Settings, parse_ranks
from bubblescope.cli.output import OUTPUT_FOLDER, json_option, write_json
from bubblescope.errors import UsageError
from bubblescope.model.notice import counted


@click.command(
    epilog="\b\nExample:\n  bubblescope run -- torchrun --nproc-per-node 8 train.py --config my.yaml\n"
    "  bubblescope run --out runs/x --steps 50 --every 10 -- deepspeed train.py\n"
    "  bubblescope analyze runs/x",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    metavar="DIR",
    help="For the recording, one folder per job; what an earlier one left there stays and is not counted.  "
    "[default: runs/<job or time>]",
)
@click.option(
    "--framework",
    type=click.Choice(FRAMEWORKS),
    default="auto",
    show_default=True,
    help="Whose hooks go in; auto: of what the job imports.",
)
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Stop after N recorded steps, not counting warm-up.")
@click.option(
    "--every",
    type=click.IntRange(1),
    metavar="N",
    help="Record one step in N.  [default: all; one in 10 on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=1]",
)
@click.option(
    "--warmup", type=click.IntRange(0), default=1, show_default=True, metavar="N", help="First steps to leave out."
)
@click.option("--ranks", metavar="LIST", help="Record these global ranks only, for example 0,4-7.")
@click.option("--standby", is_flag=True, help="Do not record; only make `bubblescope attach` possible.")
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    out: Path | None,
    framework: str,
    steps: int | None,
    every: int | None,
    warmup: int,
    ranks: str | None,
    standby: bool,
    json_to: str | None,
    command: tuple[str, ...],
) -> int:
    """Start COMMAND, your own launcher, with the recorder loaded in every rank.

    The training script stays as it is, and exit status and signals are those of COMMAND. Processes that run no
    pipeline (the launcher itself, data loading workers) are left alone. The recording is for `bubblescope analyze`.
    The JSON is {out, ranks_recorded, exit_status}; with `--json -` what COMMAND prints goes to stderr.
    """
    recording = {"--out": out, "--steps": steps, "--every": every, "--ranks": ranks}
    given = [name for name, value in recording.items() if value is not None]
    if standby and given:
        raise UsageError(f"{given[0]} is of a recording, and --standby records none", hint="give it without --standby")
    folder = out or launcher.default_folder()
    settings = Settings(
        "standby" if standby else "record",
        str(folder.absolute()),
        framework,
        steps,
        every,
        warmup,
        None if ranks is None else parse_ranks(ranks),
    )
    before = None if standby else launcher.recorded_sizes(folder)
    with notes.folder() as noted:
        settings = replace(settings, notes=str(noted or ""))
        status = launcher.launch(command, settings, quiet_stdout=json_to == "-")
        found = notes.read(noted)
    after = None if before is None else launcher.recorded_sizes(folder)
    files = None if before is None or after is None else _files(before, after, found)
    if files:
        notes.leave(notes.INNER, str(folder))
    recorded = None if files is None else launcher.ranks_of(files)
    if not standby:
        click.echo(f"bubblescope: {_closing(folder, before, files, found, settings, status)}", err=True)
    if json_to:
        try:
            write_json({"out": str(folder), "ranks_recorded": recorded, "exit_status": status}, json_to)
        except UsageError as error:  # the exit status is the command's, whatever becomes of our file
            click.echo(f"warning: {error}", err=True)
    return launcher.end_like(status)


def _is_one_rank() -> bool:
    """Whether a launcher started this process for one of its ranks. (SLURM_PROCID says nothing: a batch script, which
    starts them all, has it too.)"""
    return any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def _files(before: Mapping[str, int], after: Mapping[str, int], found: Mapping[str, str]) -> list[str]:
    """The files that this command's ranks wrote, not those that start beside it under the same launcher."""
    written = launcher.written_files(before, after)
    mine = notes.ranks(found)
    if not _is_one_rank() or not mine:
        return written
    return [name for name in written if name.split(".")[0] in mine]


def _closing(
    folder: Path,
    before: Mapping[str, int] | None,
    files: Sequence[str] | None,
    found: Mapping[str, str],
    settings: Settings,
    status: int,
) -> str:
    if files is None:
        return f"{folder} does not answer; look there later"
    if not files:
        return f"nothing was recorded: {_why_nothing(found, settings, status)}"
    lost = f", not whole ({found[notes.LOST]})" if notes.LOST in found else ""
    # Beside an earlier recording the folder alone would not say which of them is meant.
    alone = _is_one_rank() or not before
    paths = [folder] if alone else [folder / name for name in files]
    command = shlex.join(["bubblescope", "analyze", *map(str, paths)])
    return f"{counted(launcher.ranks_of(files), 'rank')} recorded{lost}; see: {command}"


_FRAMEWORKS = {"torch": "torch", "megatron": "Megatron-Core", "deepspeed": "DeepSpeed"}
_ENVIRONMENT = (
    "PYTHONPATH and BUBBLESCOPE must reach every rank: python -E, -I or -S, env -i, sudo and containers drop them"
)
_SPANS = "mark your own loop with bubblescope.span and bubblescope.step"


def _why_nothing(found: Mapping[str, str], settings: Settings, status: int) -> str:
    """The most likely reason, by what the processes of the job left."""
    if notes.LOST in found:
        return found[notes.LOST]
    if notes.INNER in found:
        return f"the command did so itself, by `bubblescope run` or bubblescope.record, into {found[notes.INNER]}"
    world = found.get(notes.UNCHOSEN, "")
    if settings.ranks is not None and world and min(settings.ranks) >= int(world):
        return f"--ranks names none of the {counted(int(world), 'rank')} of this job, which are numbered from 0"
    ended = f"the command ended {_how(status)}, and " if status else ""
    which = _FRAMEWORKS.get(settings.framework, "torch, Megatron-Core or DeepSpeed")
    only = "" if settings.framework == "auto" else f"; --framework {settings.framework} leaves out others'"
    if notes.LOADED not in found:
        return f"{ended}no Python process that imports torch had the recorder in it ({_ENVIRONMENT})"
    if notes.IMPORTED not in found:
        return f"{ended}no process here imported a pipeline of {which}{only} ({_SPANS}; {_ENVIRONMENT})"
    if notes.MARKED in found:
        return f"{ended}no step ended of what bubblescope.span marks (bubblescope.step() says where one does)"
    chosen = "" if notes.UNCHOSEN not in found else " among the ranks that --ranks names"
    return f"{ended}no process{chosen or ' here'} ran a pipeline of {which}{only} ({_SPANS})"


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with exit status {status}"
