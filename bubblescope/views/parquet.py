"""The report's tables as Parquet files, one a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bubblescope.errors import InputError
from bubblescope.views.csv import TABLES

if TYPE_CHECKING:
    import pandas as pd

    from bubblescope.views.source import ReportLike


def write(report: ReportLike, directory: str | Path) -> list[Path]:
    """Write the tables of CSV and every kernel to ``<directory>/<table>.parquet``; returns the paths.

    Raises InputError where pyarrow is missing.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InputError("writing Parquet needs pyarrow", hint="pip install 'bubblescope[parquet]'") from error
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in (*TABLES, "device"):
        path = folder / f"{name}.parquet"
        columns(getattr(report, name)).to_parquet(path, engine="pyarrow", index=False)
        paths.append(path)
    return paths


def columns(table: pd.DataFrame) -> pd.DataFrame:
    """The table with columns of one type each: what holds lists, objects or a mixture becomes JSON text."""
    import pandas as pd

    out = table.copy()
    out.columns = [str(c) for c in table.columns]
    for name in out.columns:
        if out[name].dtype == object and not all(isinstance(v, str) or v is None for v in out[name]):
            out[name] = pd.Series([_text(v) for v in out[name]], index=out.index, dtype=object)
    return out


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str) or value != value:
        return value if isinstance(value, str) else None
    return json.dumps(value, sort_keys=True, default=str)
