"""bubblescope: where pipeline-parallel training loses GPU time to bubbles, why, and what it costs."""

from bubblescope._version import __version__

__all__ = ["__version__"]
