"""The first screen, once for every view: one sentence, three figures, the best actions, how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bubblescope.model.notice import some
from bubblescope.replay.causes import INTRINSIC_CAUSES, OUTSIDE_PIPELINE
from bubblescope.report.tables import UNEVEN, slowest_stage
from bubblescope.views import format as fmt
from bubblescope.views.words import CAUSES

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

UNTRUSTED = 0.05
"""ATTRIBUTION.md §6: above this share of the step, the attribution is not to be trusted."""

MOST_REASONS, ONE_MORE_REASON = 3, 0.2
"""So many causes are told at most; from this share of the loss on, a second and a third one are."""

WORTH_A_SENTENCE = 0.01
"""Where more of the GPUs' time than this is idle and no bubble, all idle time is told beside the bubbles."""


@dataclass(frozen=True)
class Figure:
    """label: what it is; value: with unit; note: how it comes about."""

    label: str
    value: str
    note: str
    available: bool = True


@dataclass(frozen=True)
class Action:
    text: str
    saving: str
    detail: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Trust:
    """ok is False where the reader should doubt."""

    label: str
    value: str
    ok: bool


@dataclass(frozen=True)
class FirstScreen:
    """`lost` is the part of the sentence that deserves emphasis, `cost` follows it, `reason` ends it. `idle` is a
    second sentence (with a space before it), empty where the first one tells of nearly all idle time."""

    lost: str
    cost: str
    reason: str
    idle: str
    figures: tuple[Figure, ...]
    actions: tuple[Action, ...]
    trust: tuple[Trust, ...]

    @property
    def sentence(self) -> str:
        return f"{self.lost}{self.cost}{self.reason}{self.idle}"


def first_screen(report: ReportLike) -> FirstScreen:
    data = report.data
    return FirstScreen(
        _lost(data),
        _cost(data),
        _reason(report),
        all_idle(report, _idle_cost(data)),
        (_fraction_figure(data), _hours_figure(data), _money_figure(data)),
        tuple(_action(row, data) for row in top_actions(data)),
        tuple(_trust(data)),
    )


def value(data: dict[str, Any], *path: str) -> Any:
    """``data[path[0]][path[1]]…``, None where anything on the way is missing or not finite."""
    here: Any = data
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return None if isinstance(here, float) and not math.isfinite(here) else here


def gpu_count(data: dict[str, Any]) -> int:
    known = value(data, "cost", "gpus") or value(data, "source", "world_size")
    return int(known or len(data.get("gpus") or []))


@dataclass(frozen=True)
class Loss:
    """What the first screen is about: pipeline bubbles, or all idle time where there are none or they are unknown.

    share: of all GPU time. of_idle: share of idle time, to scale hours and money of idle.
    """

    what: str
    share: float
    of_idle: float


def headline(data: dict[str, Any]) -> Loss | None:
    """`fraction` leaves out what would idle a GPU without any pipeline; hours and money must do the same. One stage has
    no bubbles."""
    fraction, idle = value(data, "bubble", "fraction"), value(data, "bubble", "gpu_idle_fraction")
    if fraction is not None and pipeline_seen(data).get("stages") != 1:
        return Loss("bubbles", float(fraction), float(fraction / idle) if idle else 1.0)
    return None if idle is None else Loss("idle", float(idle), 1.0)


def lost_hours(data: dict[str, Any]) -> float | None:
    loss, hours = headline(data), value(data, "cost", "idle_gpu_hours")
    return None if loss is None or hours is None else float(hours) * loss.of_idle


def lost_money(data: dict[str, Any]) -> float | None:
    loss, amount = headline(data), value(data, "cost", "idle_money")
    return None if loss is None or amount is None else float(amount) * loss.of_idle


def unavailable(data: dict[str, Any], *hints: str) -> str:
    """Why a figure is not there, in the words of the warning that mentions one of `hints`."""
    warnings = value(data, "source", "warnings") or []
    for hint in hints:
        for warning in warnings:
            if hint in f"{warning.get('code', '')} {warning.get('message', '')}":
                return f"unavailable, because {_first_clause(warning)}"
    if warnings:
        return f"unavailable, because {_first_clause(warnings[0])}"
    return "unavailable, because the input does not show it"


def _first_clause(warning: dict[str, Any]) -> str:
    """The notices hold the whole message; a sentence that cites it needs its reason only."""
    return fmt.plain(str(warning.get("message", "")).split(";")[0].removesuffix("."))


def told_gpus(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ``gpus`` that figures of all GPUs are means of: those replayed, where some could not be."""
    gpus = data.get("gpus") or []
    return [g for g in gpus if value(g, "causes", "warmup") is not None] or gpus


def mean_causes(data: dict[str, Any]) -> dict[str, float | None]:
    """Seconds per GPU and step of each cause, mean over `told_gpus`; None where it is unavailable."""
    gpus = told_gpus(data)
    return {c.name: _mean([value(g, "causes", c.name) for g in gpus]) if known(data, c.name) else None for c in CAUSES}


def known(data: dict[str, Any], cause: str) -> bool:
    """Whether the cause could be told apart from others: one that could not is no zero."""
    return bool(value(data, "causes", cause, "sure") != "unavailable")


def mean_gpu(data: dict[str, Any], column: str) -> float | None:
    """Mean over `told_gpus` of a column of ``gpus``: seconds per GPU and step."""
    return _mean([g.get(column) for g in told_gpus(data)])


def _mean(values: list[Any]) -> float | None:
    if not values or any(v is None or not math.isfinite(v) for v in values):
        return None
    return float(np.mean(values))


def stage_causes(report: ReportLike) -> dict[int, dict[str, float | None]]:
    """Seconds per GPU and step of each cause, mean over the `told_gpus` of each stage; None where unavailable."""
    stages: dict[int, list[dict[str, float | None]]] = {}
    for gpu in told_gpus(report.data):
        causes = {c.name: value(gpu, "causes", c.name) if known(report.data, c.name) else None for c in CAUSES}
        stages.setdefault(-1 if gpu.get("stage") is None else gpu["stage"], []).append(causes)
    return {s: {c.name: _mean([g[c.name] for g in stages[s]]) for c in CAUSES} for s in sorted(stages)}


def best_actions(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Actions that save time, best first."""
    rows = [a for a in data.get("advice") or [] if (a.get("saved_seconds") or 0) > 0]
    return sorted(rows, key=lambda a: -float(a["saved_seconds"]))


def top_actions(data: dict[str, Any], count: int = 3) -> list[dict[str, Any]]:
    """The best action of each kind, best first: five schedules in a row would hide the other ways out. Moving layers
    and another schedule together is a kind of its own."""
    first: dict[tuple[str, bool], dict[str, Any]] = {}
    for row in best_actions(data):
        first.setdefault((str(row.get("kind")), "rebalanced" in (row.get("detail") or {})), row)
    return list(first.values())[:count]


def _lost(data: dict[str, Any]) -> str:
    loss, gpus = headline(data), gpu_count(data)
    whose = "one GPU's time" if gpus == 1 else f"{gpus:,} GPUs' time"
    if loss is None:
        return f"The share of {whose} that is lost to pipeline bubbles is {unavailable(data, 'fraction', 'idle')}"
    what = "is idle" if loss.what == "idle" else "is lost to pipeline bubbles"
    return f"{fmt.percent(loss.share)} of {whose} {what}{_judging(data)}"


def _judging(data: dict[str, Any]) -> str:
    """Says when a few GPUs stand for all."""
    seen = len(told_gpus(data))
    if not 0 < seen < gpu_count(data):
        return ""
    return f", judging by the {seen:,} seen" if seen > 1 else ", judging by the only one seen"


def span_words(data: dict[str, Any]) -> str:
    total, analysed = value(data, "cost", "total_steps"), int(value(data, "steps", "analysed") or 0)
    if total and total != analysed:
        return f"over {int(total):,} steps"
    return "in the one step analysed" if analysed == 1 else f"in the {analysed:,} steps analysed"


def _cost(data: dict[str, Any]) -> str:
    hours, amount = lost_hours(data), lost_money(data)
    if hours is None:
        return ""
    price = f", {fmt.money(amount, value(data, 'cost', 'currency'))}" if amount is not None else ""
    return f": {fmt.gpu_hours(hours)}{price} {span_words(data)}"


def reasons(data: dict[str, Any]) -> list[tuple[str, float]]:
    """Causes with their share of the headline's loss, largest first; those that shorten waiting (negative) last; the
    intrinsic ones count together, as "schedule". Bubbles leave out what would idle a GPU without any pipeline."""
    loss = headline(data)
    scale = loss.of_idle if loss is not None and loss.of_idle > 0 else 1.0
    bubbles = loss is not None and loss.what == "bubbles"
    return [(name, s / scale) for name, s in _all_reasons(data) if not (bubbles and name in OUTSIDE_PIPELINE)]


def _all_reasons(data: dict[str, Any]) -> list[tuple[str, float]]:
    """As `reasons`, with their share of all idle time."""
    grouped: dict[str, float] = {}
    for cause in CAUSES:
        share = value(data, "causes", cause.name, "share_of_idle")
        if share is not None:
            name = "schedule" if cause.name in INTRINSIC_CAUSES else cause.name
            grouped[name] = grouped.get(name, 0.0) + float(share)
    return sorted(grouped.items(), key=lambda pair: (-pair[1], pair[0]))


def _idle_cost(data: dict[str, Any]) -> str:
    hours, amount = value(data, "cost", "idle_gpu_hours"), value(data, "cost", "idle_money")
    if hours is None:
        return ""
    price = "" if amount is None else f", {fmt.money(amount, value(data, 'cost', 'currency'))}"
    return f" ({fmt.gpu_hours(hours)}{price})"


def all_idle(report: ReportLike, cost: str) -> str:
    """What the headline leaves out because it would idle a GPU without any pipeline, and its cause where that is the
    largest of all: who pays, pays for it too."""
    loss, share = headline(report.data), value(report.data, "bubble", "gpu_idle_fraction")
    if loss is None or share is None or share - loss.share < WORTH_A_SENTENCE:
        return ""
    text = f" Idle for any reason: {fmt.percent(share)}{cost}"
    name, largest = next(iter(_all_reasons(report.data)), ("", 0.0))
    if name in OUTSIDE_PIPELINE and value(report.data, "replay", "trusted") is not False:
        text += f", {fmt.percent(largest, 0)} of it because {_because(report, name)}"
    return f"{text}."


def _reason(report: ReportLike) -> str:
    found, loss = reasons(report.data), headline(report.data)
    if loss is not None and value(report.data, "bubble", "fraction") is None:
        return f"; the pipeline's share of it is {unavailable(report.data, 'fraction')}."
    if value(report.data, "replay", "trusted") is False:
        return f"; what causes it is {unavailable(report.data, 'not-trusted', 'replay', 'causes')}."
    if not found or found[0][1] <= 0:
        return "."
    name, share = found[0]
    more = [(other, s) for other, s in found[1:MOST_REASONS] if s >= ONE_MORE_REASON]
    if more:
        others = "".join(f", {fmt.percent(s, 0)} because {_because(report, other)}" for other, s in more)
        # Causes are signed and sum to the loss: a few of them alone may be more than all of it.
        over = sum(s for _, s in found if s < 0) if share + sum(s for _, s in more) > 1 else 0.0
        less = f", less {fmt.percent(-over, 0)} by which others shorten the waiting" if over < -0.005 else ""
        return f"; {fmt.percent(share, 0)} of that because {_because(report, name)}{others}{less}."
    how_much = "most of it" if share >= 0.5 else f"the largest part ({fmt.percent(share, 0)})"
    return f"; {how_much} because {_because(report, name)}."


_SIMPLE = {
    "transient": "single operations take much longer than usual now and then",
    "microbatch_imbalance": "micro-batches differ in size",
    "p2p_transfer": "stages wait for activations and gradients to travel",
    "exposed_collective": "collectives are not hidden under compute",
    "optimizer": "GPUs wait for the optimizer step of others",
    "host_launch": "the hosts launch work too late",
    "data_loading": "the first stage waits for its input",
    "unexplained": "of something that this recording does not show",
}


def _because(report: ReportLike, name: str) -> str:
    if name == "schedule":
        return _because_schedule(report.data)
    if name == "stage_imbalance":
        return _because_stages(report)
    if name == "slow_worker":
        rank = max(report.slowdowns, key=lambda r: report.slowdowns[r], default=None)
        if rank is not None and report.slowdowns[rank] >= UNEVEN:
            return f"GPU {rank} is {_times(report.slowdowns[rank])} slower than the other replicas of its stage"
        return "some GPUs are slower than the other replicas of their stage"
    return _SIMPLE[name]


def _because_stages(report: ReportLike) -> str:
    slowest = slowest_stage(report.stage_balance)
    if slowest is None:
        return "some stages have more work than others"
    if slowest[1] >= UNEVEN:
        return f"stage {slowest[0]} is {_times(slowest[1])} slower than the others"
    parts = "input and weight gradients" if report.stage_balance["W_s"].notna().any() else "backward"
    return f"stages that take equally long in all divide it differently into forward, {parts}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}".rstrip("0").rstrip(".") + "×"


def pipeline_seen(data: dict[str, Any]) -> dict[str, Any]:
    """The pipeline that was analysed, whatever the user said of it for the closed form."""
    return {**(data.get("pipeline") or {}), **(value(data, "pipeline", "overruled") or {})}


def _because_schedule(data: dict[str, Any]) -> str:
    pipeline = pipeline_seen(data)
    schedule = fmt.plain(pipeline.get("schedule") or "the pipeline's schedule")
    stages, m, passes = pipeline.get("stages"), pipeline.get("microbatches"), pipeline.get("passes_per_step") or 1
    if stages and m:
        shape = f"{stages} stages and {m // passes} micro-batches"
        shape += f" in each of {passes} passes" if passes > 1 else ""
        return f"{schedule} with {shape} needs that long to fill and drain"
    return f"{schedule} needs that long to fill and drain"


def _finite(number: Any) -> bool:
    return number is not None and math.isfinite(float(number))


def _fraction_figure(data: dict[str, Any]) -> Figure:
    loss = headline(data)
    if loss is None:
        return Figure("Share of GPU time lost", "unavailable", unavailable(data, "fraction", "idle"), False)
    idle, window = mean_gpu(data, "idle"), mean_gpu(data, "window")
    note = "fraction: bubble / makespan" if loss.what == "bubbles" else "gpu_idle_fraction: idle / window"
    if idle is not None and window is not None:
        note += f", {fmt.seconds(idle * loss.of_idle)} of a {fmt.seconds(window)} step"
    if loss.what == "bubbles" and loss.of_idle < 0.999 and idle is not None and window:
        note += f". Idle for any reason: {fmt.percent(idle / window)}"
    return Figure("Share of GPU time lost", fmt.percent(loss.share), note)


def _hours_figure(data: dict[str, Any]) -> Figure:
    hours, idle, loss = lost_hours(data), mean_gpu(data, "idle"), headline(data)
    if hours is None:
        return Figure("GPU time lost", "unavailable", unavailable(data, "GPU-hours", "cost", "gpus"), False)
    note = f"{gpu_count(data):,} GPUs, {span_words(data)}"
    if idle is not None and loss is not None:
        note += f", {fmt.seconds(idle * loss.of_idle)} each step"
    return Figure("GPU time lost", fmt.gpu_hours(hours), note)


def _money_figure(data: dict[str, Any]) -> Figure:
    amount, price = lost_money(data), value(data, "cost", "price_per_gpu_hour")
    daily = daily_gpu_hours(data)
    if amount is None or price is None:
        text = "unavailable" if daily is None else fmt.gpu_hours(daily)
        note = "no price was given: --price-per-gpu-hour shows money"
        return Figure("Lost every day", text, note, daily is not None)
    currency = value(data, "cost", "currency")
    note = f"at {fmt.money(price, currency)} per GPU-hour"
    if daily is not None:
        note += f" · {fmt.money(daily * price, currency)} every day of training"
    return Figure("Money lost", fmt.money(amount, currency), note)


def daily_gpu_hours(data: dict[str, Any]) -> float | None:
    """GPU-hours lost in a day of training: 24 h × GPUs × the headline's share."""
    loss = headline(data)
    return None if loss is None else 24 * gpu_count(data) * loss.share


def _action(row: dict[str, Any], data: dict[str, Any]) -> Action:
    share = row["saved_seconds"] / row["now_seconds"]
    parts = [f"{fmt.seconds(row['saved_seconds'])} per step ({fmt.percent(share)})"]
    if row.get("saved_gpu_hours") is not None:
        parts.append(fmt.gpu_hours(row["saved_gpu_hours"]))
    if row.get("saved_money") is not None:
        parts.append(fmt.money(row["saved_money"], value(data, "cost", "currency")))
    assumptions = tuple(fmt.plain(a) for a in row.get("assumptions") or ())
    return Action(fmt.plain(row["action"]), parts[0], " · ".join(parts[1:]), assumptions)


def _trust(data: dict[str, Any]) -> Iterable[Trust]:
    yield _trust_ranks(data)
    yield _trust_steps(data)
    yield _trust_clock(data)
    error = value(data, "replay", "error_fraction")
    trusted = bool(value(data, "replay", "trusted"))
    yield Trust("replay error", "unavailable" if error is None else f"{fmt.percent(error)} of the step", trusted)
    unexplained, window = mean_causes(data)["unexplained"], mean_gpu(data, "window")
    if unexplained is None or not window:
        yield Trust("unexplained", "unavailable", False)
    else:
        share = unexplained / window
        yield Trust("unexplained", f"{fmt.percent(share)} of the step", abs(share) <= UNTRUSTED)


def _trust_ranks(data: dict[str, Any]) -> Trust:
    seen, world = len(value(data, "source", "ranks") or []), value(data, "source", "world_size")
    missing = value(data, "source", "missing_ranks") or []
    text = f"{seen:,} seen, world size unknown" if world is None else f"{seen:,} of {world:,} seen"
    if missing:
        listed = some(missing, 5)
        text += f", missing {listed}"
    return Trust("ranks", text, world is not None and not missing)


def _trust_steps(data: dict[str, Any]) -> Trust:
    analysed, skipped = value(data, "steps", "analysed") or 0, value(data, "steps", "skipped") or []
    return Trust("steps", f"{analysed:,} analysed, {len(skipped):,} skipped", analysed > 0)


def _trust_clock(data: dict[str, Any]) -> Trust:
    hosts = value(data, "clock", "hosts") or []
    if not value(data, "clock", "aligned"):
        parts = {h.get("part") for h in hosts}
        where = f"aligned within {len(parts)} parts of the job only" if len(parts) < len(hosts) else "not aligned"
        return Trust("clock error", f"clocks {where}: waits across GPUs are not split", False)
    widths = [(h["high"] - h["low"]) / 2 for h in hosts if _finite(h.get("high")) and _finite(h.get("low"))]
    if len(hosts) <= 1 and not any(widths):
        return Trust("clock error", "none, one host", True)
    if len(widths) < len(hosts):
        return Trust("clock error", "not bounded", False)
    return Trust("clock error", f"±{fmt.seconds(max(widths))}", True)
