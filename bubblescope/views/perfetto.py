"""Chrome trace JSON, which Perfetto and chrome://tracing open: work, bubbles and P2P arrows of every GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bubblescope.views import format as fmt
from bubblescope.views.words import CAUSE, CAUSES, RUNGS

if TYPE_CHECKING:
    import pandas as pd

    from bubblescope.views.source import ReportLike

Event = dict[str, Any]
Streams = dict[tuple[int, int, int], int]

TRACKS = ("compute", "bubbles", "communication", "data", "messages")
_TRACK_OF = {"send": 2, "recv": 2, "wait": 2, "data": 3}
_COLOURS = {
    "schedule": "thread_state_runnable", "imbalance": "terrible", "communication": "thread_state_iowait",
    "step end": "olive", "host": "good", "unexplained": "grey",
}  # fmt: skip
"""Trace viewers know colours by reserved names only: one a family of causes."""


def render(report: ReportLike) -> str:
    """The trace as text. A process a GPU, a thread a track; times in microseconds from the first analysed window."""
    streams = _stream_tracks(report.device)
    ends = list(_message_ends(report))
    slices = [*_ops(report), *_bubbles(report), *_kernels(report.device, streams), *ends]
    overlapping = _put_apart(slices, len(TRACKS) + len(streams))
    events = [*_names(report, streams, overlapping), *slices, *_arrows(ends)]
    head = {"displayTimeUnit": "ms", "otherData": {"producer": "bubblescope"}}
    body = ",\n".join(json.dumps(e, sort_keys=True, allow_nan=False, separators=(",", ":")) for e in events)
    return json.dumps(head, sort_keys=True)[:-1] + ', "traceEvents": [\n' + body + "\n]}\n"


def write(report: ReportLike, path: str | Path) -> Path:
    target = Path(path)
    target.write_text(render(report), encoding="utf-8", newline="\n")
    return target


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _stream_tracks(device: pd.DataFrame) -> Streams:
    """(rank, device, stream) -> the number of its track."""
    if not len(device):
        return {}
    columns = (device[name].tolist() for name in ("rank", "device", "stream"))
    return {place: len(TRACKS) + i for i, place in enumerate(sorted(set(zip(*columns, strict=True))))}


def _put_apart(slices: list[Event], tracks: int) -> list[tuple[int, int, int]]:
    """Perfetto drops a slice that outlasts the one in which it begins, as kernels of one stream do that overlap: such
    slices move to more tracks, numbered from `tracks` on. Gives (pid, track, the track it adds to) of these."""
    more: dict[tuple[int, int, int], None] = {}
    open_ends: dict[tuple[int, int], list[list[int]]] = {}
    for event in sorted(slices, key=lambda e: (_whole_ns(e["ts"]), -_whole_ns(e["dur"]))):
        pid, tid, start = event["pid"], event["tid"], _whole_ns(event["ts"])
        layers = open_ends.setdefault((pid, tid), [])
        layer = _layer_for(start, start + _whole_ns(event["dur"]), layers)
        if layer:
            event["tid"] = tid + layer * tracks
            more[pid, event["tid"], tid] = None
    return list(more)


def _layer_for(start: int, end: int, layers: list[list[int]]) -> int:
    """The first layer in which [start, end) nests, entered there. layers: the ends of what was open in each, innermost
    last."""
    for layer, ends in enumerate(layers):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return layer
    layers.append([end])
    return len(layers) - 1


def _whole_ns(us: float) -> int:
    return round(us * 1e3)


def _names(report: ReportLike, streams: Streams, overlapping: list[tuple[int, int, int]]) -> Iterator[Event]:
    gpus = sorted(report.data.get("gpus") or [], key=lambda g: (g.get("stage") or 0, g["rank"]))
    for order, gpu in enumerate(gpus):
        pid = gpu["rank"]
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"stage {gpu.get('stage')}, GPU {pid}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}}
        for tid, track in enumerate(TRACKS):
            yield from _track(pid, tid, tid, track)
    names = dict(enumerate(TRACKS))
    for (rank, device, stream), tid in streams.items():
        names[tid] = f"GPU {device}, stream {stream}"
        yield from _track(rank, tid, tid, names[tid])
    for pid, tid, beside in overlapping:
        yield from _track(pid, tid, beside, f"{names[beside]}, overlapping")


def _track(pid: int, tid: int, order: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _ops(report: ReportLike) -> Iterator[Event]:
    for op in report.ops.to_dict("records"):
        batch = int(op["microbatch"])
        kind = fmt.plain(op["kind"])
        yield {
            "ph": "X", "name": f"{kind}{batch}" if batch >= 0 else kind, "cat": "work",
            "pid": int(op["rank"]), "tid": _TRACK_OF.get(op["kind"], 0), "ts": _us(op["start_s"]),
            "dur": _us(op["end_s"] - op["start_s"]),
            "args": {name: int(op[name]) for name in ("step", "stage", "chunk", "microbatch")},
        }  # fmt: skip


def _bubbles(report: ReportLike) -> Iterator[Event]:
    for gap in report.gaps.to_dict("records"):
        cause = CAUSE.get(gap["cause"], CAUSE["unexplained"])
        parts = {c.name: _us(gap[c.name]) for c in CAUSES if abs(gap[c.name]) > 1e-9}
        rungs = {name.removesuffix("_s"): _us(gap[name]) for name in RUNGS if abs(gap[name]) > 1e-9}
        yield {
            "ph": "X", "name": cause.label, "cat": "bubble", "pid": int(gap["rank"]), "tid": 1,
            "ts": _us(gap["start_s"]), "dur": _us(gap["end_s"] - gap["start_s"]), "cname": _COLOURS[cause.family],
            "args": {
                "step": int(gap["step"]), "phase": gap["phase"], "before": fmt.plain(gap["before"]) or "end of step",
                "waited_for_us": rungs, "causes_us": parts,
            },
        }  # fmt: skip


def _kernels(device: pd.DataFrame, streams: Streams) -> Iterator[Event]:
    """What ran on each stream, under its own name."""
    for row in device.to_dict("records"):
        place = (int(row["rank"]), int(row["device"]), int(row["stream"]))
        yield {
            "ph": "X", "name": row["name"] or row["lane"], "cat": "gpu_memcpy" if row["lane"] == "copy" else "kernel",
            "pid": place[0], "tid": streams[place], "ts": _us(row["start_s"]),
            "dur": _us(row["end_s"] - row["start_s"]),
            "args": {"device": place[1], "stream": place[2], "step": int(row["step"])},
        }  # fmt: skip


def _message_ends(report: ReportLike) -> Iterator[Event]:
    """A slice at both ends of each message, on a track of their own."""
    for message in report.messages.to_dict("records"):
        for end, at in (("src", message["send_s"]), ("dst", message["done_s"])):
            yield {
                "ph": "X", "name": f"{message['direction']}{int(message['microbatch'])}", "cat": "p2p",
                "pid": int(message[end]), "tid": 4, "ts": _us(at), "dur": 1.0, "args": {"step": int(message["step"])},
            }  # fmt: skip


def _arrows(ends: list[Event]) -> Iterator[Event]:
    """From the slice at one end of each message to the slice at its other one."""
    for number, pair in enumerate(zip(ends[::2], ends[1::2], strict=True)):
        for phase, end in zip("sf", pair, strict=True):
            place = {name: end[name] for name in ("pid", "tid", "ts")}
            yield {"ph": phase, "name": "p2p", "cat": "p2p", "id": number, "bp": "e", **place}
