"""The two verbs of the Python API; the command line goes the same way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor

from bubblescope.align import prepare
from bubblescope.ingest import ReadOptions, read, usernames
from bubblescope.model.run import Run
from bubblescope.replay.schedules import canonical
from bubblescope.report.build import Report, ReportOptions, build

PathLike = str | os.PathLike[str]


def load(
    path: PathLike | Sequence[PathLike],
    executor: Executor | None = None,
    *,
    format: str = "auto",
    names: PathLike | None = None,
) -> Run:
    """Read traces or recordings into one `Run`: all that was measured, nothing concluded.

    path: a file, a folder, a glob or an fsspec URL, or several of them. executor: anything with the interface of
    `concurrent.futures.Executor`; one rank is read per task. names: a TOML file that says what your own names of
    ranges mean (`ingest.usernames`). Raises UsageError for arguments that make no sense, InputError when
    nothing can be analysed.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    options = ReadOptions(names=() if names is None else usernames.load(os.fspath(names)))
    return read([os.fspath(p) for p in paths], format=format, executor=executor, options=options)


def analyze(
    run: Run,
    *,
    price_per_gpu_hour: float | None = None,
    currency: str = "USD",
    gpus: int | None = None,
    total_steps: int | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
) -> Report:
    """Attribute every idle nanosecond of `run` to a cause and price it.

    Without `price_per_gpu_hour` the report has hours and no money. `gpus` and `total_steps` scale the cost to the
    whole job. `schedule`, `microbatches` and `stages` overrule what the trace says or does not say.
    """
    options = ReportOptions(
        price_per_gpu_hour=price_per_gpu_hour,
        currency=currency,
        gpus=gpus,
        total_steps=total_steps,
        schedule=None if schedule is None else canonical(schedule),
        microbatches=microbatches,
        stages=stages,
    )
    return build(prepare(run), options)
