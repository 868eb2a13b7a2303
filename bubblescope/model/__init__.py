"""The one data model: what was measured, as values. Nothing here concludes anything."""

from bubblescope.model.action import Action
from bubblescope.model.clock import Clock, HostClock
from bubblescope.model.kinds import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    PIPELINE_KINDS,
    Kind,
    Lane,
)
from bubblescope.model.layout import Layout
from bubblescope.model.links import Links
from bubblescope.model.names import Names
from bubblescope.model.notice import Notice
from bubblescope.model.run import Run, Source
from bubblescope.model.spans import SpanBuilder, Spans

__all__ = [
    "BACKWARD_KINDS",
    "COMPUTE_KINDS",
    "PIPELINE_KINDS",
    "Action",
    "Clock",
    "HostClock",
    "Kind",
    "Lane",
    "Layout",
    "Links",
    "Names",
    "Notice",
    "Run",
    "Source",
    "SpanBuilder",
    "Spans",
]
