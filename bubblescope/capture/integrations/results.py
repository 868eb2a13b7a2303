"""What a finished recording says, as a few numbers for an experiment tracker."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("bubblescope")

ANALYSIS_S = 600.0


def metrics(folder: str | os.PathLike[str], timeout_s: float = ANALYSIS_S) -> dict[str, float]:
    """The recording's bubble ratios and causes, by names fit for a tracker; {} when it cannot be analysed.

    The analysis is a process of its own: this one, which trains, shall not load pandas. Causes are seconds per step
    summed over the GPUs.
    """
    command = [sys.executable, "-m", "bubblescope", "analyze", os.fspath(Path(folder)), "--json", "-"]
    environment = {name: value for name, value in os.environ.items() if name != "BUBBLESCOPE"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True, env=environment)
        return flatten(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("bubblescope: no results to log: %s", _why(error))
        return {}


def _why(error: Exception) -> str:
    said = str(getattr(error, "stderr", "") or "").strip().splitlines()
    return said[0] if said else f"{type(error).__name__}: {error}"


def flatten(report: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a report.json; what is not available is left out.

    >>> flatten({"bubble": {"fraction": 0.25, "over_ideal": None}, "steps": {"seconds_median": 2.0}})
    {'bubblescope/bubble/fraction': 0.25, 'bubblescope/step_seconds': 2.0}
    """
    found: dict[str, Any] = {
        f"bubblescope/bubble/{name}": value for name, value in (report.get("bubble") or {}).items()
    }
    for name, cause in (report.get("causes") or {}).items():
        found[f"bubblescope/causes/{name}_seconds"] = cause.get("seconds")
    found["bubblescope/step_seconds"] = (report.get("steps") or {}).get("seconds_median")
    cost = report.get("cost") or {}
    found["bubblescope/idle_gpu_hours"] = cost.get("idle_gpu_hours")
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
