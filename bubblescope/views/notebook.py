"""What a notebook shows for a report: the first screen and its causes. No script, so it is safe to open and light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bubblescope.views import format as fmt
from bubblescope.views.html import parts
from bubblescope.views.html.bar import slices
from bubblescope.views.summary import first_screen, mean_causes, mean_gpu, unavailable, value
from bubblescope.views.words import CAUSE, CAUSES

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

MOST_NOTICES = 3


def render(report: ReportLike) -> str:
    """An HTML fragment of a few kB in the colours of the notebook around it; all foreign text is escaped."""
    screen, warnings = first_screen(report), value(report.data, "source", "warnings") or []
    return parts.environment().get_template("notebook.html.j2").render(
        screen=screen,
        slices=slices(report.data),
        shares_text=unavailable(report.data, "causes", "cause"),
        rows=_rows(report),
        colours={cause.name: cause.colour for cause in CAUSES},
        notices=[fmt.plain(w.get("message") or "") for w in warnings[:MOST_NOTICES]],
        more=max(0, len(warnings) - MOST_NOTICES),
    )  # fmt: skip


def sentence(report: ReportLike) -> str:
    """For `repr`: one line of plain text."""
    return fmt.plain(first_screen(report).sentence)


def _rows(report: ReportLike) -> list[tuple[str, str, str, str, str]]:
    """(name, label, ms per GPU and step, share of the step, ms that fixing it alone would save)."""
    window, causes = mean_gpu(report.data, "window"), mean_causes(report.data)
    rows = []
    for name, length in causes.items():
        if length is not None and abs(length) < 1e-9:
            continue
        share = fmt.percent(length / window) if length is not None and window else "unavailable"
        first_in = value(report.data, "causes", name, "first_in")
        rows.append((name, CAUSE[name].label, fmt.milliseconds(length), share, fmt.milliseconds(first_in)))
    return rows
