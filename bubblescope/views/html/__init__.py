"""`report.html`: one file that needs nothing else, and asks nothing of the network."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bubblescope.views.html import parts
from bubblescope.views.html.page import page

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

SCRIPTS = ("text.js", "data.js", "timeline.js", "charts.js", "whatif.js", "page.js")
STYLES = ("report.css", "plotly.css")


def render(report: ReportLike, now: datetime | None = None) -> str:
    """The whole page. `now` is the time of writing printed on it; None prints only the report's own `created`.

    The same report and `now` give the same bytes.
    """
    content = page(report, now)
    scripts = [parts.plotly(), *[parts.asset(name) for name in SCRIPTS]]
    styles = [parts.asset(name) for name in STYLES]
    plotly, *rest = parts.trusted(scripts)
    return parts.environment().get_template("report.html.j2").render(
        **content.words,
        data=parts.json_for_script(content.data),
        plotly=plotly,
        scripts=rest,
        styles=parts.trusted(styles),
        policy=parts.policy(scripts, styles),
        unwanted=parts.unwanted_styles(),
    )  # fmt: skip


def write(report: ReportLike, path: str | Path, now: datetime | None = None) -> Path:
    """Write `render(report, now)` to `path`, UTF-8."""
    target = Path(path)
    target.write_text(render(report, now), encoding="utf-8", newline="\n")
    return target
