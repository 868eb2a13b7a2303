"""Per-layer times that a user wrote down: CSV or JSON.

CSV: a header line and one line a layer, in the model's order; JSON: a list of such objects, alone or as "layers".
Columns: name, forward_s, backward_s; optional: bytes, pinned ("first" for an embedding, "last" for a head).

    name,forward_s,backward_s,bytes,pinned
    embedding,0.0010,0.0012,1500000000,first
    layers.0,0.0021,0.0043,900000000,
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bubblescope.errors import InputError
from bubblescope.ingest import handwritten
from bubblescope.model.layers import LayerTime

HINT = "columns: name, forward_s, backward_s, and if you like bytes, pinned (first or last)"


def read(path: str | Path) -> list[LayerTime]:
    """All layers of the file, in order. Raises InputError, with the row, for anything that is not as it should be."""
    where = str(path)
    try:
        text = handwritten.text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot be read: {reason}", where=where, hint=HINT) from error
    rows = _json_rows(text, where) if text.lstrip()[:1] in ("[", "{") else list(csv.DictReader(io.StringIO(text)))
    if not rows:
        raise InputError("holds no layer", where=where, hint=HINT)
    layers = [_layer(row, number, where) for number, row in enumerate(rows, start=1)]
    _check_pins(layers, where)
    return layers


def _json_rows(text: str, where: str) -> list[Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}", where=where, hint=HINT) from error
    rows = data.get("layers") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise InputError('has no list of layers (alone or under "layers")', where=where, hint=HINT)
    return rows


def _layer(row: Any, number: int, where: str) -> LayerTime:
    def refuse(what: str) -> InputError:
        return InputError(f"layer {number}: {what}", where=where, hint=HINT)

    if not isinstance(row, dict):
        raise refuse("is not an object with named fields")
    pinned = str(row.get("pinned") or "").strip().lower()
    if pinned not in ("", "first", "last"):
        raise refuse(f"pinned is '{pinned}', not first or last")
    size = row.get("bytes")
    return LayerTime(
        str(row.get("name") or f"layer {number}"),
        _number(row, "forward_s", refuse),
        _number(row, "backward_s", refuse),
        bytes=None if size in (None, "") else int(_number(row, "bytes", refuse)),
        pinned=pinned,
    )


def _number(row: dict[str, Any], column: str, refuse: Any) -> float:
    value = row.get(column)
    try:
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise refuse(f"{column} is {value!r}, not a number of 0 or more")
    return number


def _check_pins(layers: Sequence[LayerTime], where: str) -> None:
    """Pinned layers stand at their end, and something is left that can move."""
    order = {"first": 0, "": 1, "last": 2}
    places = [order[layer.pinned] for layer in layers]
    if places != sorted(places):
        raise InputError(
            "layers pinned to the first stage must come first, those pinned to the last one last", where=where
        )
    if 1 not in places:
        raise InputError("every layer is pinned, so there is nothing to move", where=where)
