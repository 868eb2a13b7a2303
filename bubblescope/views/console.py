"""The first screen in a terminal, in at most twenty lines and eighty columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from bubblescope.model.notice import counted
from bubblescope.views import format as fmt
from bubblescope.views.summary import FirstScreen, first_screen, stage_causes
from bubblescope.views.words import CAUSE, CAUSES

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

MOST_STAGES = 6
WIDTH = 44
_LETTERS = {
    "warmup": "w", "cooldown": "c", "schedule_steady": "s", "stage_imbalance": "I", "slow_worker": "S",
    "transient": "T", "microbatch_imbalance": "M", "p2p_transfer": "P", "exposed_collective": "C",
    "optimizer": "O", "host_launch": "H", "data_loading": "D", "unexplained": "?",
}  # fmt: skip
"""One letter a cause: the bar must be readable without colour too."""


def print_summary(report: ReportLike, console: Console | None = None, path: str | Path | None = None) -> None:
    """Print the summary; `path` is where the full report lies. Colour obeys NO_COLOR and the console."""
    (console or Console(highlight=False)).print(summary(report, path))


def summary(report: ReportLike, path: str | Path | None = None) -> RenderableType:
    screen = first_screen(report)
    lines: list[RenderableType] = [_sentence(screen)]
    lines += [*_bars(report), *_actions(screen), *_osdi(report), _trust(screen), *_notices(report)]
    if path is not None:
        lines.append(Text.assemble(("report: ", "dim"), fmt.plain(path), overflow="fold"))
    return Group(*lines)


def _sentence(screen: FirstScreen) -> Text:
    text = Text(overflow="fold")
    text.append(fmt.plain(screen.lost), "bold")
    text.append(fmt.plain(screen.cost), "bold")
    text.append(fmt.plain(screen.reason))
    text.append(fmt.plain(screen.idle))
    return text


def _actions(screen: FirstScreen) -> list[RenderableType]:
    found: list[RenderableType] = []
    for number, action in enumerate(screen.actions, 1):
        line = f"{number}. saves {action.saving}: {action.text}"
        found.append(Text(fmt.plain(line), no_wrap=True, overflow="ellipsis"))
    return found


def _osdi(report: ReportLike) -> list[RenderableType]:
    """The figures of "Understanding Stragglers" (OSDI'25), by that paper's rules, where the input is its traces."""
    found = report.data.get("straggler")
    if not found:
        return []
    worst = ", ".join(f"{kind} {number:.3f}" for kind, number in list(found["by_type"].items())[:2])
    text = (
        f"OSDI'25 rules: S {found['slowdown']:.4f}, waste {fmt.percent(found['waste'])}, "
        f"M_S {found['stage_share']:.4f}, M_W {found['worker_share']:.4f}; worst types: {fmt.plain(worst)}"
    )
    return [Text(text, "dim", overflow="fold")]


def _trust(screen: FirstScreen) -> Text:
    text = Text(overflow="fold")
    for i, item in enumerate(screen.trust):
        text.append(" · " if i else "", "dim")
        text.append(f"{item.label} {fmt.plain(item.value)}", "" if item.ok else "bold yellow")
    return text


def _notices(report: ReportLike) -> list[RenderableType]:
    count = len((report.data.get("source") or {}).get("warnings") or [])
    if not count:
        return []
    return [Text(f"{counted(count, 'notice')}: see the report or --json", "yellow")]


def _bars(report: ReportLike) -> list[RenderableType]:
    table = stage_causes(report)
    rows = sorted(table.items(), key=lambda item: -sum(max(v or 0.0, 0.0) for v in item[1].values()))
    shown = dict(rows[:MOST_STAGES])
    longest = max((sum(max(v or 0.0, 0.0) for v in row.values()) for row in shown.values()), default=0.0)
    if longest <= 0:
        return []
    drawn = {stage: _shares(row, longest) for stage, row in sorted(shown.items())}
    lines: list[RenderableType] = [_bar(stage, drawn[stage], shown[stage]) for stage in drawn]
    if len(table) > len(shown):
        lines.append(Text(f"  the {len(shown)} of {len(table)} stages that wait most", "dim"))
    return [*lines, Padding(_legend({name for shares in drawn.values() for name in shares}), (0, 0, 0, 2))]


def _shares(row: dict[str, float | None], longest: float) -> dict[str, int]:
    """{cause: letters of the bar}, without those that are too short to be drawn."""
    shares, drawn, reached = {}, 0, 0.0
    for cause in CAUSES:
        reached += max(row[cause.name] or 0.0, 0.0)
        upto = math.floor(WIDTH * reached / longest + 0.5)
        if upto > drawn:
            shares[cause.name] = upto - drawn
        drawn = upto
    return shares


def _bar(stage: int, shares: dict[str, int], row: dict[str, float | None]) -> Text:
    """``stage 3 |wwwwIIII   | 243 ms idle``, a letter for each share of the longest bar."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"  stage {stage:<3} " if stage >= 0 else "  stage ?   ")
    for name, letters in shares.items():
        text.append(_LETTERS[name] * letters, f"on {CAUSE[name].colour} #ffffff")
    idle = sum(v for v in row.values() if v is not None)
    text.append(" " * (WIDTH - sum(shares.values())) + f" {fmt.seconds(idle)} idle")
    return text


def _legend(drawn: set[str]) -> Text:
    text = Text(style="dim", overflow="fold")
    for cause in (c for c in CAUSES if c.name in drawn):
        text.append(("  " if len(text) else "") + f"{_LETTERS[cause.name]} {cause.label}")
    return text
