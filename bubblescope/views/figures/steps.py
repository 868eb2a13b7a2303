"""Step time and idle share over the run, outliers marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from bubblescope.views.figures.style import WORK, empty_figure, shaded
from bubblescope.views.words import CAUSE

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike


MOST_TICKS = 20
"""Up to so many steps each has a tick; between them plotly would put halves."""


def steps_figure(report: ReportLike) -> go.Figure:
    """One bar a step: busy below, idle above; outliers carry a diamond."""
    steps = report.steps
    figure = empty_figure(300, "step", "ms per step")
    if not len(steps):
        return figure
    number, length = steps["step"].tolist(), steps["seconds"].to_numpy(dtype=float) * 1e3
    idle = length * steps["idle_fraction"].to_numpy(dtype=float)
    figure.add_bar(x=number, y=length - idle, name="busy", marker={"color": WORK["B"]},
                   hovertemplate="step %{x}: busy %{y:.2f} ms<extra></extra>")  # fmt: skip
    figure.add_bar(x=number, y=idle, name="idle", marker=shaded(CAUSE["stage_imbalance"].colour, "/"),
                   hovertemplate="step %{x}: idle %{y:.2f} ms<extra></extra>")  # fmt: skip
    odd = steps["outlier"].to_numpy(dtype=bool)
    if odd.any():
        figure.add_scatter(
            x=[n for n, o in zip(number, odd, strict=True) if o], y=length[odd] * 1.04, mode="markers",
            name="outlier", marker={"symbol": "diamond", "size": 9, "color": "#c2408f"},
            hovertemplate="step %{x} is an outlier<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.15, yaxis={"rangemode": "tozero"}, xaxis={"tickformat": "d"})
    if len(number) <= MOST_TICKS:
        figure.update_xaxes(tickmode="array", tickvals=number)
    figure.update_xaxes(showgrid=False)
    return figure
