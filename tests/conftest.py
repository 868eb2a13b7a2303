"""For all tests. Timings never decide a test, so hypothesis sets no deadline either."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("bubblescope", deadline=None)
settings.load_profile("bubblescope")
