"""bubblescope: where pipeline-parallel training loses GPU time to bubbles, why, and what it costs.

>>> import bubblescope as bs                                                         # doctest: +SKIP
>>> report = bs.analyze(bs.load("runs/x"), price_per_gpu_hour=2.5)                   # doctest: +SKIP
>>> report.to_html("report.html")                                                    # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from bubblescope._version import __version__

if TYPE_CHECKING:
    from bubblescope._api import analyze, load
    from bubblescope.capture import instrument, record, span, step
    from bubblescope.model.run import Run
    from bubblescope.report.build import Report

# Public name -> where it lives. Nothing of it is imported before it is used: a training process must not
# pay for pandas, nor an analysis for torch.
_PUBLIC = {
    "Report": "bubblescope.report.build",
    "Run": "bubblescope.model.run",
    "analyze": "bubblescope._api",
    "instrument": "bubblescope.capture",
    "load": "bubblescope._api",
    "record": "bubblescope.capture",
    "span": "bubblescope.capture",
    "step": "bubblescope.capture",
}

__all__ = ["Report", "Run", "__version__", "analyze", "instrument", "load", "record", "span", "step"]


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'bubblescope' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("BUBBLESCOPE") == "standby":
    from bubblescope.attach import sitehook as _sitehook

    _sitehook.install_or_say()
