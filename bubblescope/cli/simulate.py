"""`bubblescope simulate`: replay of a schedule with given times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from bubblescope.cli.output import (
    OUTPUT_FILE_OR_STDOUT,
    check_targets,
    json_option,
    results,
    stdout_owner,
    write_json,
    write_text,
)
from bubblescope.errors import InputError, ScheduleError, UsageError
from bubblescope.model.kinds import SHORT
from bubblescope.model.notice import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from bubblescope.replay.engine import Simulation
    from bubblescope.replay.schedules import Schedule

EPILOG = """\b
Examples:
  bubblescope simulate --schedule 1F1B --stages 4 --microbatches 8 --forward 1 --input-grad 1 --weight-grad 1
  bubblescope simulate --schedule Interleaved1F1B --stages 4 --microbatches 8 --chunks 2 \\
      --forward 5 --input-grad 5 --weight-grad 5 --comm 0.4 --scale-per-stage 1,1,1,1.3 --show-plot
"""


@click.command(epilog=EPILOG)
@click.option(
    "--schedule", metavar="S", help="A known schedule: GPipe, 1F1B, Interleaved1F1B, ZB-H1, DualPipeV, …"
)
@click.option(
    "--schedule-csv", metavar="FILE", help="An order of your own, as torch's schedule CSV (either format)."
)
@click.option("--stages", type=int, metavar="P", help="GPUs in the pipeline.")
@click.option("--microbatches", type=int, metavar="M", help="Micro-batches per step.")
@click.option(
    "--chunks", type=int, metavar="V", help="Virtual stages per GPU; by default what the schedule needs."
)
@click.option(
    "--forward", type=float, required=True, metavar="F", help="Time of one chunk's forward, in any unit."
)
@click.option("--input-grad", type=float, required=True, metavar="I", help="Time of its input gradient.")
@click.option(
    "--weight-grad", type=float, required=True, metavar="W", help="Time of its weight gradient (B = I + W)."
)
@click.option(
    "--comm", type=float, default=0.0, show_default=True, metavar="C", help="Time of one hop between GPUs."
)
@click.option(
    "--scale-per-stage", metavar="a,b,…", help="Factors on F, I and W: one per GPU, or one per chunk stage."
)
@click.option("--show-plot", is_flag=True, help="Draw the timeline as text.")
@click.option(
    "--write-csv",
    type=OUTPUT_FILE_OR_STDOUT,
    metavar="FILE|-",
    help="Write the order as torch's compute_only schedule CSV.",
)
@json_option
def simulate(
    schedule: str | None,
    schedule_csv: str | None,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    forward: float,
    input_grad: float,
    weight_grad: float,
    comm: float,
    scale_per_stage: str | None,
    show_plot: bool,
    write_csv: str | None,
    json_to: str | None,
) -> None:
    """Replay a schedule with the times you give: makespan, ratios, idle time by GPU and phase.

    F, I and W are times of one operation on one chunk; every figure comes back in the same unit.
    """
    import numpy as np

    from bubblescope.replay import engine
    from bubblescope.replay.schedule_csv import to_csv

    owner = stdout_owner(**{"json": json_to, "write-csv": write_csv})
    check_targets(("--json", json_to), ("--write-csv", write_csv))
    chosen = _chosen(schedule, schedule_csv, stages, microbatches, chunks)
    scale = _factors(scale_per_stage)
    with np.errstate(all="ignore"):
        sim = engine.simulate(chosen, forward, input_grad, weight_grad, comm, scale_per_stage=scale)
    _check_finite(sim)
    if write_csv:
        write_text(to_csv(chosen), write_csv)
    if json_to:
        write_json(as_json(chosen, sim), json_to)
    console = results(owner)
    for line in summary_lines(chosen, sim):
        console.print(line, markup=False)
    console.print(_table(sim))
    if show_plot:
        for row in timeline(sim, max(20, min(console.width, 160) - 6)):
            console.print(row)


def _chosen(
    name: str | None, csv: str | None, stages: int | None, microbatches: int | None, chunks: int | None
) -> Schedule:
    """The `Schedule` that the options describe. Raises UsageError where they contradict each other."""
    from bubblescope.replay.schedules import canonical

    wanted = canonical(name) if name else None
    if csv is None:
        if wanted is None or wanted == "custom":
            raise UsageError(
                "no order to replay", hint="give --schedule with a known name, or --schedule-csv FILE"
            )
        if stages is None or microbatches is None:
            raise UsageError(f"{wanted} needs --stages and --microbatches")
        return _made(wanted, stages, microbatches, chunks)
    loaded = _loaded(csv)
    if wanted not in (None, "custom", loaded.name):
        raise UsageError(
            f"the order is {loaded.name}, not {wanted}", where=csv, hint="leave --schedule out, or say custom"
        )
    given = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    for what, value in given.items():
        found = getattr(loaded, what)
        if value is not None and value != found:
            raise UsageError(f"the order has {found} {what}, --{what} says {value}", where=csv)
    return loaded


def _made(name: str, stages: int, microbatches: int, chunks: int | None) -> Schedule:
    """As `schedules.make`; numbers that do not go together are the options' fault, and so UsageErrors."""
    from bubblescope.replay.schedules import make

    try:
        return make(name, stages, microbatches, chunks)
    except ScheduleError as error:
        raise UsageError(error.what, hint=error.hint) from error


def _loaded(csv: str) -> Schedule:
    """As `schedule_csv.load_csv`; every error says what to do."""
    from bubblescope.replay.schedule_csv import load_csv

    try:
        return load_csv(csv)
    except InputError as error:
        if error.hint:
            raise
        hint = "one row per GPU, each operation once, cells such as 0F0,0F1,0B0"
        if isinstance(error.__cause__, OSError):
            hint = "check the path; `bubblescope simulate --write-csv FILE` writes such a file"
        elif isinstance(error.__cause__, UnicodeDecodeError):
            hint = "save it as UTF-8 text; " + hint
        raise type(error)(error.what, hint=hint, where=error.where) from error


def _check_finite(sim: Simulation) -> None:
    figures = (sim.makespan, *sim.busy, *sim.idle, sim.fraction, sim.over_ideal, sim.own_span_rate, sim.straggler_waste)
    if not all(math.isfinite(x) for x in figures):
        raise UsageError(
            "with these times the step is too long, or too short, to be counted", hint="give them in another unit"
        )


def _factors(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--scale-per-stage '{text}' is not a list of numbers", hint="for example --scale-per-stage 1,1,1,1.5"
        ) from None


def as_json(schedule: Schedule, sim: Simulation) -> dict[str, Any]:
    """The fields of CONTRACT.md. `busy` at the top is the mean over the GPUs."""
    from bubblescope.replay.engine import PHASES

    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "makespan": sim.makespan,
        "busy": float(sim.busy.mean()),
        "fraction": sim.fraction,
        "over_ideal": sim.over_ideal,
        "own_span_rate": sim.own_span_rate,
        "straggler_waste": sim.straggler_waste,
        "gpus": [
            {
                "rank": rank,
                "busy": float(sim.busy[i]),
                "idle": float(sim.idle[i]),
                "phases": {phase: float(x) for phase, x in zip(PHASES, sim.phases[i], strict=True)},
            }
            for i, rank in enumerate(sim.dag.ranks)
        ],
        "peak_activations": list(sim.peak_activations),
    }


def summary_lines(schedule: Schedule, sim: Simulation) -> list[str]:
    """The words above the table."""
    return [
        f"{schedule.name}: {counted(schedule.stages, 'GPU')}, {counted(schedule.chunks, 'chunk')} each, "
        f"{counted(schedule.microbatches, 'micro-batch', 'micro-batches')}",
        f"makespan         {sim.makespan:.6g}   busy {float(sim.busy.mean()):.6g} per GPU on average",
        f"fraction         {sim.fraction:.4f}   idle / makespan",
        f"over_ideal       {sim.over_ideal:.4f}   idle / busy",
        f"own_span_rate    {sim.own_span_rate:.4f}   idle within a GPU's own first start and last end",
        f"straggler_waste  {sim.straggler_waste:.4f}   lost because stages are not equally fast",
    ]


def _table(sim: Simulation) -> Table:
    from rich.table import Table

    from bubblescope.replay.engine import PHASES

    table = Table("GPU", "busy", "idle", *PHASES, "peak activations", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for i, rank in enumerate(sim.dag.ranks):
        times = [sim.busy[i], sim.idle[i], *sim.phases[i]]
        table.add_row(str(rank), *(f"{x:.6g}" for x in times), f"{sim.peak_activations[i]}")
    return table


STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "magenta", "X": "yellow", ".": "dim"}
LEGEND = (
    "F forward  B backward  I input gradient  W weight gradient  X forward over backward  . idle; small: odd chunk"
)


def timeline(sim: Simulation, width: int) -> list[Text]:
    """One line of rich text per GPU, `width` cells each; a cell shows what runs at its middle.

    Letters are the operation's (F, B, I, W; X for an overlapped pair), small where the chunk is an odd one; idle
    cells are dots.
    """
    from rich.text import Text

    lines = []
    for rank, cells in zip(sim.dag.ranks, timeline_cells(sim, width), strict=True):
        line = Text(f"{rank:>4}  ", style="bold")
        for cell in cells:
            line.append(cell, style=STYLES[cell.upper()])
        lines.append(line)
    axis = f"{sim.makespan:.6g}"
    lines.append(Text("      0" + axis.rjust(width - 1)))
    lines.append(Text(f"      {LEGEND}"))
    return lines


def timeline_cells(sim: Simulation, width: int) -> list[str]:
    """The cells of `timeline`, without colour."""
    chunk = _chunk_parity(sim)
    rows = {rank: ["."] * width for rank in sim.dag.ranks}
    shared = [count > 1 for count in _ops_per_node(sim)]
    for op, action in enumerate(sim.actions):
        letter = "X" if shared[sim.dag.node[op]] else SHORT[action.kind]
        first, last = _covered(sim.start[op], sim.end[op], sim.makespan, width)
        for cell in range(first, last):
            rows[int(sim.dag.rank[op])][cell] = letter.lower() if chunk[action.stage] else letter
    return ["".join(cells) for cells in rows.values()]


def _ops_per_node(sim: Simulation) -> list[int]:
    counts = [0] * sim.dag.graph.n_nodes
    for node in sim.dag.node:
        counts[node] += 1
    return counts


def _covered(start: float, end: float, makespan: float, width: int) -> tuple[int, int]:
    """The cells [first, last) whose middle lies in [start, end)."""
    scale = width / makespan
    return max(0, math.ceil(start * scale - 0.5)), min(width, math.ceil(end * scale - 0.5))


def _chunk_parity(sim: Simulation) -> dict[int, bool]:
    """{virtual stage: whether it is its GPU's second, fourth, … chunk}."""
    parity = {}
    for rank in sim.dag.ranks:
        mine = sorted({a.stage for a, r in zip(sim.actions, sim.dag.rank, strict=True) if r == rank})
        parity.update({stage: bool(i % 2) for i, stage in enumerate(mine)})
    return parity
