"""Everything that took time, as one struct of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.model.kinds import Kind, Lane

Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

_DTYPES: dict[str, Any] = {
    "rank": np.int32,
    "step": np.int32,
    "lane": np.int8,
    "kind": np.int8,
    "device": np.int16,
    "stream": np.int32,
    "stage": np.int32,
    "chunk": np.int32,
    "microbatch": np.int32,
    "start_ns": np.int64,
    "end_ns": np.int64,
    "name": np.int32,
    "peer": np.int32,
    "group": np.int32,
    "seq": np.int64,
    "bytes": np.int64,
    "corr": np.int64,
}
DEFAULTS: dict[str, int] = {
    "rank": 0,
    "step": -1,
    "lane": Lane.COMPUTE,
    "kind": Kind.OTHER,
    "device": -1,
    "stream": -1,
    "stage": -1,
    "chunk": -1,
    "microbatch": -1,
    "start_ns": 0,
    "end_ns": 0,
    "name": 0,
    "peer": -1,
    "group": 0,
    "seq": -1,
    "bytes": -1,
    "corr": -1,
}


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans as columns of equal length, shape (n,). -1 means "not known" except where said.

    rank: global rank that did it. step: optimizer step, -1 none. lane, kind: see `Lane`, `Kind`.
    device: index of the device it occupied, -1 = none (host time, annotations). stream: device stream or
    host thread, for display. stage: global (virtual) stage 0..p·v-1. chunk: 0..v-1 on its rank. microbatch: 0..m-1
    (gradient accumulation counts on through the step). start_ns, end_ns: half open [start, end), integer
    nanoseconds on one clock per host. name: index into `Run.names`. peer: global rank at the other end of a P2P.
    group: index into `Run.names` of the communicator. seq: position within the communicator (collectives), or
    a message number that both ends of a P2P know. bytes: payload. corr: launch correlation id, unique per rank.
    """

    rank: NDArray[np.int32]
    step: NDArray[np.int32]
    lane: NDArray[np.int8]
    kind: NDArray[np.int8]
    device: NDArray[np.int16]
    stream: NDArray[np.int32]
    stage: NDArray[np.int32]
    chunk: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    start_ns: Int
    end_ns: Int
    name: NDArray[np.int32]
    peer: NDArray[np.int32]
    group: NDArray[np.int32]
    seq: Int
    bytes: Int
    corr: Int

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def duration_ns(self) -> Int:
        return self.end_ns - self.start_ns

    def take(self, rows: Mask | Int | slice) -> Spans:
        """The chosen rows, in that order."""
        return Spans(**{f: getattr(self, f)[rows] for f in COLUMNS})

    def where(self, **equal: int | Iterable[int]) -> Mask:
        """Rows whose columns equal the value, or are in the given values: ``spans.where(kind=Kind.FORWARD)``."""
        mask = np.ones(len(self), dtype=np.bool_)
        for column, wanted in equal.items():
            values = getattr(self, column)
            if isinstance(wanted, Iterable):
                mask &= np.isin(values, np.fromiter((int(w) for w in wanted), dtype=np.int64))
            else:
                mask &= values == int(wanted)
        return mask

    def with_columns(self, **columns: NDArray[Any]) -> Spans:
        """A copy with these columns replaced (cast to their dtype)."""
        new = {f: getattr(self, f) for f in COLUMNS}
        for column, values in columns.items():
            new[column] = np.asarray(values).astype(_DTYPES[column], copy=False)
        return Spans(**new)

    def sorted(self) -> Spans:
        """By rank, start, end; stable, so equal rows keep the order they were written in."""
        return self.take(np.lexsort((self.end_ns, self.start_ns, self.rank)).astype(np.int64))

    @classmethod
    def from_columns(cls, length: int, **columns: Any) -> Spans:
        """Spans of `length` rows; a column is an array or a scalar, a missing one takes its default."""
        unknown = set(columns) - set(COLUMNS)
        if unknown:
            raise TypeError(f"unknown span columns {sorted(unknown)}")
        made = {}
        for column in COLUMNS:
            value = columns.get(column, DEFAULTS[column])
            array = np.asarray(value).astype(_DTYPES[column], copy=False)
            made[column] = np.broadcast_to(array, length) if array.ndim == 0 else array
            if len(made[column]) != length:
                raise ValueError(f"column {column} has {len(made[column])} rows, not {length}")
        return cls(**made)

    @classmethod
    def empty(cls) -> Spans:
        return cls.from_columns(0)

    @classmethod
    def concat(cls, parts: Sequence[Spans]) -> Spans:
        """All rows of all parts, in order. The parts must share one `Names` table."""
        return cls.moved(list(parts))

    @classmethod
    def moved(cls, parts: list[Spans]) -> Spans:
        """As `concat`, but the parts are taken out of the list: where nothing else holds them, memory has one column
        twice, and not all."""
        if len(parts) <= 1:
            return parts.pop() if parts else cls.empty()
        columns = [part.columns() for part in parts]
        parts.clear()
        return cls(**{f: joined([given.pop(f) for given in columns]) for f in COLUMNS})

    def columns(self) -> dict[str, NDArray[Any]]:
        """All columns by name."""
        return {f: getattr(self, f) for f in COLUMNS}

    @classmethod
    def remade(cls, columns: dict[str, NDArray[Any]], change: Callable[[str, NDArray[Any]], NDArray[Any]]) -> Spans:
        """Spans of the changed columns. Each is taken out of `columns` first, so that of many rows memory holds one
        column twice, and not all."""
        return cls(**{f: change(f, columns.pop(f)) for f in COLUMNS})

    def rows(self) -> Iterator[dict[str, int]]:
        """Row by row, for tests and small tables; not for hot code."""
        for i in range(len(self)):
            yield {f: int(getattr(self, f)[i]) for f in COLUMNS}


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Spans))


def is_one_value(column: NDArray[Any]) -> bool:
    """Whether this column is one value in memory that stands for all rows, as `Spans.from_columns` makes of scalars."""
    return column.strides == (0,)


def joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One column of several; those that are one and the same value stay one value in memory.

    >>> joined([np.broadcast_to(7, 2), np.broadcast_to(7, 3)]).strides, joined([np.array([7]), np.array([8])]).tolist()
    ((0,), [7, 8])
    """
    filled = [column for column in columns if len(column)]
    if not filled:
        return columns[0]
    if all(is_one_value(column) and column[0] == filled[0][0] for column in filled):
        return np.broadcast_to(filled[0][0], sum(map(len, filled)))
    return np.concatenate(filled)


class SpanBuilder:
    """Collects spans row by row (readers of small inputs, tests); big readers use `Spans.from_columns`.

    >>> builder = SpanBuilder()
    >>> builder.add(rank=0, kind=Kind.FORWARD, start_ns=0, end_ns=5)
    >>> len(builder.build())
    1
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[int]] = {f: [] for f in COLUMNS}

    def add(self, **values: int) -> None:
        unknown = values.keys() - self._columns.keys()
        if unknown:
            raise TypeError(f"unknown span columns {sorted(unknown)}")
        for column, cells in self._columns.items():
            cells.append(int(values.get(column, DEFAULTS[column])))

    def __len__(self) -> int:
        return len(self._columns["rank"])

    def build(self) -> Spans:
        return Spans.from_columns(len(self), **self._columns)
