"""For all tests. Timings never decide a test, so hypothesis sets no deadline either."""

from __future__ import annotations

from hypothesis import settings

from tests.support.pages import browser, screenshot, visit

__all__ = ["browser", "screenshot", "visit"]  # fixtures: one browser for whoever asks for it

settings.register_profile("bubblescope", deadline=None)
settings.load_profile("bubblescope")
