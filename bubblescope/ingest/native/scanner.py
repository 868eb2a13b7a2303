"""`scanner.c` as a way into `Columns`: one scanner per file."""

from __future__ import annotations

import ctypes
import os
import weakref
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bubblescope.ingest.events import CATEGORIES, Cat
from bubblescope.ingest.kineto_columns import Columns
from bubblescope.ingest.kineto_structs import COMM_ARGS, ONE
from bubblescope.ingest.native import status

_WIDE = ("start_ns", "end_ns", "pid", "tid", "device", "stream", "corr", "sequence")
_SHORTEST_ROW = 40
_METADATA, _ARROW, _BEGIN = -1, -2, -3
_ENOUGH = 1 << 14
"""Rows that are handed on at once: the work of NumPy on a few hundred costs as much as on these."""
_DECODE = msgspec.json.Decoder(str).decode


class _Rows(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("cat", "name", *_WIDE, "aside")]
        + [(name, ctypes.c_int64) for name in ("rows", "asides")]
    )  # fmt: skip


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("seen", "rows", "asides", "names")]


def open_scanner(columns: Columns) -> Scanner | None:
    """A scanner that fills `columns`; None where the native one is not to be had."""
    library = status().library
    return None if library is None else Scanner(library, columns)


class Scanner:
    """Reads arrays of events; `flush` before anything else adds to the columns, and at the end. Holds the texts of
    names on the C side and their numbers in `Columns.names` here."""

    def __init__(self, library: ctypes.CDLL, columns: Columns) -> None:
        self._library = library
        self._columns = columns
        self._handle = library.bubblescope_new(int.from_bytes(os.urandom(8), "little"))
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, library.bubblescope_free, self._handle)
        for text, code in CATEGORIES.items():
            raw = text.encode()
            if not library.bubblescope_category(self._handle, raw, len(raw), int(code)):
                raise ValueError(f"no room for the category {text}")
        self._to_names = np.empty(0, dtype=np.int32)
        self._known = 0
        self._arrays: dict[str, NDArray[Any]] = {}
        self._rows = _Rows()
        self._counts = _Counts()

    def take(self, array: bytes | memoryview) -> bool:
        """Add the events of the JSON array; False, and nothing added, when Python must look at it."""
        text = np.frombuffer(array, dtype=np.uint8)
        self._make_room(len(text))
        counts = self._counts
        before = counts.rows
        done = self._library.bubblescope_scan(
            self._handle, text.ctypes.data, len(text), int(Cat.BARE), ctypes.byref(self._rows), ctypes.byref(counts)
        )
        if not done:
            return False
        asides = self._decoded(array)
        if asides is None:
            counts.rows = before
            return False
        self._columns.seen += counts.seen
        comm = self._arrays["comm"]
        comm[before : counts.rows] = -1
        for row, found in asides:
            if row == _METADATA:
                self._columns.add_metadata(found)
            elif row == _ARROW:
                self._columns.add_arrow(found, begins=found.ph == "s")
            elif row == _BEGIN:
                self._columns.add_begin(found)
            elif found.collective is not None or found.group is not None:
                comm[row] = self._columns.comm(found)
        if counts.rows >= _ENOUGH:
            self.flush()
        return True

    def flush(self) -> None:
        """Hand on the rows that were taken."""
        self._learn_names()
        rows, self._counts.rows = self._counts.rows, 0
        block = {name: self._arrays[name][:rows] for name in ("cat", "comm", *_WIDE)} if rows else {}
        if block:
            block["name"] = self._to_names[self._arrays["name"][:rows]]
            self._columns.add_block(block, rows)

    def _make_room(self, length: int) -> None:
        need = length // _SHORTEST_ROW + 1
        if self._counts.rows + need <= self._rows.rows:
            return
        self.flush()
        rows = need + need // 4 + _ENOUGH
        self._arrays = {name: np.empty(rows, dtype=np.int64) for name in _WIDE}
        self._arrays["cat"] = np.empty(rows, dtype=np.int8)
        self._arrays["name"] = np.empty(rows, dtype=np.int32)
        self._arrays["comm"] = np.empty(rows, dtype=np.int32)
        self._arrays["aside"] = np.empty(3 * rows, dtype=np.int64)
        for name in ("cat", "name", *_WIDE, "aside"):
            setattr(self._rows, name, self._arrays[name].ctypes.data)
        self._rows.rows = self._rows.asides = rows

    def _decoded(self, array: bytes | memoryview) -> list[tuple[int, Any]] | None:
        """The objects that C leaves to Python: (row, NCCL arguments), metadata events, arrows while these matter,
        begins of pairs."""
        out: list[tuple[int, Any]] = []
        found = self._arrays["aside"][: 3 * self._counts.asides].reshape(-1, 3)
        view = memoryview(array)
        try:
            for row, start, end in found.tolist():
                if row == _ARROW and self._columns.numbered:
                    continue
                decode = ONE.decode if row < 0 else COMM_ARGS.decode
                out.append((row, decode(view[start:end])))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return out

    def _learn_names(self) -> None:
        """Numbers in `Columns.names` of the names that C has met since."""
        total = self._counts.names
        if total == self._known:
            return
        library, handle = self._library, self._handle
        arena = library.bubblescope_arena(handle)
        every = (ctypes.c_int64 * (total + 1)).from_address(library.bubblescope_offsets(handle))
        offsets = np.frombuffer(every, dtype=np.int64)[self._known :]
        whole = ctypes.string_at(arena + int(offsets[0]), int(offsets[-1] - offsets[0]))
        at = (offsets - offsets[0]).tolist()
        intern = self._columns.names.intern
        new = [intern(_DECODE(b'"' + whole[a:b] + b'"')) for a, b in pairwise(at)]
        self._to_names = np.concatenate([self._to_names, np.array(new, dtype=np.int32)])
        self._known = total
