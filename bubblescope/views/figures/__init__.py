"""plotly figures (graph_objects) of a report, for notebooks and for report.html."""

from bubblescope.views.figures.balance import balance_figure
from bubblescope.views.figures.causes import causes_figure
from bubblescope.views.figures.heatmap import heatmap_figure
from bubblescope.views.figures.steps import steps_figure
from bubblescope.views.figures.timeline import timeline_figure

__all__ = ["balance_figure", "causes_figure", "heatmap_figure", "steps_figure", "timeline_figure"]
