"""For all tests. Timings never decide a test, so hypothesis sets no deadline either."""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.support.pages import browser, screenshot, visit

__all__ = ["browser", "screenshot", "visit"]  # fixtures: one browser for whoever asks for it

# A shell that starts the tests in the background, or nohup, has signals ignored, and all children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Programs that tests start, in a virtual environment of their own; nothing of them is imported here.
collect_ignore = ["frameworks/scripts"]

settings.register_profile("bubblescope", deadline=None)
settings.load_profile("bubblescope")
