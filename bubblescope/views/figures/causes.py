"""From useful work to the measured step: one bar a cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from bubblescope.replay.causes import INTRINSIC_CAUSES
from bubblescope.views import format as fmt
from bubblescope.views.figures.style import WORK, cause_marker, empty_figure
from bubblescope.views.summary import mean_causes, mean_gpu
from bubblescope.views.words import CAUSES

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike


@dataclass(frozen=True)
class Stair:
    """One bar of the waterfall, in seconds per GPU and step. cause: "" for a sum. A cause that is negative
    goes back."""

    label: str
    cause: str
    start: float
    length: float


def stairs(report: ReportLike) -> list[Stair]:
    """Work, intrinsic causes, their sum, the other causes, the measured step.

    Means over the GPUs seen; causes that are zero or unavailable are left out (then `unexplained` holds their
    time, and there is no such sum). Empty where busy is unavailable.
    """
    busy, causes = mean_gpu(report.data, "busy"), mean_causes(report.data)
    if busy is None:
        return []
    found, at = [Stair("work", "", 0.0, busy)], busy
    for group, total in ((True, "work and schedule alone"), (False, "measured step")):
        for cause in CAUSES:
            length = causes[cause.name] or 0.0
            if (cause.name in INTRINSIC_CAUSES) == group and abs(length) > 1e-9:
                found.append(Stair(cause.label, cause.name, at, length))
                at += length
        if not group or all(causes[name] is not None for name in INTRINSIC_CAUSES):
            found.append(Stair(total, "", 0.0, at))
    return found


def causes_figure(report: ReportLike) -> go.Figure:
    """Waterfall from the work, over what the schedule costs, to the measured step."""
    bars = stairs(report)
    figure = empty_figure(70 + 28 * max(1, len(bars)), "ms per GPU and step")
    for bar in bars:
        text = fmt.seconds(bar.length, signed=bar.cause != "")
        figure.add_bar(
            orientation="h", y=[bar.label], x=[bar.length * 1e3], base=[bar.start * 1e3], showlegend=False,
            text=[text], textposition="outside", cliponaxis=False,
            marker=cause_marker(bar.cause) if bar.cause else {"color": WORK["B"]},
            hovertemplate="%{y}: %{text}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay", bargap=0.25,
        yaxis={"categoryorder": "array", "categoryarray": [b.label for b in reversed(bars)], "showgrid": False},
        xaxis={"rangemode": "tozero"},
    )  # fmt: skip
    if bars:
        figure.update_xaxes(range=[0, 1.18e3 * max(b.start + max(b.length, 0) for b in bars)])
    return figure
