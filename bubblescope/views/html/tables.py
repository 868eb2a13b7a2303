"""The tables of the page: beside each chart the numbers that it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bubblescope.replay.causes import INTRINSIC_CAUSES
from bubblescope.report.tables import stage_work
from bubblescope.views import format as fmt
from bubblescope.views.figures.causes import stairs
from bubblescope.views.summary import stage_causes, unavailable, value
from bubblescope.views.words import CAUSE, CAUSES, RATIOS

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

MOST_ROWS = 200
MOST_LINKS = 64
OUTSIDE_GAME = ("host_launch", "data_loading", "unexplained")
"""Host delay is removed before the causes among which savings are shared out; `unexplained` cannot be removed."""


@dataclass(frozen=True)
class Table:
    """caption: one sentence, with the unit. The first `texts` columns are text, the rest numbers. note: what was
    left out, or ""."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    note: str = ""


def all_tables(report: ReportLike) -> dict[str, Table]:
    return {
        "stages": stages(report),
        "gpus": gpus(report),
        "waterfall": waterfall(report),
        "heatmap": heatmap(report),
        "fixes": fixes(report),
        "steps": steps(report),
        "balance": balance(report),
        "partition": partition(report),
        "p2p": p2p(report),
        "ratios": ratios(report),
    }


def _cut(rows: Sequence[tuple[str, ...]], what: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    if len(rows) <= MOST_ROWS:
        return tuple(rows), ""
    return tuple(rows[:MOST_ROWS]), f"{MOST_ROWS} of {len(rows):,} {what} shown; all are in the CSV files."


def _column(gpus: list[dict[str, Any]], *path: str) -> str:
    values = [value(g, *path) for g in gpus]
    known = [float(v) for v in values if v is not None]
    return fmt.milliseconds(float(np.mean(known))) if known and len(known) == len(values) else "unavailable"


def _largest_cause(gpus: list[dict[str, Any]]) -> str:
    sums = {c.name: sum(value(g, "causes", c.name) or 0.0 for g in gpus) for c in CAUSES}
    name = max(sums, key=lambda n: sums[n])
    return CAUSE[name].label if sums[name] > 0 else fmt.MISSING


_TIMES = ("window", "busy", "idle", "exposed_comm", "copies", "empty")
_PHASES = ("warmup", "steady", "cooldown")


def _idle_share(gpus: list[dict[str, Any]]) -> str:
    pairs = [(g.get("idle"), g.get("window")) for g in gpus]
    if any(i is None or not w for i, w in pairs):
        return "unavailable"
    return fmt.percent(sum(float(i or 0) for i, _ in pairs) / sum(float(w or 0) for _, w in pairs))


def _stage(stage: int | None) -> str:
    return f"stage {stage}" if stage is not None and stage >= 0 else "not known"


def stages(report: ReportLike) -> Table:
    by_stage: dict[int, list[dict[str, Any]]] = {}
    for gpu in report.data.get("gpus") or []:
        by_stage.setdefault(-1 if gpu.get("stage") is None else gpu["stage"], []).append(gpu)
    rows = [
        (
            _stage(stage), _largest_cause(mine), str(len(mine)),
            _idle_share(mine), *(_column(mine, t) for t in _TIMES), *(_column(mine, "phases", p) for p in _PHASES),
        )
        for stage, mine in sorted(by_stage.items())
    ]  # fmt: skip
    head = ("Stage", "Largest cause", "GPUs", "idle share", *_TIMES, *(f"idle in {p}" for p in _PHASES))
    return Table("Time of each stage, in ms per GPU and step (mean over its GPUs).", head, tuple(rows), 2)


def gpus(report: ReportLike) -> Table:
    everyone = sorted(report.data.get("gpus") or [], key=lambda g: (-(g.get("idle") or 0.0), g["rank"]))
    rows = [
        (f"GPU {g['rank']}", _stage(g["stage"]), _largest_cause([g]), _idle_share([g]),
         *(_column([g], t) for t in _TIMES))
        for g in everyone
    ]  # fmt: skip
    kept, note = _cut(rows, "GPUs")
    head = ("GPU", "Stage", "Largest cause", "idle share", *_TIMES)
    return Table("Time of each GPU, in ms per step, most idle first.", head, kept, 3, note)


def waterfall(report: ReportLike) -> Table:
    rows = [
        (bar.label, fmt.milliseconds(bar.length), fmt.milliseconds(bar.start + bar.length)) for bar in stairs(report)
    ]
    return Table("From useful work to the measured step, in ms per GPU and step (mean over GPUs).",
                 ("Part", "ms", "reached"), tuple(rows))  # fmt: skip


def heatmap(report: ReportLike) -> Table:
    table = stage_causes(report)
    causes = [c for c in CAUSES if any(abs(row[c.name] or 0.0) > 1e-9 for row in table.values())]
    rows = [(_stage(s), *(_or_unavailable(row[c.name]) for c in causes)) for s, row in table.items()]
    return Table("Idle time by stage and cause, in ms per GPU and step. Negative: the cause shortens the waiting.",
                 ("Stage", *(c.label for c in causes)), tuple(rows))  # fmt: skip


def _or_unavailable(number: float | None) -> str:
    return "unavailable" if number is None else fmt.milliseconds(number)


def fixes(report: ReportLike) -> Table:
    causes = report.data.get("causes") or {}
    rows = []
    for cause in CAUSES:
        line = causes.get(cause.name) or {}
        bounds = [line.get("order_min"), line.get("order_max")]
        rows.append((
            cause.label, str(line.get("sure") or "unavailable"), fmt.percent(line.get("share_of_idle")),
            _or_unavailable(line.get("seconds")), _saving(line.get("first_in"), cause.name),
            _saving(line.get("shapley"), cause.name),
            _saving(None, cause.name) if None in bounds else " to ".join(fmt.milliseconds(b) for b in bounds),
        ))  # fmt: skip
    head = ("Cause", "Sure", "share of idle", "ms", "first-in", "Shapley", "over all orders")
    caption = (
        "What fixing each cause would buy, in ms per step. An action that fixes one cause saves first-in. Warmup, "
        "cooldown and schedule are intrinsic: only another schedule or more micro-batches recover them. –: not "
        "defined, as host delay is removed before savings are shared out."
    )
    return Table(caption, head, tuple(rows), 2)


def _saving(number: float | None, cause: str) -> str:
    if number is not None:
        return fmt.milliseconds(number)
    return fmt.MISSING if cause in (*INTRINSIC_CAUSES, *OUTSIDE_GAME) else "unavailable"


def steps(report: ReportLike) -> Table:
    rows = [
        (f"step {int(r['step'])}", "outlier" if r["outlier"] else "", fmt.milliseconds(r["seconds"]),
         fmt.percent(r["idle_fraction"]))
        for r in report.steps.to_dict("records")
    ]  # fmt: skip
    kept, note = _cut(rows, "steps")
    return Table("Length of each step in ms, and the idle share of its GPU time.",
                 ("Step", "Outlier", "ms", "idle share"), kept, 2, note)  # fmt: skip


def balance(report: ReportLike) -> Table:
    work = stage_work(report.stage_balance)
    mean = float(np.mean(list(work.values()))) if work else math.nan
    rows = []
    for line in report.stage_balance.to_dict("records"):
        stage = int(line["stage"])
        parts = (fmt.milliseconds(line[f"{letter}_s"]) for letter in (*"FBIW", "loss"))
        total = work.get(stage)
        rows.append((
            f"stage {stage}", *parts, fmt.milliseconds(total),
            fmt.MISSING if total is None else f"{total / mean:.2f}×",
        ))  # fmt: skip
    head = ("Stage", "F", "B", "I", "W", "loss", "together", "of the mean")
    return Table("Base time per micro-batch of each stage, in ms.", head, tuple(rows))


def partition(report: ReportLike) -> Table:
    """The best cut of whole layers, beside the times of today's; no rows where no layer was timed."""
    best = next((d for d in _details(report, "partition") if d.get("layers")), None)
    head = ("Stage", "layers", "now, ms", "then, ms")
    if best is None:
        return Table("", head, ())
    stages = zip(best["layers"], best.get("seconds_per_microbatch") or [], best["stage_seconds"], strict=False)
    rows = [
        (f"stage {i}", f"{count:,}", fmt.milliseconds(now), fmt.milliseconds(then))
        for i, (count, now, then) in enumerate(stages)
    ]
    caption = (
        f"The best cut of whole layers, in ms per micro-batch. Its slowest stage takes "
        f"{fmt.milliseconds(best['slowest_seconds'])} ms; layers that could be cut anywhere would allow "
        f"{fmt.milliseconds(best['bound_seconds'])} ms."
    )
    return Table(caption, head, tuple(rows))


def _details(report: ReportLike, kind: str) -> list[dict[str, Any]]:
    return [row.get("detail") or {} for row in report.data.get("advice") or [] if row.get("kind") == kind]


def p2p(report: ReportLike) -> Table:
    """One row a link, or one a pair of stages where there are more links than a reader would read."""
    links = report.data.get("p2p") or []
    stage_of = {g["rank"]: g.get("stage") for g in report.data.get("gpus") or []}
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for link in links:
        ends = [link["src"], link["dst"]]
        if len(links) > MOST_LINKS:
            name = "stage {} to {}".format(*(stage_of.get(rank, "?") for rank in ends))
        else:
            name = "GPU {} to {}".format(*ends)
        grouped.setdefault((name, str(link["direction"])), []).append(link)
    lines = sorted(grouped.items(), key=lambda item: (-(_weighted(item[1], "wait") or 0.0), item[0]))
    carried = {"act": "activations", "grad": "gradients"}
    rows = [
        (
            name, carried.get(way, fmt.plain(way)), f"{sum(x['count'] for x in mine) / len(mine):,.0f}",
            fmt.milliseconds(_weighted(mine, "wait")), fmt.milliseconds(_weighted(mine, "transfer")),
            fmt.data_size(_weighted(mine, "bytes")), fmt.number(_weighted(mine, "gbps")),
        )
        for (name, way), mine in lines
    ]  # fmt: skip
    kept, note = _cut(rows, "links")
    if len(links) > MOST_LINKS:
        note = f"{len(links):,} links between GPUs, averaged by stage; each one is in the CSV files. {note}".strip()
    head = ("Link", "Carries", "messages a step", "wait, ms", "transfer, ms", "size", "Gbit/s")
    caption = "Messages between stages, longest wait first. Wait and transfer: all messages of a step together."
    return Table(caption, head, kept, 2, note)


def _weighted(links: list[dict[str, Any]], column: str) -> float | None:
    """Mean over links, weighted by messages; None where any link lacks it."""
    pairs = [(value(link, column), link["count"]) for link in links]
    if any(v is None for v, _ in pairs) or not sum(n for _, n in pairs):
        return None
    return float(np.average([v for v, _ in pairs], weights=[n for _, n in pairs]))


def ratios(report: ReportLike) -> Table:
    rows = []
    for name, formula, meaning in RATIOS:
        found = value(report.data, "bubble", name)
        text = f"{found:.4f}" if found is not None else unavailable(report.data, name)
        theory = value(report.data, "bubble", "theory", name)
        rows.append((name, formula, meaning, text, fmt.MISSING if theory is None else f"{theory:.4f}"))
    caption = "Four ratios that people all call “bubble”, and the idle share of the GPUs."
    source = value(report.data, "bubble", "theory", "source")
    if source and value(report.data, "pipeline", "microbatches"):
        schedule, p, m = (value(report.data, "pipeline", name) for name in ("schedule", "stages", "microbatches"))
        once = int(m) // int(value(report.data, "pipeline", "passes_per_step") or 1)
        caption += (
            f" Closed form: {fmt.plain(schedule)} with {p} equal stages and {once} micro-batches of the measured mean "
            f"times, {fmt.plain(source)}."
        )
    return Table(caption, ("Name", "Formula", "What it is", "measured", "closed form"), tuple(rows), 3)
