"""`bubblescope diff --html`: two runs side by side. One file in the report's theme; no chart needs plotly.js."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bubblescope._version import __version__
from bubblescope.views import comparison as words
from bubblescope.views import format as fmt
from bubblescope.views.html import parts
from bubblescope.views.html.tables import Table
from bubblescope.views.summary import Figure
from bubblescope.views.words import CAUSE, CAUSES, PHASES, TERMS

if TYPE_CHECKING:
    from bubblescope.report.compare import Change, Comparison

SCRIPTS = ("text.js", "data.js", "charts.js", "page.js")
STYLES = ("report.css", "diff.css", "plotly.css")


@dataclass(frozen=True)
class Part:
    """A part of the bar of one run; offset and share in percent of the longer run's step."""

    name: str
    label: str
    colour: str
    offset: str
    share: str
    text: str


@dataclass(frozen=True)
class Bar:
    """A change as a bar from the middle: all in percent of the drawing. low, high: the interval."""

    row: words.Row
    left: str
    width: str
    low: str
    high: str
    colour: str


def render(found: Comparison, names: tuple[str, str], now: datetime | None = None) -> str:
    """The whole page. names: what BEFORE and AFTER are called. The same input gives the same bytes."""
    scripts, styles = ([parts.asset(name) for name in group] for group in (SCRIPTS, STYLES))
    return parts.environment().get_template("diff.html.j2").render(
        **_content(found, names),
        version=__version__,
        written=None if now is None else fmt.moment(now),
        data=parts.json_for_script({"figures": {}}),
        scripts=parts.trusted(scripts),
        styles=parts.trusted(styles),
        policy=parts.policy(scripts, styles),
    )  # fmt: skip


def write(found: Comparison, names: tuple[str, str], path: str | Path, now: datetime | None = None) -> Path:
    """Write `render(found, names, now)` to `path`, UTF-8."""
    target = Path(path)
    target.write_text(render(found, names, now), encoding="utf-8", newline="\n")
    return target


def _content(found: Comparison, names: tuple[str, str]) -> dict[str, Any]:
    return {
        "unit": found.unit,
        "verdict": words.verdict(found),
        "runs": [fmt.plain(name) for name in names],
        "bars": _run_bars(found),
        "figures": _figures(found),
        "changes": _changes(found),
        "tables": {"all": _all(found), "stages": _stages(found)},
        "notices": [(n.code, fmt.plain(n.message)) for n in found.notices],
        "causes": CAUSES,
        "phases": PHASES,
        "terms": TERMS,
    }


# --- the two bars ---------------------------------------------------------------------------------------------


def _run_bars(found: Comparison) -> list[tuple[str, str, list[Part]]]:
    """(word, time, parts) of each run, on one scale; empty where a run does not show its work."""
    times = [found.unit_seconds.before, found.unit_seconds.after]
    longest = max((t for t in times if t is not None), default=0.0)
    if longest <= 0 or None in (found.busy.before, found.busy.after):
        return []
    return [
        (word, fmt.seconds(time), _parts(_lengths(found, word), (time or 0.0) / longest))
        for word, time in zip(("before", "after"), times, strict=True)
    ]


def _lengths(found: Comparison, attribute: str) -> list[tuple[str, float]]:
    pairs = [("", getattr(found.busy, attribute))]
    pairs += [(name, getattr(found.causes[name], attribute)) for name in words.changed_causes(found)]
    return [(name, value) for name, value in pairs if value is not None]


def _parts(lengths: list[tuple[str, float]], scale: float) -> list[Part]:
    """Parts that take time, as shares of the longer run. A negative cause has no width: the others fill the whole."""
    drawn = [(name, value) for name, value in lengths if value > 0]
    whole, at, made = sum(value for _, value in drawn), 0.0, []
    for name, value in drawn:
        share = 100 * scale * value / whole
        label, colour = (CAUSE[name].label, CAUSE[name].colour) if name else ("useful work", "")
        made.append(Part(name, label, colour, f"{at:.3f}", f"{share:.3f}", fmt.seconds(value)))
        at += share
    return made


# --- figures and changes --------------------------------------------------------------------------------------


def _figures(found: Comparison) -> list[Figure]:
    rows = (words.unit_row(found), words.fraction_row(found), words.idle_row(found))
    labels = (f"{found.unit.capitalize()} time", "Bubble fraction", f"Idle per GPU and {found.unit}")
    changes = (found.unit_seconds, found.fraction, found.idle)
    return [
        Figure(label, row.change, _note(row, change), change.difference is not None)
        for label, row, change in zip(labels, rows, changes, strict=True)
    ]


def _note(row: words.Row, change: Change) -> str:
    text = f"{row.before} → {row.after}"
    if change.difference is None:
        return f"{text}: a run does not show it"
    return f"{text}, 95 % interval {row.interval}" + ("" if change.sure else ": not more than noise")


def _changes(found: Comparison) -> list[Bar]:
    """Compute and causes, largest change first."""
    pairs = [(words.busy_row(found), found.busy)]
    pairs += [(row, found.causes[row.cause]) for row in words.cause_rows(found)]
    pairs.sort(key=lambda pair: -abs(pair[1].difference or 0.0))
    reach = max((abs(x) for _, c in pairs for x in (c.low, c.high, c.difference) if x is not None), default=0.0)
    return [_bar(row, change, reach or 1.0) for row, change in pairs]


def _bar(row: words.Row, change: Change, reach: float) -> Bar:
    def at(value: float | None) -> float:
        return 50 + 48 * (value or 0.0) / reach

    zero, tip = at(0.0), at(change.difference)
    low, high = (f"{at(x):.3f}" for x in (change.low, change.high))
    colour = CAUSE[row.cause].colour if row.cause else ""
    return Bar(row, f"{min(zero, tip):.3f}", f"{abs(tip - zero):.3f}", low, high, colour)


# --- tables ---------------------------------------------------------------------------------------------------


def _all(found: Comparison) -> Table:
    rows = [(row.name, *row.cells, _sure(row)) for row in words.rows(found)]
    head = ("Figure", *words.HEAD, "more than noise")
    caption = (
        f"Every figure, seconds per GPU and {found.unit}; pp: percentage points. Intervals: bootstrap over the steps."
    )
    return Table(caption, head, tuple(rows))


def _sure(row: words.Row) -> str:
    return "yes" if row.sure else "no"


def _stages(found: Comparison) -> Table:
    causes = words.changed_causes(found)
    rows = [
        (
            f"stage {stage}" if stage >= 0 else "not known",
            *_cells([change]),
            *_cells(found.stage_causes[stage][name] for name in causes),
        )
        for stage, change in found.stages.items()
    ]  # fmt: skip
    head = ("Stage", "idle", *(CAUSE[name].label for name in causes))
    return Table(
        f"Change of the idle time of each stage, and of its causes, in ms per GPU and {found.unit}. "
        "*: more than noise.",
        head,
        tuple(rows),
    )


def _cells(changes: Iterable[Change]) -> list[str]:
    return [_signed_ms(change) for change in changes]


def _signed_ms(change: Change) -> str:
    if change.difference is None:
        return "unavailable"
    text = fmt.milliseconds(change.difference)
    return ("+" if change.difference > 0 and text != "0" else "") + text + ("*" if change.sure else "")
