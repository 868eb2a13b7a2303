"""The columns of one recorded step as arrays, checked: whatever a line holds, what comes out is in range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bubblescope.model import Kind, Lane
from bubblescope.model.kinds import SHORT

Int = NDArray[np.int64]
Small = NDArray[np.int32]

KINDS = {SHORT.get(kind, kind.name): int(kind) for kind in Kind}
LANES = {lane.name.lower(): int(lane) for lane in Lane}
NARROW = ("stage", "chunk", "microbatch", "peer", "device")
WIDE = ("start_ns", "end_ns", "seq", "bytes")
_LIMIT = {"device": 2**15 - 1}
MAX_NS = 2**60
"""36 years: monotonic times and sizes beyond it are damage. With wall times below 2**61 no sum leaves int64."""


class Columns(Protocol):
    """What a step line holds: lists of one length."""

    kind: list[str]
    lane: list[str]
    name: list[int]
    group: list[int]
    host_start_ns: list[int] | None
    host_end_ns: list[int] | None


@dataclass(frozen=True, eq=False)
class Rows:
    """kind, lane: as in `Spans`. name, group: index into the texts of the line. numbers: `NARROW` and `WIDE` columns.
    host_start_ns: empty where the line has none."""

    kind: NDArray[np.int8]
    lane: NDArray[np.int8]
    name: Small
    group: Small
    numbers: dict[str, Int | Small]
    host_start_ns: Int

    def __len__(self) -> int:
        return len(self.kind)


def pack(columns: Columns, texts: int) -> Rows | str:
    """The arrays, or what is wrong with the columns. `texts`: how many texts the line has."""
    lists = {name: getattr(columns, name) for name in ("kind", "lane", "name", "group", *NARROW, *WIDE)}
    lists |= {n: c for n in ("host_start_ns", "host_end_ns") if (c := getattr(columns, n)) is not None}
    lengths = {len(column) for column in lists.values()}
    if len(lengths) > 1:
        return f"its columns have {min(lengths)} to {max(lengths)} rows"
    kind, lane = _codes(columns.kind, KINDS), _codes(columns.lane, LANES)
    if kind is None or lane is None:
        return "an unknown kind or lane"
    name, group = _numbers(columns.name, 0, texts - 1), _numbers(columns.group, 0, texts - 1)
    if name is None or group is None:
        return "a name index out of range"
    numbers: dict[str, Int | Small] = {}
    for key in NARROW:
        found = _numbers(lists[key], -1, _LIMIT.get(key, 2**31 - 1))
        if found is None:
            return f"{key} out of range"
        numbers[key] = found.astype(np.int32)
    hosts = [_numbers(lists.get(key, []), 1 - MAX_NS, MAX_NS - 1) for key in ("host_start_ns", "host_end_ns")]
    for key in WIDE:
        found = _numbers(lists[key], 1 - MAX_NS, MAX_NS - 1)
        if found is None:
            return "a number out of range"
        numbers[key] = found
    if hosts[0] is None or hosts[1] is None:
        return "a number out of range"
    return Rows(kind, lane, name.astype(np.int32), group.astype(np.int32), numbers, hosts[0])


def _codes(texts: Sequence[str], table: dict[str, int]) -> NDArray[np.int8] | None:
    try:
        return np.fromiter(map(table.__getitem__, texts), np.int8, len(texts))
    except KeyError:
        return None


def _numbers(values: Sequence[int], low: int, high: int) -> Int | None:
    """None when one is below `low` or above `high`."""
    try:
        out = np.fromiter(values, np.int64, len(values))
    except OverflowError:
        return None
    if len(out) and (out.min() < low or out.max() > high):
        return None
    return out
