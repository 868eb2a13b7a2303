"""One step as bars: for notebooks. report.html draws its own, which bears thousands of GPUs."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from bubblescope.errors import UsageError
from bubblescope.model import checks
from bubblescope.views import format as fmt
from bubblescope.views.figures.style import WORK, cause_marker, empty_figure
from bubblescope.views.words import CAUSES, OPERATIONS

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

MOST_RANKS = 64


def typical_step(report: ReportLike) -> int:
    """The step whose length is nearest to the median, the first of them; -1 when there is none."""
    steps = report.steps
    if not len(steps):
        return -1
    distance = (steps["seconds"] - steps["seconds"].median()).abs()
    return int(steps["step"].iloc[int(distance.to_numpy().argmin())])


def timeline_figure(report: ReportLike, step: int | None = None) -> go.Figure:
    """Operations and bubbles of one step (the typical one by default), one row a GPU, at most 64 GPUs.

    Raises UsageError for a step that was not analysed."""
    chosen = typical_step(report) if step is None else step
    known = report.steps["step"].tolist()
    if step is not None and step not in known:
        raise UsageError(f"step {checks.shown(step)} was not analysed; these were: {', '.join(map(str, known))}")
    ops = report.ops[report.ops["step"] == chosen]
    gaps = report.gaps[report.gaps["step"] == chosen]
    every = sorted(set(ops["rank"]) | set(gaps["rank"]))
    ranks = every[:MOST_RANKS]
    origin = min([*ops["start_s"], *gaps["start_s"]], default=0.0)
    figure = empty_figure(90 + 26 * max(1, len(ranks)), f"ms from the start of step {chosen}")
    for kind, label in OPERATIONS.items():
        _bars(figure, ops[(ops["kind"] == kind) & ops["rank"].isin(ranks)], label, {"color": WORK[kind]}, origin)
    for cause in CAUSES:
        part = gaps[(gaps["cause"] == cause.name) & gaps["rank"].isin(ranks)]
        _bars(figure, part, cause.label, cause_marker(cause.name), origin)
    figure.update_layout(barmode="overlay", bargap=0.2, dragmode="zoom")
    order = [f"GPU {r}" for r in reversed(ranks)]
    figure.update_yaxes(categoryorder="array", categoryarray=order, showgrid=False)
    if len(every) > len(ranks):
        figure.add_annotation(text=f"{len(ranks)} of {len(every)} GPUs shown", x=1, y=1.04, xref="paper",
                              yref="paper", showarrow=False)  # fmt: skip
    return figure


def _bars(figure: go.Figure, rows: pd.DataFrame, name: str, marker: dict[str, object], origin: float) -> None:
    if not len(rows):
        return
    length = rows["end_s"] - rows["start_s"]
    figure.add_bar(
        orientation="h", y=[f"GPU {r}" for r in rows["rank"]], x=(length * 1e3).tolist(),
        base=((rows["start_s"] - origin) * 1e3).tolist(), name=name, marker=marker, customdata=_labels(rows),
        hovertemplate=f"%{{y}}: {name} %{{customdata}}, %{{x:.3f}} ms<extra></extra>",
    )  # fmt: skip


def _labels(rows: pd.DataFrame) -> list[str]:
    """Foreign text is escaped, because plotly reads tags in its labels."""
    if "before" in rows:
        return [f"before {escape(fmt.plain(b))}" if b else "at the end" for b in rows["before"]]
    pairs = zip(rows["kind"], rows["microbatch"], strict=True)
    return [f"{kind}{batch}" if batch >= 0 else str(kind) for kind, batch in pairs]
