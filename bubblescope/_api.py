"""The two verbs of the Python API; the command line goes the same way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Executor

from bubblescope.align import prepare
from bubblescope.errors import UsageError
from bubblescope.ingest import ReadOptions, read, usernames
from bubblescope.model import checks
from bubblescope.model.run import Run
from bubblescope.report.build import Report, ReportOptions, build

PathLike = str | os.PathLike[str]


def load(
    path: PathLike | Iterable[PathLike],
    executor: Executor | None = None,
    *,
    format: str = "auto",
    names: PathLike | None = None,
    max_events: int | None = None,
    max_bytes: int | None = None,
) -> Run:
    """Read traces or recordings into one `Run`: all that was measured, nothing concluded.

    path: a file, a folder, a glob or an fsspec URL, or several of them. executor: anything with the interface of
    `concurrent.futures.Executor`; one rank is read per task. format: a key of `ingest.FORMATS`, where it must not be
    recognised. names: a TOML file that says what your own names of ranges and kernels mean (`ingest.usernames`).
    max_events, max_bytes: limits of one file, unpacked (by default 50 million events and 16 GiB).

    Raises UsageError (a ValueError) for arguments that make no sense, InputError when nothing can be analysed.
    """
    if isinstance(path, str | bytes | os.PathLike) or not isinstance(path, Iterable):
        path = [path]
    paths = [checks.path("path", p) for p in path]
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise UsageError(f"executor is {checks.shown(executor)}, but must have a method submit")
    options = ReadOptions(names=() if names is None else usernames.load(checks.path("names", names)))
    limits = (
        None if given is None else checks.whole(name, given)
        for name, given in (("max_events", max_events), ("max_bytes", max_bytes))
    )
    return read(paths, format=format, executor=executor, options=options.limited(*limits))


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

    Raises UsageError (a ValueError) for a price that is negative or not finite, for numbers below 1 and for whatever is
    not a `Run`; InputError when the run shows no finished step.
    """
    if not isinstance(run, Run):
        raise UsageError(
            f"run is {checks.shown(run)}, but must be a Run", hint="bubblescope.analyze(bubblescope.load(path))"
        )
    options = ReportOptions(
        price_per_gpu_hour=price_per_gpu_hour,
        currency=currency,
        gpus=gpus,
        total_steps=total_steps,
        schedule=schedule,
        microbatches=microbatches,
        stages=stages,
    )
    return build(prepare(run), options)
