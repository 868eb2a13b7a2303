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
    events = [
        *_names(report, streams), *_ops(report), *_bubbles(report), *_kernels(report.device, streams), *_arrows(report)
    ]  # fmt: skip
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


def _names(report: ReportLike, streams: Streams) -> Iterator[Event]:
    gpus = sorted(report.data.get("gpus") or [], key=lambda g: (g.get("stage") or 0, g["rank"]))
    for order, gpu in enumerate(gpus):
        pid = gpu["rank"]
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"stage {gpu.get('stage')}, GPU {pid}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}}
        for tid, track in enumerate(TRACKS):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for (rank, device, stream), tid in streams.items():
        name = f"GPU {device}, stream {stream}"
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}


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


def _arrows(report: ReportLike) -> Iterator[Event]:
    """A flow needs a slice at both ends; they have a track of their own, since slices of one track must nest."""
    for number, message in enumerate(report.messages.to_dict("records")):
        name = f"{message['direction']}{int(message['microbatch'])}"
        ends = (("s", "src", message["send_s"]), ("f", "dst", message["done_s"]))
        for phase, end, at in ends:
            place = {"pid": int(message[end]), "tid": 4, "ts": _us(at)}
            yield {"ph": "X", "name": name, "cat": "p2p", "dur": 1.0, "args": {"step": int(message["step"])}, **place}
            yield {"ph": phase, "name": "p2p", "cat": "p2p", "id": number, "bp": "e", **place}
