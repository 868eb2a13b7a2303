"""`Report`: what was concluded about a run, as report.json (CONTRACT.md) and as tables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bubblescope.errors import InputError, UsageError, writing
from bubblescope.model import Kind, Lane, Run, checks
from bubblescope.replay.attribution import Attribution, attribute
from bubblescope.replay.schedules import canonical
from bubblescope.report import document, tables

if TYPE_CHECKING:
    import pandas as pd


def creation_time() -> datetime:
    """The time that a report bears: now, or SOURCE_DATE_EPOCH of the environment, so that the same input gives the
    same bytes (reproducible-builds.org). Raises UsageError when that is not a number of seconds since 1970."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        return datetime.now(UTC)
    try:
        if not (given.isascii() and given.isdecimal()):
            raise ValueError(given)
        return datetime.fromtimestamp(int(given), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"SOURCE_DATE_EPOCH is '{given}', but must be whole seconds since 1970",
            hint="for example SOURCE_DATE_EPOCH=$(git log -1 --format=%ct), or unset it",
        ) from error


@dataclass(frozen=True)
class ReportOptions:
    """price_per_gpu_hour in `currency`, None = hours only. gpus, total_steps: scale the cost to the whole job
    (default: the world size and the steps seen). schedule, microbatches, stages stand in for what the input does not
    say, and overrule it in the closed form; the schedule may be spelt as `canonical` allows. now: the time that the
    report bears.

    Raises UsageError for values that make no sense."""

    price_per_gpu_hour: float | None = None
    currency: str = "USD"
    gpus: int | None = None
    total_steps: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    stages: int | None = None
    now: datetime = field(default_factory=creation_time)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("gpus", "total_steps", "microbatches", "stages")}
        sound: dict[str, Any] = {name: checks.whole(name, n) for name, n in given.items() if n is not None}
        if self.price_per_gpu_hour is not None:
            sound["price_per_gpu_hour"] = checks.amount("price_per_gpu_hour", self.price_per_gpu_hour)
        if self.schedule is not None:
            sound["schedule"] = canonical(self.schedule)
        if not isinstance(self.currency, str):
            raise UsageError(f"currency is {checks.shown(self.currency)}, but must be a text such as 'EUR'")
        for name, value in sound.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class Report:
    """Everything the views need. data: report.json as a dict; the tables are pandas DataFrames, made when asked.

    Times in tables are seconds from the start of the first analysed window.
    """

    data: dict[str, Any]
    attribution: Attribution

    @property
    def run(self) -> Run:
        return self.attribution.run

    @cached_property
    def ops(self) -> pd.DataFrame:
        """rank, step, stage, chunk, microbatch, kind, start_s, end_s: operations, waits, posts, data loading."""
        return tables.ops(self.attribution)

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """One idle gap a row: rank, step, start_s, end_s, idle_s, phase, cause (the largest), before, one column
        per cause (signed seconds, sum = idle_s), the rungs of the readiness ladder, and who it waited for."""
        return tables.gaps(self.attribution)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """step, start_s, end_s, seconds, idle_fraction, outlier."""
        return tables.steps(self.attribution)

    @cached_property
    def device(self) -> pd.DataFrame:
        """rank, step, device, stream, lane, name, start_s, end_s: every kernel and copy; empty without kernels."""
        return tables.device(self.attribution)

    @cached_property
    def messages(self) -> pd.DataFrame:
        """src, dst, direction, step, microbatch, send_s, recv_s, done_s of the matched messages."""
        return tables.messages(self.attribution)

    @cached_property
    def ideal(self) -> pd.DataFrame:
        """Operations of one step replayed balanced and without delays (R6); empty when nothing was replayed."""
        return tables.ideal(self.attribution)

    @cached_property
    def stage_balance(self) -> pd.DataFrame:
        """stage, F_s, B_s, I_s, W_s: base seconds per micro-batch of each virtual stage."""
        return tables.stage_balance(self.attribution)

    @cached_property
    def slowdowns(self) -> dict[int, float]:
        """{rank: how many times the other replicas of its stages it takes}, of ranks that have replicas."""
        return tables.slowdowns(self.attribution)

    @cached_property
    def gpus(self) -> pd.DataFrame:
        return tables.flat(self.data["gpus"])

    @cached_property
    def causes(self) -> pd.DataFrame:
        return tables.flat([{"cause": name, **row} for name, row in self.data["causes"].items()])

    @cached_property
    def p2p(self) -> pd.DataFrame:
        return tables.flat(self.data["p2p"])

    @cached_property
    def advice(self) -> pd.DataFrame:
        return tables.flat(self.data["advice"])

    def to_json(self) -> str:
        """report.json as text: strict JSON, unavailable figures are null."""
        return _view("json").render(self)  # type: ignore[no-any-return]

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the one-file HTML report; folders that are missing are made. Raises UsageError where it cannot be
        written."""
        target = Path(path)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _view("html").write(self, target)
        return target

    def __repr__(self) -> str:
        return f"Report: {_view('notebook').sentence(self)}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the first screen and the causes, without scripts. Figures are drawn when asked for."""
        return _view("notebook").render(self)  # type: ignore[no-any-return]

    def timeline_figure(self, **options: Any) -> Any:
        return _view("figures").timeline_figure(self, **options)

    def causes_figure(self, **options: Any) -> Any:
        return _view("figures").causes_figure(self, **options)

    def steps_figure(self, **options: Any) -> Any:
        return _view("figures").steps_figure(self, **options)

    def balance_figure(self, **options: Any) -> Any:
        return _view("figures").balance_figure(self, **options)

    def heatmap_figure(self, **options: Any) -> Any:
        return _view("figures").heatmap_figure(self, **options)


def _view(name: str) -> Any:
    """Views stand above the report and are found by name, only when somebody asks for one."""
    import importlib

    return importlib.import_module(f"bubblescope.views.{name}")


def build(run: Run, options: ReportOptions | None = None) -> Report:
    """Attribute and price a prepared run. Raises InputError when it shows no finished step of any rank."""
    chosen = options or ReportOptions()
    if run.layout.stages is None and chosen.stages is not None:
        run = replace(run, layout=replace(run.layout, stages=chosen.stages))
    attribution = attribute(run)
    if not len(attribution.windows):
        hint = "record at least one whole step: a ProfilerStep range, an optimizer step or a schedule.step()"
        work = run.spans.where(lane=Lane.COMPUTE) & (run.spans.step >= 0)
        if run.spans.where(kind=Kind.STEP).any() and not work.any():
            hint = "steps are marked, and nothing was recorded that ran in them: record the devices' activity, too"
        compute, copies = (run.spans.where(lane=lane).any() for lane in (Lane.COMPUTE, Lane.COPY))
        if copies and not compute:
            hint = "copies between memories were recorded, and no kernel that computes: record these, too"
        cut = list(run.source.details.get("cut_steps", {}).values())
        raise InputError(
            "no finished training step with device activity was found" + (f": {cut[0]}" if cut else ""),
            hint=hint,
            where=", ".join(run.source.files[:3]),
        )
    return Report(document.report_json(attribution, chosen), attribution)
