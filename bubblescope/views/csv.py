"""The report's tables as CSV files, one a table."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from bubblescope.views.source import ReportLike

TABLES = ("gpus", "causes", "gaps", "ops", "steps", "p2p", "messages", "advice", "stage_balance", "ideal")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def write(report: ReportLike, directory: str | Path) -> list[Path]:
    """Write every table of `TABLES` to ``<directory>/<table>.csv``; returns the paths."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in TABLES:
        path = folder / f"{name}.csv"
        path.write_text(table_text(getattr(report, name)), encoding="utf-8", newline="")
        paths.append(path)
    return paths


def table_text(table: pd.DataFrame) -> str:
    """RFC 4180 with a header line. An unavailable value is an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([_cell(str(column)) for column in table.columns])
    for row in table.itertuples(index=False, name=None):
        writer.writerow([_cell(value) for value in row])
    return out.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, (list, tuple)):
        return harmless("; ".join(str(item) for item in value))
    if isinstance(value, dict):
        return harmless("; ".join(f"{key}={item}" for key, item in value.items()))
    if hasattr(value, "item"):
        value = value.item()
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return format(value, ".12g") if isinstance(value, float) else harmless(str(value))


def harmless(text: str) -> str:
    """A text that a spreadsheet would run as a formula gets an apostrophe before it (OWASP, CSV injection).

    >>> harmless("=1+1"), harmless(" @x"), harmless("F0")
    ("'=1+1", "' @x", 'F0')
    """
    return f"'{text}" if text.lstrip(" \x00\ufeff").startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "\n" not in text and "\t" not in text
