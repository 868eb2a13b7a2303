"""A `Part` as one file of columns: how results come back from other processes, and how they are kept between runs.

A line that says what it is, a JSON header (what is not an array, and where each array stands), the arrays as they lie
in memory; of a column that is one value for all rows, that value. Nothing in it is executed when it is read; what is
cut, changed or of another version is refused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from bubblescope.ingest.part import Part
from bubblescope.model import Names, Spans
from bubblescope.model.spans import is_one_value

MAGIC = b"bubblescope part 2\n"
UNFINISHED = ".part-"
"""What the name of a file begins with that is being written."""
_ALIGN = 64
_COLUMNS = tuple(f.name for f in fields(Spans))


class _Header(msgspec.Struct):
    """arrays: name -> [dtype, shape, first byte]. repeated: those of which one value is written. values: every other
    field of the part. crc: of the arrays."""

    texts: list[str]
    values: dict[str, Any]
    arrays: dict[str, tuple[str, tuple[int, ...], int]]
    repeated: set[str]
    size: int
    crc: int


def write(part: Part, path: Path) -> None:
    """Write `part` so that `path` is either whole or not there. Raises OSError when it cannot be written."""
    columns = part.spans.columns()
    repeated = {name for name, column in columns.items() if is_one_value(column) and len(column)}
    columns = {name: column[:1] if name in repeated else column for name, column in columns.items()}
    arrays = {name: np.ascontiguousarray(column) for name, column in (*columns.items(), ("launch", part.launch))}
    values = {f.name: getattr(part, f.name) for f in fields(Part) if f.name not in ("spans", "names", "launch")}
    header = _Header(part.names.texts, values, {}, repeated, 0, 0)
    for name, array in arrays.items():
        shape = (len(part.spans),) if name in repeated else array.shape
        header.arrays[name] = (array.dtype.str, shape, header.size)
        header.size += -(-array.nbytes // _ALIGN) * _ALIGN
        header.crc = zlib.crc32(array.data.cast("B") if array.size else b"", header.crc)
    handle, temporary = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            head = msgspec.json.encode(header)
            file.write(MAGIC + len(head).to_bytes(8, "little") + head)
            file.write(bytes(-file.tell() % _ALIGN))
            for array in arrays.values():
                file.write(array.data)
                file.write(bytes(-array.nbytes % _ALIGN))
        Path(temporary).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def read(path: Path) -> Part | None:
    """The part in the file; its arrays look into the mapped file and cannot be written. None when there is none, or
    it is not sound."""
    try:
        with path.open("rb") as file:
            return _parsed(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError, TypeError, KeyError, msgspec.MsgspecError):
        return None


def _parsed(view: memoryview) -> Part | None:
    start = len(MAGIC) + 8
    if bytes(view[: len(MAGIC)]) != MAGIC:
        return None
    length = int.from_bytes(view[len(MAGIC) : start], "little")
    header = msgspec.json.decode(view[start : start + length], type=_Header)
    body = start + length + (-(start + length) % _ALIGN)
    if len(view) != body + header.size or set(header.arrays) != {*_COLUMNS, "launch"}:
        return None
    arrays, crc = {}, 0
    for name, (kind, shape, at) in header.arrays.items():
        array = _array(view[body:], np.dtype(kind), (1,) if name in header.repeated else shape, at)
        crc = zlib.crc32(array.data.cast("B") if array.size else b"", crc)
        arrays[name] = np.broadcast_to(array[0], shape) if name in header.repeated else array
    if crc != header.crc or len({len(arrays[name]) for name in _COLUMNS}) > 1:
        return None
    hints = get_type_hints(Part)
    values = {name: msgspec.convert(value, hints[name]) for name, value in header.values.items()}
    launch = arrays.pop("launch")
    return Part(spans=Spans(**arrays), names=Names(header.texts), launch=launch, **values)


def _array(body: memoryview, kind: np.dtype[Any], shape: tuple[int, ...], at: int) -> NDArray[Any]:
    if kind.hasobject or any(n < 0 for n in shape) or at < 0:
        raise ValueError("no column")
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, kind)
    return np.frombuffer(body, dtype=kind, count=count, offset=at).reshape(shape)
