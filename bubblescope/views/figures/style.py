"""What all figures share. Colours of text and grid stand here for a light page; report.html sets them per theme."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from bubblescope.views.words import CAUSE

WORK = {
    "F": "#b9c6d6", "B": "#8496ac", "I": "#8496ac", "W": "#61748c", "loss": "#a8a29a", "optimizer": "#a8a29a",
    "other": "#c4c0ba",
}  # fmt: skip
"""Useful work is drawn in quiet greys, so that what stands out is what is lost."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"


def empty_figure(height: int, x_title: str = "", y_title: str = "") -> go.Figure:
    """A figure without plotly's default template, which would add 7 kB and its own colours."""
    figure = go.Figure()
    figure.update_layout(
        template="none", height=height, margin={"l": 8, "r": 16, "t": 8, "b": 44}, dragmode=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="closest",
        font={"family": FONT, "size": 13, "color": "#1c2430"},
        xaxis={"title": {"text": x_title}, "automargin": True, "zeroline": False, "gridcolor": "#d9dee5"},
        yaxis={"title": {"text": y_title}, "automargin": True, "zeroline": False, "gridcolor": "#d9dee5"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
    return figure


def cause_marker(*names: str) -> dict[str, Any]:
    """Marker of bars, one a cause: its colour, and its pattern for readers who do not see the colour."""
    causes = [CAUSE[name] for name in names]
    return {
        "color": [c.colour for c in causes],
        "pattern": {
            "shape": [c.pattern for c in causes], "fgcolor": "rgba(255,255,255,0.75)", "size": 6,
            "solidity": 0.25, "fillmode": "overlay",
        },
        "line": {"width": 0},
    }  # fmt: skip
