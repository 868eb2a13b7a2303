"""`bubblescope run`: the user's own launch command, with the recorder loaded in every rank."""

from __future__ import annotations

from pathlib import Path

import click

from bubblescope.attach import launcher
from bubblescope.capture.environment import FRAMEWORKS, Settings, parse_ranks
from bubblescope.cli.output import OUTPUT_FOLDER, json_option, write_json
from bubblescope.errors import UsageError
from bubblescope.views.format import counted


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
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Stop recording after N recorded steps.")
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
    status = launcher.launch(command, settings, quiet_stdout=json_to == "-")
    after = None if before is None else launcher.recorded_sizes(folder)
    recorded = None if before is None or after is None else launcher.recorded_ranks(before, after)
    if not standby:
        click.echo(_closing(folder, recorded), err=True)
    if json_to:
        try:
            write_json({"out": str(folder), "ranks_recorded": recorded, "exit_status": status}, json_to)
        except UsageError as error:  # the exit status is the command's, whatever becomes of our file
            click.echo(f"warning: {error}", err=True)
    return launcher.end_like(status)


def _closing(folder: Path, ranks: int | None) -> str:
    if ranks is None:
        return f"bubblescope: {folder} does not answer; look there later"
    if not ranks:
        return (
            "bubblescope: nothing was recorded: no process here ran a pipeline of torch, Megatron-Core or DeepSpeed "
            "(mark your own loop with bubblescope.span and bubblescope.step)"
        )
    return f"bubblescope: {counted(ranks, 'rank')} recorded; see: bubblescope analyze {folder}"
