"""Times of a recording on one clock: of the device on its host's, of hosts on rank 0's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.ingest import hostclocks
from bubblescope.ingest.recorded_lines import File
from bubblescope.model import Clock, HostClock, Lane, Spans

Int = NDArray[np.int64]

_HOST_LANES = (int(Lane.HOST), int(Lane.RANGE))
_MAX_DRIFT = 1e-3
"""Clocks differ by parts per million; a steeper line comes from damaged rows."""


def on_host_clock(file: File, spans: Spans) -> Spans:
    """Put device times on the host's clock.

    Each event ran no earlier than the host recorded it; the largest (host - device) of a stretch is thus close
    to the true offset whenever the device had run out of work in it. A line through those of up to 16 stretches
    gives offset and drift.
    """
    centres, bounds = [], []
    for step, rows in zip(file.steps, file.rows, strict=True):
        if step.partial or not len(rows.host_start_ns):
            continue
        host, device = rows.host_start_ns, rows.numbers["start_ns"]
        on_device = (host >= 0) & ~np.isin(rows.lane, _HOST_LANES)
        if on_device.any():
            centres.append(int(device[on_device].mean()))
            bounds.append(int((host - device)[on_device].max()))
    if not bounds:
        return spans
    centre, offset, drift = envelope(np.array(centres), np.array(bounds))
    device_rows = ~np.isin(spans.lane, _HOST_LANES)

    def moved(times: Int) -> Int:
        shift = offset + np.rint((times - centre) * drift).astype(np.int64)
        return np.where(device_rows, times + shift, times)

    return spans.with_columns(start_ns=moved(spans.start_ns), end_ns=moved(spans.end_ns))


def envelope(times: Int, bounds: Int) -> tuple[int, int, float]:
    """(centre, offset, drift) of the line above lower bounds `bounds` at `times`: offset at centre, drift per ns.

    With fewer than 8 points the drift is 0.

    >>> envelope(np.array([0, 10]), np.array([3, 5]))
    (5, 5, 0.0)
    """
    centre = int(times.mean())
    if len(times) < 8:
        return centre, int(bounds.max()), 0.0
    blocks = np.array_split(np.argsort(times, kind="stable"), min(16, len(times) // 2))
    tops = np.array([block[np.argmax(bounds[block])] for block in blocks])
    drift = float(np.polyfit((times[tops] - centre).astype(float), bounds[tops].astype(float), 1)[0])
    if not abs(drift) <= _MAX_DRIFT:
        drift = 0.0
    residual = bounds[tops] - np.rint((times[tops] - centre) * drift).astype(np.int64)
    return centre, int(np.median(residual)), drift


def clock(files: list[File]) -> tuple[Clock, list[Move]]:
    """What to add to each file's times. Ranks of one host share a clock, and must not be moved against each other."""
    anchors: dict[str, tuple[int, str]] = {}
    readings: dict[str, list[hostclocks.Reading]] = {}
    for file in files:
        perf, wall = file.header.clock
        anchors.setdefault(file.host_key, (wall - perf, file.header.host))
        readings.setdefault(file.host_key, []).extend(file.readings)
    related = hostclocks.relations(readings) if len(anchors) > 1 else None
    if related is not None and related[0] in anchors:
        return _related(files, anchors, *related)
    one = len(anchors) == 1
    hosts = tuple(
        HostClock(host, 0 if one else offset, 0.0, 0 if one else None, 0 if one else None)
        for offset, host in anchors.values()
    )
    how = "all ranks share one host's clock" if one else "each host's own wall clock; nothing bounds their offsets"
    return Clock(hosts, one, how), [Move(hostclocks.Relation(), anchors[file.host_key][0]) for file in files]


def _related(
    files: list[File],
    anchors: dict[str, tuple[int, str]],
    reference: str,
    relations: dict[str, hostclocks.Relation],
) -> tuple[Clock, list[Move]]:
    """All hosts on the clock of rank 0's, by the readings that the job took."""
    base = anchors[reference][0]
    hosts = []
    for key, (own, host) in anchors.items():
        found = relations[key]
        # Against this host's own wall clock, so that the figure means something to people.
        offset = found.offset_ns + base - own
        hosts.append(HostClock(host, offset, found.drift, offset - found.half_ns, offset + found.half_ns))
    how = "rank 0's clock, asked for by each host at the start and the end"
    return Clock(tuple(hosts), True, how), [Move(relations[file.host_key], base) for file in files]


@dataclass(frozen=True)
class Move:
    """From a rank's monotonic time to Unix time on the reference host's clock."""

    relation: hostclocks.Relation
    base_ns: int

    def __call__(self, spans: Spans) -> Spans:
        start, end = spans.start_ns, spans.end_ns
        return spans.with_columns(
            start_ns=start + self.relation.at(start) + self.base_ns,
            end_ns=end + self.relation.at(end) + self.base_ns,
        )
