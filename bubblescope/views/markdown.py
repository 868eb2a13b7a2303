"""A summary for a pull request or a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bubblescope.views import format as fmt
from bubblescope.views.comparison import HEAD, Row, rows, verdict
from bubblescope.views.summary import first_screen, mean_causes, mean_gpu, value
from bubblescope.views.words import CAUSES, NEGATIVE, RATIOS

if TYPE_CHECKING:
    from bubblescope.report.compare import Comparison
    from bubblescope.views.source import ReportLike


def render(report: ReportLike) -> str:
    """GitHub-flavoured Markdown, ending in a newline. Foreign text cannot become markup or a mention."""
    screen = first_screen(report)
    lines = ["### Pipeline bubbles", "", inert(screen.sentence), ""]
    lines += ["| cause | ms per GPU and step | of the step |", "|---|---:|---:|"]
    window, causes = mean_gpu(report.data, "window"), mean_causes(report.data)
    for cause in CAUSES:
        length = causes[cause.name]
        if length is None or abs(length) > 1e-9:
            share = fmt.percent(length / window) if length is not None and window else "unavailable"
            lines.append(f"| {cause.label} | {fmt.milliseconds(length)} | {share} |")
    if any(length is not None and length <= -1e-9 for length in causes.values()):
        lines += ["", NEGATIVE]
    if screen.actions:
        lines += ["", "| what to do | saves | in all | assuming |", "|---|---|---|---|"]
        for action in screen.actions:
            cells = (action.text, action.saving, action.detail, "; ".join(action.assumptions))
            lines.append("| " + " | ".join(inert(cell) for cell in cells) + " |")
    ratios = [f"{name} {_ratio(value(report.data, 'bubble', name))}" for name, _, _ in RATIOS]
    trust = [f"{item.label} {inert(item.value)}{'' if item.ok else ' ⚠'}" for item in screen.trust]
    return "\n".join([*lines, "", " · ".join(ratios), "", " · ".join(trust)]) + "\n"


def render_comparison(found: Comparison) -> str:
    """The same for `bubblescope diff`. What is more than noise is bold."""
    lines = ["### Pipeline bubbles, before and after", "", inert(verdict(found).sentence), ""]
    lines += ["|  | " + " | ".join(HEAD) + " |", "|---|---:|---:|---:|---:|"]
    lines += [_comparison_line(row) for row in rows(found)]
    lines += ["", f"Seconds per GPU and {found.unit}. Bold: the interval of the change leaves out 0."]
    lines += [f"- ⚠ {inert(notice.message)}" for notice in found.notices]
    return "\n".join(lines) + "\n"


def _comparison_line(row: Row) -> str:
    name = ("· " if row.part else "") + inert(row.name)
    change = f"**{row.change}**" if row.sure else row.change
    return f"| {name} | {row.before} | {row.after} | {change} | {row.interval} |"


def _ratio(number: float | None) -> str:
    return "unavailable" if number is None else f"{number:.4f}"


def inert(text: str) -> str:
    """Text that Markdown shows as it is.

    >>> inert("<b>|*@me")
    '&lt;b&gt;\\\\|\\\\*@\\u200bme'
    """
    text = fmt.plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|#~!":
        text = text.replace(character, f"\\{character}")
    return text.replace("@", "@\u200b")
