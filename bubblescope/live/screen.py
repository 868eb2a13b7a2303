"""The words and figures that only a live page has; all others are those of the report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from bubblescope.cost import prices
from bubblescope.live.watcher import ENDED, MISSING, SILENT, TRAINING, RankState, Snapshot
from bubblescope.model.notice import counted
from bubblescope.report.build import Report
from bubblescope.views import format as fmt
from bubblescope.views.html.tables import MOST_ROWS, Table
from bubblescope.views.summary import (
    Action,
    Figure,
    FirstScreen,
    all_idle,
    first_screen,
    gpu_count,
    headline,
    top_actions,
    value,
)

_ORDER = {SILENT: 0, MISSING: 1, TRAINING: 2, ENDED: 3}


@dataclass(frozen=True)
class Status:
    """The line above the headline. ok is False where somebody should look."""

    state: str
    text: str
    ok: bool = True


def clock(moment: float | None) -> str:
    """
    >>> clock(0.0)
    '00:00:00 UTC'
    """
    return fmt.MISSING if moment is None else f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"


def status(snapshot: Snapshot) -> Status:
    step = max((rank.last_step for rank in snapshot.ranks), default=-1)
    counts = rank_counts(snapshot)
    if snapshot.behind and snapshot.state != "waiting":
        size = f"{snapshot.behind / 2**20:,.1f} MiB"
        return Status("catching up", f"{size} of history still to be read; figures are those of earlier steps")
    if snapshot.state == "waiting":
        return Status("waiting", f"for the first finished step; {counts or 'no rank has written a line yet'}")
    if snapshot.state == SILENT:
        heard = max((rank.heard or 0.0 for rank in snapshot.ranks), default=0.0)
        return Status(SILENT, f"no rank has written a line since {clock(heard)}; last step {step:,}", False)
    ok = not any(rank.state in (SILENT, MISSING) or rank.error for rank in snapshot.ranks)
    return Status(snapshot.state, f"step {step:,}; {counts}", ok)


def rank_counts(snapshot: Snapshot) -> str:
    """
    >>> rank_counts(Snapshot(ranks=(RankState(0, TRAINING), RankState(1, TRAINING), RankState(2, SILENT))))
    '2 ranks training, 1 silent'
    """
    found = [
        (state, sum(rank.state == state for rank in snapshot.ranks)) for state in (TRAINING, SILENT, ENDED, MISSING)
    ]
    parts = [f"{count:,} {state}" for state, count in found if count]
    if parts:
        count, _, word = parts[0].partition(" ")
        parts[0] = f"{count} {'rank' if count == '1' else 'ranks'} {word}"
    return ", ".join(parts)


@dataclass(frozen=True)
class Rate:
    """What is lost while an hour passes. money: None without a price."""

    gpu_hours: float
    money: float | None

    def words(self, currency: str) -> str:
        if self.money is not None:
            return f"{fmt.money(self.money, currency)} an hour"
        return f"{fmt.number(self.gpu_hours)} GPU-hours an hour"


def rate(report: Report) -> Rate | None:
    """GPUs × the headline's share, and that at the price."""
    loss = headline(report.data)
    if loss is None:
        return None
    hours = gpu_count(report.data) * loss.share
    return Rate(hours, prices.money(hours, value(report.data, "cost", "price_per_gpu_hour")))


def screen(snapshot: Snapshot, report: Report) -> FirstScreen:
    """The report's first screen, its cost told by the hour and so far."""
    told = first_screen(report)
    now = rate(report)
    cost = "" if now is None else f": {now.words(snapshot.options.currency)}"
    figures = (told.figures[0], _rate_figure(snapshot, now), _total_figure(snapshot))
    actions = zip(told.actions, top_actions(report.data), strict=True)
    idle = all_idle(report, cost="")
    return replace(
        told, cost=cost, idle=idle, figures=figures, actions=tuple(_by_the_hour(a, row, report) for a, row in actions)
    )


def _by_the_hour(action: Action, row: dict[str, Any], report: Report) -> Action:
    """What an action saves while an hour passes: over the few steps looked at it would be next to nothing."""
    hours = gpu_count(report.data) * row["saved_seconds"] / row["now_seconds"]
    saved = Rate(hours, prices.money(hours, value(report.data, "cost", "price_per_gpu_hour")))
    return replace(action, detail=saved.words(value(report.data, "cost", "currency") or ""))


def _rate_figure(snapshot: Snapshot, now: Rate | None) -> Figure:
    label = "Being lost now" if snapshot.state == TRAINING else "Was being lost"
    if now is None:
        return Figure(label, "unavailable", "how much of the time is lost is not known", False)
    price = snapshot.options.price_per_gpu_hour
    if price is None:
        note = "no price was given: --price-per-gpu-hour shows money"
    else:
        note = f"{fmt.number(now.gpu_hours)} GPU-hours an hour at {fmt.money(price, snapshot.options.currency)} each"
    return Figure(label, now.words(snapshot.options.currency), f"{note}; over the last steps")


def _total_figure(snapshot: Snapshot) -> Figure:
    totals = snapshot.totals
    if not totals.steps:
        return Figure("Lost so far", fmt.MISSING, "no step has been counted yet", False)
    hours = totals.lost_gpu_hours
    price = snapshot.options.price_per_gpu_hour
    steps = f"{counted(totals.steps, 'step')} counted, from step {totals.first_step:,} on"
    note = f"{steps}, {len(totals.gpus):,} GPUs seen"
    if price is None:
        return Figure("Lost so far", fmt.gpu_hours(hours), note)
    amount = fmt.money(prices.money(hours, price), snapshot.options.currency)
    return Figure("Lost so far", amount, f"{fmt.gpu_hours(hours)}; {note}")


def ranks_table(snapshot: Snapshot) -> Table:
    """One row a rank, those first that somebody should look at."""
    everyone = sorted(snapshot.ranks, key=lambda rank: (_ORDER[rank.state], not rank.error, rank.rank))
    rows = [
        (
            f"GPU {rank.rank}", _state_words(rank), fmt.MISSING if rank.stage is None else f"stage {rank.stage}",
            fmt.plain(rank.host) or fmt.MISSING, fmt.MISSING if rank.gpu is None else str(rank.gpu),
            fmt.MISSING if rank.last_step < 0 else f"{rank.last_step:,}", clock(rank.heard),
        )
        for rank in everyone[:MOST_ROWS]
    ]  # fmt: skip
    left = len(everyone) - len(rows)
    note = f"{left:,} more ranks are not listed; none of them needs more attention than these." if left > 0 else ""
    head = ("Rank", "State", "Stage", "Host", "GPU there", "last step", "last heard")
    return Table("Every rank, those first that somebody should look at.", head, tuple(rows), 5, note)


def _state_words(rank: RankState) -> str:
    if rank.error:
        return f"{rank.state}: {fmt.plain(rank.error)}"
    if rank.state == SILENT:
        return f"silent since {clock(rank.heard)}"
    return rank.state


def notices(snapshot: Snapshot, told: list[tuple[str, str, str]], expected: tuple[str, ...]) -> list[Any]:
    """The report's notices without those that only say that the recording is open, and the follower's own."""
    own = [(notice.code, fmt.plain(notice.message), fmt.plain(notice.where)) for notice in snapshot.notices]
    return [*own, *(row for row in told if row[0] not in expected)]
