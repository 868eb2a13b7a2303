"""Prometheus metrics of a `Snapshot`: over HTTP, and as a text file for node_exporter.

Labels are rank, stage, cause and what belongs to a rank: their number is that of the job's GPUs, whatever it does.
Counters only grow while a run is watched; what they hold, and how signed causes enter them, is in docs/monitoring.md.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from bubblescope._version import __version__
from bubblescope.errors import UsageError
from bubblescope.live.screen import rate
from bubblescope.live.totals import BUCKETS
from bubblescope.live.watcher import SILENT, TRAINING, RankState, Snapshot
from bubblescope.replay.causes import CAUSES
from bubblescope.views.summary import value

RANK = ("rank", "stage")
RUN = ("schedule", "stages", "microbatches", "data_parallel")
OWN_LABELS = frozenset(
    {*RANK, "cause", "le", "state", "currency", "version", "python", *RUN, "path", "framework", "host", "gpu"}
)
"""Every label that a metric here has of itself."""


class _Family:
    """Makes metrics that all carry the same additional labels."""

    def __init__(self, extra: Mapping[str, str]) -> None:
        self.names, self.values = list(extra), list(extra.values())

    def gauge(self, name: str, text: str, rows: Iterable[tuple[tuple[str, ...], float | None]], *labels: str) -> Metric:
        """Rows without a value are left out: what is not known is not 0."""
        made = GaugeMetricFamily(name, text, labels=[*labels, *self.names])
        for own, number in rows:
            if number is not None:
                made.add_metric([*own, *self.values], number)
        return made

    def counter(self, name: str, text: str, rows: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
        made = CounterMetricFamily(name, text, labels=[*labels, *self.names])
        for own, number in rows:
            made.add_metric([*own, *self.values], number)
        return made

    def info(self, name: str, text: str, rows: Iterable[dict[str, str]]) -> Metric:
        made = InfoMetricFamily(name, text, labels=self.names)
        for row in rows:
            made.add_metric(self.values, row)
        return made


class SnapshotCollector(Collector):
    """Reads the newest snapshot at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot], labels: Mapping[str, str]) -> None:
        self._snapshot = snapshot
        self._family = _Family(labels)

    def collect(self) -> Iterator[Metric]:
        snapshot, make = self._snapshot(), self._family
        yield from _about(snapshot, make)
        yield from _sums(snapshot, make)
        yield from _ranks(snapshot, make)
        if snapshot.report is not None:
            yield from _now(snapshot.report.data, make)
            now = rate(snapshot.report) if snapshot.state == TRAINING else None
            text = "GPU-hours lost an hour, over the last steps; only while the job trains."
            yield make.gauge("bubblescope_lost_gpus", text, [((), now.gpu_hours if now is not None else None)])


def registry(snapshot: Callable[[], Snapshot], labels: Mapping[str, str] | None = None) -> CollectorRegistry:
    """A registry of its own: metrics of this Python process do not belong to the training."""
    made = CollectorRegistry()
    made.register(SnapshotCollector(snapshot, labels or {}))
    return made


def render(metrics: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """(body, content type) in the format that the scraper asks for."""
    encode, content_type = exposition.choose_encoder(accept)
    return encode(metrics), content_type


def write_textfile(metrics: CollectorRegistry, path: Path) -> None:
    """Whole or not at all: written beside, then renamed. Raises UsageError when it cannot be written."""
    try:
        exposition.write_to_textfile(str(path), metrics)
    except OSError as error:
        raise UsageError(
            f"cannot write: {error.strerror or error}",
            where=str(path),
            hint="give a file in a folder that exists and can be written, as node_exporter's textfile directory",
        ) from error


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _about(s: Snapshot, make: _Family) -> Iterator[Metric]:
    own = {"version": __version__, "python": platform.python_version()}
    yield make.info("bubblescope_build", "The bubblescope that watches.", [own])
    data = s.report.data if s.report is not None else {}
    pipeline = data.get("pipeline") or {}
    run = {name: str(pipeline.get(name) or "") for name in RUN}
    run |= {"path": s.path, "framework": str(value(data, "source", "framework") or "")}
    yield make.info("bubblescope_run", "The run that is watched.", [run])
    price = [((s.options.currency,), s.options.price_per_gpu_hour)]
    yield make.gauge("bubblescope_price_per_gpu_hour", "As given by the user.", price, "currency")
    yield make.counter("bubblescope_watch_errors", "Passes that failed; their steps are left out.", [((), s.errors)])
    behind = "Bytes of history that are still to be read."
    yield make.gauge("bubblescope_watch_behind_bytes", behind, [((), s.behind)])
    yield make.gauge("bubblescope_watch_pass_seconds", "What the last analysis took.", [((), s.pass_seconds)])


def _sums(s: Snapshot, make: _Family) -> Iterator[Metric]:
    t = s.totals
    gpus = [((str(rank), _text(gpu.stage)), gpu) for rank, gpu in sorted(t.gpus.items())]
    idle = [((*own, cause), float(gpu.idle[i])) for own, gpu in gpus for i, cause in enumerate(CAUSES)]
    text = "Idle time by cause; over the causes it sums to all idle time of the GPU."
    yield make.counter("bubblescope_idle_seconds", text, idle, *RANK, "cause")
    busy = [(own, gpu.busy) for own, gpu in gpus]
    yield make.counter("bubblescope_busy_seconds", "Time in compute, in counted steps.", busy, *RANK)
    window = [(own, gpu.window) for own, gpu in gpus]
    yield make.counter("bubblescope_window_seconds", "Busy and idle time of counted steps.", window, *RANK)
    text = "GPU-hours lost to pipeline bubbles (all idle time of one stage, and where bubbles cannot be told from it)."
    yield make.counter("bubblescope_wasted_gpu_hours", text, [((), t.lost_gpu_hours)])
    yield make.counter("bubblescope_steps", "Training steps counted, without warm-up.", [((), t.steps)])
    yield _durations(s, make)


def _durations(s: Snapshot, make: _Family) -> Metric:
    text = "Length of training steps, mean over the GPUs."
    made = HistogramMetricFamily("bubblescope_step_duration_seconds", text, labels=make.names)
    reached, buckets = 0, []
    for edge, count in zip((*map(str, BUCKETS), "+Inf"), s.totals.buckets, strict=True):
        reached += count
        buckets.append((edge, float(reached)))
    made.add_metric(make.values, buckets, s.totals.step_seconds)
    return made


def _ranks(s: Snapshot, make: _Family) -> Iterator[Metric]:
    def own(rank: RankState) -> tuple[str, str]:
        return str(rank.rank), _text(rank.stage)

    seen = [rank for rank in s.ranks if rank.heard is not None]
    info = [
        {"rank": str(r.rank), "stage": _text(r.stage), "host": r.host, "gpu": _text(r.gpu)} for r in seen
    ]  # fmt: skip
    yield make.info("bubblescope_rank", "Where a rank runs; joins metrics of the GPU's own exporter.", info)
    silent = [(own(r), float(r.state == SILENT)) for r in seen]
    yield make.gauge("bubblescope_rank_silent", "1 while nothing is heard of a rank that has not ended.", silent, *RANK)
    heard = [(own(r), r.heard) for r in seen]
    yield make.gauge("bubblescope_rank_heard_timestamp_seconds", "When its file last grew.", heard, *RANK)
    last = [(own(r), float(r.last_step)) for r in seen if r.last_step >= 0]
    yield make.gauge("bubblescope_rank_last_step", "The last step it recorded.", last, *RANK)
    states: dict[str, int] = {}
    for rank in s.ranks:
        states[rank.state] = states.get(rank.state, 0) + 1
    counted = [((state,), float(n)) for state, n in sorted(states.items())]
    yield make.gauge("bubblescope_ranks", "Ranks by state.", counted, "state")


def _now(data: dict[str, Any], make: _Family) -> Iterator[Metric]:
    """Gauges over the last steps; signed, as in the report."""
    for name, ratio, text in (
        ("bubblescope_bubble_ratio", "fraction", "Bubble / makespan over the last steps."),
        ("bubblescope_idle_ratio", "gpu_idle_fraction", "Idle / window over the last steps."),
    ):
        yield make.gauge(name, text, [((), value(data, "bubble", ratio))])
    rows, busy = [], []
    for gpu in data["gpus"]:
        own = (str(gpu["rank"]), _text(gpu["stage"]))
        busy.append((own, gpu["busy"]))
        rows += [
            ((*own, cause), gpu["causes"][cause])
            for cause in CAUSES
            if gpu["causes"][cause] is not None
        ]
    text = "Signed idle time of a cause per step, over the last steps; negative where it shortens the waiting."
    yield make.gauge("bubblescope_cause_seconds", text, rows, *RANK, "cause")
    yield make.gauge("bubblescope_rank_busy_seconds", "Compute per step, over the last steps.", busy, *RANK)
    trusted = [((), float(bool(value(data, "replay", "trusted"))))]
    yield make.gauge("bubblescope_attribution_trusted", "1 when the replay reproduces the measured steps.", trusted)
