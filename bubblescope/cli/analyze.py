"""`bubblescope analyze`: traces or recordings → attribution, cost, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bubblescope.cli.output import (
    OUTPUT_FILE,
    OUTPUT_FOLDER,
    FiniteRange,
    check_targets,
    ended_by_sigterm,
    json_option,
    limit_options,
    markdown_option,
    names_option,
    progress,
    reading,
    require,
    results,
    spare_inputs,
    stdout_owner,
    warn,
    write_text,
)
from bubblescope.errors import InputError, ThresholdExceeded, UsageError, writing
from bubblescope.model.notice import Notice

if TYPE_CHECKING:
    from bubblescope.ingest.parallel import Executor
    from bubblescope.report.build import Report, ReportOptions

Command = TypeVar("Command", bound=Callable[..., Any])

WORTH_A_POOL = 48 << 20
"""Bytes of (packed) traces from which on processes are started without being asked for: about a second of reading."""


@dataclass(frozen=True)
class Outputs:
    """What to write, and where. `out` stands for out/report.html and out/report.json, beside the others."""

    out: Path | None = None
    html: Path | None = None
    json: str | None = None
    markdown: str | None = None
    csv: Path | None = None
    perfetto: Path | None = None
    parquet: Path | None = None
    tensorboard: Path | None = None

    @property
    def files(self) -> list[tuple[str, str | Path | None]]:
        """Every file, with the option that asks for it."""
        return [
            *(("--html", path) for path in self.html_files),
            *(("--json", path) for path in self.json_files),
            ("--markdown", self.markdown),
            ("--perfetto", self.perfetto),
        ]

    @property
    def html_files(self) -> list[Path]:
        return [*([self.out / "report.html"] if self.out else []), *([self.html] if self.html else [])]

    @property
    def json_files(self) -> list[str]:
        return [*([str(self.out / "report.json")] if self.out else []), *([self.json] if self.json else [])]


def report_options(command: Command) -> Command:
    """The options that say what the trace cannot: price, size of the job, shape of the pipeline."""
    options = [
        click.option(
            "--price-per-gpu-hour",
            "price",
            type=FiniteRange(min=0),
            metavar="P",
            help="Your price; without one there are hours and no money.",
        ),
        click.option("--currency", default="USD", show_default=True, metavar="C", help="Name beside the money."),
        click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of the whole job; else those seen."),
        click.option(
            "--total-steps",
            type=click.IntRange(min=1),
            metavar="N",
            help="Steps of the whole training; else those analysed.",
        ),
        click.option("--schedule", metavar="S", help="Overrules the schedule that was seen, in the closed form."),
        click.option("--microbatches", type=click.IntRange(min=1), metavar="M", help="The same for m."),
        click.option("--stages", type=click.IntRange(min=1), metavar="P", help="The same for the stages."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    epilog="\b\nExample:\n"
    "  bubblescope analyze demo-out/recording --out report --price-per-gpu-hour 2.50\n"
    "  bubblescope analyze 'traces/rank*.json.gz' --json - | jq .bubble"
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    metavar="DIR",
    help="Write DIR/report.html and DIR/report.json.",
)
@click.option("--html", type=OUTPUT_FILE, metavar="FILE", help="Write the report as one HTML file.")
@json_option
@markdown_option
@click.option("--csv", type=OUTPUT_FOLDER, metavar="DIR", help="Write tables as CSV.")
@click.option("--perfetto", type=OUTPUT_FILE, metavar="FILE", help="Write a timeline for ui.perfetto.dev.")
@click.option("--parquet", type=OUTPUT_FOLDER, metavar="DIR", help="Write tables as Parquet.")
@click.option(
    "--tensorboard",
    type=OUTPUT_FOLDER,
    metavar="DIR",
    help="Write summaries, and traces for torch-tb-profiler.",
)
@click.option(
    "--format",
    "format_name",
    default="auto",
    show_default=True,
    metavar="F",
    help="Format of the input, where it must not be recognised.",
)
@names_option
@limit_options
@report_options
@click.option(
    "--engine",
    type=click.Choice(["local", "dask"]),
    default="local",
    show_default=True,
    help="Where files are read.",
)
@click.option("--scheduler", metavar="ADDR", help="Address of a running dask scheduler.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that read traces; default: one a processor, when there is enough to read.",
)
@click.option("--no-cache", is_flag=True, help="Read all traces anew, and keep nothing of them for the next time.")
@click.option("--keep-cpu-ops", is_flag=True, help="Keep operators of the host that the analysis has no use for.")
@click.option(
    "--fail-above",
    type=FiniteRange(0, 1),
    metavar="FRACTION",
    help="Exit with 5 when the bubble fraction is above this.",
)
def analyze(
    paths: tuple[str, ...],
    out: Path | None,
    html: Path | None,
    json_to: str | None,
    markdown_to: str | None,
    csv: Path | None,
    perfetto: Path | None,
    parquet: Path | None,
    tensorboard: Path | None,
    format_name: str,
    names_file: Path | None,
    max_events: int | None,
    max_bytes: int | None,
    price: float | None,
    currency: str,
    gpus: int | None,
    total_steps: int | None,
    schedule: str | None,
    microbatches: int | None,
    stages: int | None,
    engine: str,
    scheduler: str | None,
    jobs: int | None,
    no_cache: bool,
    keep_cpu_ops: bool,
    fail_above: float | None,
) -> None:
    """Traces or recordings → attribution, cost, report.

    PATH is a file, a folder, a glob or an fsspec URL. Prints a summary; writes only what is asked for.
    """
    from bubblescope.report.build import ReportOptions

    options = ReportOptions(
        price_per_gpu_hour=price,
        currency=currency,
        gpus=gpus,
        total_steps=total_steps,
        schedule=schedule,
        microbatches=microbatches,
        stages=stages,
    )
    outputs = Outputs(
        out=out, html=html, json=json_to, markdown=markdown_to, csv=csv, perfetto=perfetto, parquet=parquet,
        tensorboard=tensorboard,
    )  # fmt: skip
    check_outputs(outputs)
    with reading_pool(engine, scheduler, jobs) as executor:
        report = make_report(
            list(paths),
            options,
            format_name=format_name,
            executor=executor,
            names_file=names_file,
            max_events=max_events,
            max_bytes=max_bytes,
            cache=not no_cache,
            keep_cpu_ops=keep_cpu_ops,
        )
    spare_inputs([*report.run.source.files, names_file], *outputs.files)
    deliver(report, outputs)
    check_threshold(report, fail_above)


def make_report(
    paths: list[str],
    options: ReportOptions,
    *,
    format_name: str = "auto",
    executor: Executor | None = None,
    names_file: Path | None = None,
    max_events: int | None = None,
    max_bytes: int | None = None,
    cache: bool = True,
    keep_cpu_ops: bool = False,
) -> Report:
    """Read, align, attribute. Raises InputError when there is nothing to analyse."""
    from bubblescope.align import prepare
    from bubblescope.ingest import ReadOptions, read, usernames
    from bubblescope.report.build import build

    names = () if names_file is None else usernames.load(names_file)
    chosen = ReadOptions(names=names, cache=cache, keep_cpu_ops=keep_cpu_ops).limited(max_events, max_bytes)
    with ended_by_sigterm(), reading():
        run = read(paths, format=format_name, executor=executor, options=chosen)
    with progress("attributing"):
        run = prepare(run)  # by the same name, so that what labels have replaced is not held beside it
        return build(run, options)


def check_outputs(outputs: Outputs) -> None:
    """Raise UsageError, before anything is read, for outputs that cannot be written together or at all."""
    stdout_owner(json=outputs.json, markdown=outputs.markdown)
    check_targets(*outputs.files)
    if outputs.parquet is not None:
        require("--parquet", "parquet", "pyarrow")
    if outputs.tensorboard is not None:
        require("--tensorboard", "tensorboard", "tensorboard")


def deliver(report: Report, outputs: Outputs) -> None:
    """Write what was asked for, print the summary to stdout and the warnings to stderr."""
    from bubblescope.views import console, csv, html, json, markdown, parquet, perfetto, tensorboard

    for page in outputs.html_files:
        with writing(page):
            page.parent.mkdir(parents=True, exist_ok=True)
            html.write(report, page)
    for target in outputs.json_files:
        write_text(json.render(report), target)
    if outputs.markdown is not None:
        write_text(markdown.render(report), outputs.markdown)
    if outputs.csv is not None:
        with writing(outputs.csv):
            csv.write(report, outputs.csv)
    if outputs.perfetto is not None:
        with writing(outputs.perfetto):
            outputs.perfetto.parent.mkdir(parents=True, exist_ok=True)
            perfetto.write(report, outputs.perfetto)
    for folder, view in ((outputs.parquet, parquet), (outputs.tensorboard, tensorboard)):
        if folder is not None:
            with writing(folder):
                view.write(report, folder)
    owner = stdout_owner(json=outputs.json, markdown=outputs.markdown)
    console.print_summary(report, results(owner), next(iter(outputs.html_files), None))
    warn(Notice(w["code"], w["message"], w["file"] or "") for w in report.data["source"]["warnings"])


def check_threshold(report: Report, fail_above: float | None) -> None:
    """Raise ThresholdExceeded when the bubble fraction is above `fail_above`, InputError when it is unknown."""
    if fail_above is None:
        return
    fraction = report.data["bubble"]["fraction"]
    if fraction is None:
        raise InputError(
            "the bubble fraction cannot be measured on this input, so it cannot be compared with --fail-above",
            hint="the warnings above say what is missing",
        )
    if fraction > fail_above:
        raise ThresholdExceeded(f"bubble fraction {fraction:.4f} is above the limit of {fail_above:.4f}")


@contextmanager
def reading_pool(engine: str, scheduler: str | None, jobs: int | None) -> Iterator[Executor | None]:
    """The executor that reads files: None (this process), local processes, or a running dask cluster."""
    if engine == "dask":
        with _dask_pool(scheduler) as executor:
            yield executor
        return
    if scheduler is not None:
        raise UsageError("--scheduler needs --engine dask", hint="add --engine dask, or leave --scheduler out")
    from bubblescope.ingest.parallel import cpus
    from bubblescope.ingest.pool import LocalPool

    processes = jobs or cpus()
    if processes == 1:
        yield None
        return
    with LocalPool(processes, at_least=0 if jobs else WORTH_A_POOL) as pool:
        yield pool


@contextmanager
def _dask_pool(scheduler: str | None) -> Iterator[Executor]:
    if scheduler is None:
        raise UsageError(
            "--engine dask needs the address of a scheduler", hint="for example --scheduler tcp://127.0.0.1:8786"
        )
    require("--engine dask", "dask", "distributed")
    import logging

    from distributed import Client

    from bubblescope.ingest.cluster import DaskPool

    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is said by us, without tracebacks
    try:
        client = Client(scheduler, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no dask scheduler answers at {scheduler}", hint="is it running, and is the address right?"
        ) from error
    with client:
        yield DaskPool(client, lambda what: click.echo(f"warning: {what}", err=True))
