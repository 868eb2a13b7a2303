"""For all tests. Timings never decide a test, so hypothesis sets no deadline either."""

from __future__ import annotations

from hypothesis import settings

from tests.support.pages import browser, screenshot, visit

__all__ = ["browser", "screenshot", "visit"]  # fixtures: one browser for whoever asks for it

# Programs that tests start, in a virtual environment of their own; nothing of them is imported here.
collect_ignore = ["frameworks/scripts"]

settings.register_profile("bubblescope", deadline=None)
settings.load_profile("bubblescope")
