"""Recording inside a training process.

Imports only `model` and `errors`. Importing this imports neither torch, which the job does itself, nor NumPy: the
start of every process of a job passes here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recording, instrument, record, span, step

__all__ = ["Recording", "instrument", "record", "span", "step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bubblescope.capture' has no attribute {name!r}")
    value = getattr(importlib.import_module("bubblescope.capture.recorder"), name)
    globals()[name] = value
    return value
