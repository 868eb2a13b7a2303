"""What all figures share. Text and grid have the colours of a light page; report.html sets them per theme."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from bubblescope.views.words import CAUSE

WORK = {
    "F": "#b9c6d6", "B": "#8496ac", "I": "#8496ac", "W": "#61748c", "loss": "#a8a29a", "optimizer": "#a8a29a",
    "recompute": "#cdbfa6",
    "other": "#c4c0ba",
}  # fmt: skip
"""Useful work is drawn in quiet greys, so that what stands out is what is lost."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"


_AXIS = {"automargin": True, "zeroline": False, "gridcolor": "#d9dee5"}


def empty_figure(height: int, x_title: str = "", y_title: str = "") -> go.Figure:
    """A figure without plotly's default template, which would add 7 kB and its own colours."""
    figure = go.Figure()
    figure.update_layout(
        template="none", height=height, margin={"l": 8, "r": 16, "t": 8, "b": 44}, dragmode=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="closest",
        font={"family": FONT, "size": 13, "color": "#1c2430"},
        xaxis={"title": {"text": x_title, "font": {"size": 13}}, **_AXIS},
        yaxis={"title": {"text": y_title, "font": {"size": 13}}, **_AXIS},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    )  # fmt: skip
    return figure


def shaded(colour: str, shape: str) -> dict[str, Any]:
    """Marker of bars of one colour with a fine white pattern."""
    return {"color": colour, "pattern": {"shape": shape, "fgcolor": "#fff", "solidity": 0.2, "fillmode": "overlay"}}


def cause_marker(*names: str) -> dict[str, Any]:
    """Marker of bars, one a cause: its colour, and its pattern for readers who do not see the colour."""
    causes = [CAUSE[name] for name in names]
    one = len(causes) == 1
    return {
        "color": causes[0].colour if one else [c.colour for c in causes],
        "pattern": {
            "shape": causes[0].pattern if one else [c.pattern for c in causes],
            "fgcolor": "rgba(255,255,255,0.75)", "size": 6,
            "solidity": 0.25, "fillmode": "overlay",
        },
        "line": {"width": 0},
    }  # fmt: skip
