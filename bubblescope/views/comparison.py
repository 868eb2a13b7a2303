"""What `bubblescope diff` says, once for every view: one sentence and the rows of one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bubblescope.views import format as fmt
from bubblescope.views.words import CAUSE, CAUSES

if TYPE_CHECKING:
    from bubblescope.report.compare import Change, Comparison

HEAD = ("before", "after", "change", "95 % interval")
NOTHING = 1e-9
"""Seconds: a cause below this in both runs is left out."""


@dataclass(frozen=True)
class Row:
    """cause: its name, or "". part: whether it is one of the parts of the row before it. worse: more of it than
    before; None where that is not known or not more than noise."""

    name: str
    before: str
    after: str
    change: str
    interval: str
    sure: bool
    cause: str = ""
    part: bool = False
    worse: bool | None = None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return (self.before, self.after, self.change, self.interval)


@dataclass(frozen=True)
class Verdict:
    """One sentence in two parts. worse: None where the unit of work did not change beyond the noise."""

    change: str
    reason: str
    worse: bool | None

    @property
    def sentence(self) -> str:
        return f"{self.change}{self.reason}"


def verdict(found: Comparison) -> Verdict:
    """What happened to a step, or to a micro-batch of it, and the part that explains most of it."""
    taken = found.unit_seconds
    times = f"({fmt.seconds(taken.before)} → {fmt.seconds(taken.after)}{_of_steps(found)})"
    if not taken.sure:
        return Verdict(f"No change of the {found.unit} time beyond the noise", f" {times}.", None)
    worse = found.worse_fraction > 0
    change = f"A {found.unit} takes {fmt.percent(abs(found.worse_fraction))} {'longer' if worse else 'less time'}"
    largest = largest_part(found)
    if largest is None:
        return Verdict(change, f" {times}.", worse)
    part = f"the largest part is {largest[0]} ({fmt.seconds(largest[1], signed=True)})"
    return Verdict(change, f" {times}; {part}.", worse)


def _of_steps(found: Comparison) -> str:
    """The whole steps, where these are not what is compared."""
    if found.microbatches is None:
        return ""
    (old, new), step = found.microbatches, found.step_seconds
    return f"; steps of {old} → {new} micro-batches, {fmt.seconds(step.before)} → {fmt.seconds(step.after)}"


def largest_part(found: Comparison) -> tuple[str, float] | None:
    """The cause, or compute, that changed most in the direction of the whole, with its signed seconds."""
    longer = found.worse_fraction > 0
    parts = {CAUSE[name].label: change for name, change in found.causes.items()} | {"compute": found.busy}
    same_way = {
        name: change.difference
        for name, change in parts.items()
        if change.sure and change.difference is not None and (change.difference > 0) == longer
    }
    if not same_way:
        return None
    name = max(same_way, key=lambda n: abs(same_way[n]))
    return name, same_way[name]


def rows(found: Comparison) -> list[Row]:
    """Unit, step, fraction, busy, idle, its causes, idle of each stage. Causes that neither run has are left out."""
    made = [unit_row(found)]
    if found.per_microbatch is not None:
        made.append(_row("whole step", found.step_seconds))
    made += [fraction_row(found), busy_row(found), idle_row(found), *cause_rows(found)]
    made += [_row(f"idle, stage {stage if stage >= 0 else '?'}", change) for stage, change in found.stages.items()]
    return made


def unit_row(found: Comparison) -> Row:
    return _row(f"{found.unit} time", found.unit_seconds)


def fraction_row(found: Comparison) -> Row:
    return _row("bubble fraction", found.fraction, fmt.percent, fmt.points)


def busy_row(found: Comparison) -> Row:
    return _row("busy", found.busy)


def idle_row(found: Comparison) -> Row:
    return _row("idle", found.idle)


def cause_rows(found: Comparison) -> list[Row]:
    return [_row(CAUSE[name].label, found.causes[name], cause=name) for name in changed_causes(found)]


def changed_causes(found: Comparison) -> list[str]:
    """Causes that at least one of the runs has, in the usual order."""
    return [c.name for c in CAUSES if _has(found.causes[c.name])]


def _has(change: Change) -> bool:
    return any(abs(x) > NOTHING for x in (change.before, change.after) if x is not None)


def _row(
    name: str,
    change: Change,
    plain: Callable[[float | None], str] = fmt.seconds,
    signed: Callable[[float | None], str] = fmt.seconds_signed,
    *,
    cause: str = "",
) -> Row:
    before, after = plain(change.before), plain(change.after)
    if change.difference is None:
        return Row(name, before, after, fmt.MISSING, fmt.MISSING, False, cause, bool(cause))
    interval = f"{signed(change.low)} … {signed(change.high)}"
    worse = change.difference > 0 if change.sure else None
    return Row(name, before, after, signed(change.difference), interval, change.sure, cause, bool(cause), worse)
