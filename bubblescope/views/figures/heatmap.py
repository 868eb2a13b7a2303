"""Which stage loses how much to which cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from bubblescope.views import format as fmt
from bubblescope.views.figures.style import empty_figure
from bubblescope.views.summary import stage_causes
from bubblescope.views.words import CAUSES

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike


def heatmap_figure(report: ReportLike) -> go.Figure:
    """Stages down, causes across; a cell is ms per GPU and step, blue where a cause shortens the waiting."""
    table = stage_causes(report)
    causes = [c for c in CAUSES if any(abs(row[c.name] or 0.0) > 1e-9 for row in table.values())]
    cells = [[row[c.name] for c in causes] for row in table.values()]
    few = len(table) <= 24
    figure = empty_figure(120 + (34 if few else 16) * max(1, len(table)))
    top = max((abs(v) for row in cells for v in row if v is not None), default=1.0) * 1e3
    if not causes:
        return figure
    figure.add_heatmap(
        x=[c.label for c in causes], y=[f"stage {s}" if s >= 0 else "stage ?" for s in table],
        z=[[None if v is None else v * 1e3 for v in row] for row in cells], zmin=-top, zmax=top, zmid=0,
        text=[[fmt.milliseconds(v) for v in row] for row in cells], texttemplate="%{text}" if few else "",
        colorscale=[[0, "#2566b0"], [0.5, "#f4f5f7"], [1, "#d55e00"]], xgap=2, ygap=2,
        colorbar={"title": {"text": "ms"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate="%{y}, %{x}: %{text} ms per GPU and step<extra></extra>",
    )  # fmt: skip
    figure.update_layout(
        yaxis={"autorange": "reversed", "showgrid": False},
        xaxis={"side": "top", "showgrid": False, "tickangle": -35},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )
    return figure
