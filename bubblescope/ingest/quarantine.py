"""Events that cannot be true: at time zero in a trace of today, an hour long in a window of seconds, or there twice."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bubblescope.ingest.events import DEVICE, Cat, Events, Int
from bubblescope.model import Names, Notice

Mask = NDArray[np.bool_]

# An event may begin one window before or after the window, and last three of them. Kernels that wait for a
# hung peer are long too, but not longer than all that was recorded.
_REACH = 1
_LONGEST = 3


def quarantine(events: Events, names: Names, path: str) -> tuple[Mask, list[Notice]]:
    """Rows to keep, and a Notice with the numbers for those to leave out.

    The yardstick is the span of the ProfilerStep ranges, else of all events but the outermost hundredth.
    """
    keep = np.ones(len(events), dtype=np.bool_)
    if len(events) < 3:
        return keep, []
    low, high = _window(events, names)
    span = max(high - low, 1)
    early_or_late = (events.start_ns < low - _REACH * span) | (events.start_ns > high + _REACH * span)
    too_long = events.end_ns - events.start_ns > _LONGEST * span
    bad = early_or_late | too_long
    if not bad.any() or bad.sum() > len(bad) // 4:
        return keep, []
    worst = int(np.argmax(np.where(bad, np.maximum(events.end_ns - events.start_ns, low - events.start_ns), -1)))
    message = (
        f"{int(bad.sum())} events are not used: {int(early_or_late.sum())} begin far outside the recorded "
        f"window of {span / 1e6:.3f} ms, {int(too_long.sum())} last longer than {_LONGEST} such windows; "
        f"for example '{names[int(events.name[worst])][:60]}'"
    )
    return ~bad, [Notice("events-quarantined", message, path)]


def repeated(events: Events, path: str) -> tuple[Mask, list[Notice]]:
    """Rows of the device that say again what another one says, and a Notice for them. A stream runs a kernel from one
    moment to another once; only what takes no time may do so twice.

    >>> times = np.array([[5, 0, 5, 5], [9, 4, 9, 9]])
    >>> same = np.zeros(4, dtype=np.int64)
    >>> events = Events(same, *times, same, same, np.array([7, 7, 7, 8]), same, same, same, same, same)
    >>> repeated(events, "")[0].tolist()
    [False, False, True, False]
    """
    again = np.zeros(len(events), dtype=np.bool_)
    rows = np.flatnonzero(np.isin(events.cat, DEVICE) & (events.end_ns > events.start_ns))
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    later = np.flatnonzero(np.diff(events.start_ns[rows]) == 0) + 1
    rows = rows[np.union1d(later - 1, later)]
    columns = [getattr(events, name)[rows] for name in events.__dataclass_fields__]
    order = np.lexsort(columns)
    alike = np.logical_and.reduce([np.diff(column[order]) == 0 for column in columns])
    again[rows[order[1:][alike]]] = True
    count = int(alike.sum())
    if count == 0:
        return again, []
    message = f"{count} events of the device are there more than once (written or merged twice?); each is used once"
    return again, [Notice("events-repeated", message, path)]


def _window(events: Events, names: Names) -> tuple[int, int]:
    low, high = _bulk(events.start_ns)
    is_step = np.array([text.startswith("ProfilerStep") for text in names.texts], dtype=np.bool_)
    step = (events.cat == Cat.RANGE) & is_step[events.name]
    start, end = events.start_ns[step], events.end_ns[step]
    sane = (end > low - (high - low)) & (start < high + (high - low))
    sane &= end - start <= 20 * np.median(end - start) if len(start) else sane
    if not sane.any():
        return low, high
    return int(start[sane].min()), int(end[sane].max())


def _bulk(start: Int) -> tuple[int, int]:
    """Where all but the first and last hundredth begin (at least one event is cut off at each side)."""
    ordered = np.sort(start)
    cut = max(1, len(ordered) // 100)
    return int(ordered[cut]), int(ordered[-1 - cut])
