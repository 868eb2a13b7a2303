"""How evenly the work is spread over the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from bubblescope.report.tables import stage_work
from bubblescope.views.figures.style import WORK, empty_figure, shaded
from bubblescope.views.words import OPERATIONS

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

PATTERNS = {"F": "", "B": "/", "I": "/", "W": "x", "loss": ""}


def balance_figure(report: ReportLike) -> go.Figure:
    """Base time per micro-batch of each stage, stacked by operation; the dotted line is the mean."""
    table = report.stage_balance
    figure = empty_figure(300, "stage", "ms per micro-batch")
    stages = [str(s) for s in table["stage"]]
    for letter in PATTERNS:
        times = table[f"{letter}_s"].to_numpy(dtype=float) * 1e3
        if not np.nansum(times) > 0:
            continue
        figure.add_bar(
            x=stages, y=times, name="loss" if letter == "loss" else f"{letter}, {OPERATIONS[letter]}",
            marker=shaded(WORK[letter], PATTERNS[letter]),
            hovertemplate=f"stage %{{x}}: {letter} %{{y:.3f}} ms<extra></extra>",
        )  # fmt: skip
    work = stage_work(report.stage_balance)
    if work:
        mean = float(np.mean(list(work.values()))) * 1e3
        figure.add_scatter(x=stages, y=[mean] * len(stages), mode="lines", name="mean of the stages",
                           line={"dash": "dot", "width": 2, "color": "#d55e00"},
                           hovertemplate="mean %{y:.3f} ms<extra></extra>")  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35, xaxis={"type": "category"}, yaxis={"rangemode": "tozero"})
    figure.update_xaxes(showgrid=False)
    return figure
