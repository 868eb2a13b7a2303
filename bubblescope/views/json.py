"""`report.json`: the report as strict JSON, keys in the order of CONTRACT.md."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike


def render(report: ReportLike) -> str:
    """Text of report.json, ending in a newline. A figure that is not finite is unavailable, hence null."""
    return json.dumps(strict(report.data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write(report: ReportLike, path: str | Path) -> None:
    Path(path).write_text(render(report), encoding="utf-8")


def strict(value: Any) -> Any:
    """The same value out of JSON's own types only: NumPy scalars become numbers, NaN and infinity None."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value
