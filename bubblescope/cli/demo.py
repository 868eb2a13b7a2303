"""`bubblescope demo`: a real pipeline-parallel training run here, recorded and analysed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import click

from bubblescope.cli import demo_worker
from bubblescope.cli.analyze import Outputs, check_outputs, deliver, make_report
from bubblescope.cli.output import OUTPUT_FOLDER, ended_by_sigterm, json_option, progress, results
from bubblescope.errors import ScheduleError, UsageError, writing
from bubblescope.model.notice import counted


def parse_imbalance(texts: tuple[str, ...], stages: int) -> dict[int, float]:
    """``("2=1.5", "0=2")`` → ``{2: 1.5, 0: 2.0}``. Raises UsageError on anything else.

    >>> parse_imbalance(("2=1.5", "0=2"), stages=4)
    {2: 1.5, 0: 2.0}
    """
    factors: dict[int, float] = {}
    for text in texts:
        stage, _, factor = text.partition("=")
        try:
            index, value = int(stage), float(factor)
        except ValueError:
            raise UsageError(
                f"'{text}' is not an imbalance", hint="it is STAGE=FACTOR, for example --imbalance 2=2"
            ) from None
        if not 0 <= index < stages:
            raise UsageError(f"stage {index} does not exist", hint=f"stages are 0 to {stages - 1}")
        if not 0 < value < float("inf"):
            raise UsageError(f"factor {factor} is not a finite number above 0", hint="1 leaves the stage as it is")
        factors[index] = value
    return factors


def torch_schedule(name: str) -> str:
    """The one spelling of a schedule that torch can train with. Raises UsageError for any other."""
    from bubblescope.replay.schedules import canonical

    known = ("GPipe", "1F1B", *demo_worker.MULTI)
    found = canonical(name)
    if found not in known:
        raise UsageError(
            f"torch has no schedule {found}",
            hint=f"it has {', '.join(known)}; `bubblescope simulate` knows the others too",
        )
    return found


@click.command(
    epilog="\b\nExample:\n  bubblescope demo\n  bubblescope demo --schedule GPipe --microbatches 16 --imbalance 0=3"
)
@click.option("--stages", type=click.IntRange(2, 64), default=4, show_default=True, metavar="N", help="Processes.")
@click.option("--microbatches", type=click.IntRange(1), default=8, show_default=True, metavar="M", help="Per step.")
@click.option("--schedule", default="1F1B", show_default=True, metavar="S", help="Any schedule of torch's.")
@click.option(
    "--imbalance",
    multiple=True,
    metavar="STAGE=FACTOR",
    help="Make a stage slower; may be repeated; 1 = not slower.  [default: the last but one = 2]",
)
@click.option("--steps", type=click.IntRange(3), default=12, show_default=True, metavar="K", help="Training steps.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    default=Path("demo-out"),
    show_default=True,
    metavar="DIR",
    help="For report.html, report.json and recording/.",
)
@json_option
def demo(
    stages: int,
    microbatches: int,
    schedule: str,
    imbalance: tuple[str, ...],
    steps: int,
    device: str,
    out: Path,
    json_to: str | None,
) -> None:
    """Train a small pipeline here, record it, report its bubbles.

    One process per stage: NCCL where there are enough GPUs, else gloo on the CPU. The training is real, and the
    recorder is the one that a job of yours would use.
    """
    from bubblescope.report.build import ReportOptions

    chosen = demo_worker.DemoOptions(
        out=str(out / "recording"),
        stages=stages,
        microbatches=microbatches,
        schedule=torch_schedule(schedule),
        imbalance=parse_imbalance(imbalance or (f"{stages - 2}=2",), stages),
        steps=steps,
        device=device,
    )
    check_schedule(chosen)
    outputs = Outputs(out=out, json=json_to)
    check_outputs(outputs)
    prepare(out / "recording")
    with ended_by_sigterm():
        losses = train(chosen)
    report = make_report([chosen.out], ReportOptions())
    deliver(report, outputs)
    console = results(json_to)
    for line in closing(chosen, losses):
        console.print(line, markup=False, soft_wrap=True)


def check_schedule(options: demo_worker.DemoOptions) -> None:
    """Raise UsageError where torch would refuse the schedule for these numbers, each process in its own words."""
    from bubblescope.replay.schedules import check_numbers

    try:
        check_numbers(options.schedule, options.stages, options.microbatches, options.chunks)
    except ScheduleError as error:
        raise UsageError(error.what, hint=error.hint) from error


def prepare(folder: Path) -> None:
    """Make the folder, and see that files can be written there, before minutes go into what they would hold."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"?")
        except OSError as error:
            error.filename = str(folder)
            raise


def train(options: demo_worker.DemoOptions) -> list[float]:
    """Run the training where an earlier demo left nothing behind; give the loss of each step."""
    device = demo_worker.pick_device(options.device, options.stages)
    if note := demo_worker.pace_note(options, device):
        click.echo(note, err=True)
    with writing(options.out):
        remove_recording(Path(options.out))
    batches = counted(options.microbatches, "micro-batch", "micro-batches")
    with progress(f"training: {options.schedule}, {options.stages} stages, {batches}"):
        return demo_worker.launch(options)


def remove_recording(folder: Path) -> None:
    """Remove the files of an earlier recording, and nothing else, so that two runs are never read as one."""
    for path in [*folder.glob("rank-*.jsonl"), *folder.glob("job.json")]:
        path.unlink()


def closing(options: demo_worker.DemoOptions, losses: list[float]) -> list[str]:
    """What the user should know last: that the training was real, what was made slow, and how to go on."""
    slowed = [f"stage {s} made {f:g} times as slow" for s, f in sorted(options.imbalance.items()) if f != 1]
    return [
        f"training: loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps; "
        + (", ".join(slowed) or "all stages alike"),
        f"again:  {called_as()} analyze {options.out} --price-per-gpu-hour 2.50",
    ]


def called_as() -> str:
    """What the user can type to call us again: our name, or where it is not on the PATH, our path or Python's."""
    if shutil.which("bubblescope"):
        return "bubblescope"
    script = Path(sys.argv[0])
    if script.stem != "bubblescope" or not os.access(script, os.X_OK):
        return f"{shlex.quote(sys.executable)} -m bubblescope"
    inside = script.is_relative_to(Path.cwd())
    return shlex.quote(str(script.relative_to(Path.cwd()) if inside else script))
