"""A folder for TensorBoard: our figures as plain summaries, and traces in the layout that torch-tb-profiler opens.

Summaries need the ``tensorboard`` package for its event files. The traces are JSON, so the profiler plugin itself is
not needed to write them: ``<run>/rank0.<span>.pt.trace.json.gz``, one per GPU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bubblescope.errors import InputError
from bubblescope.views import markdown, raster
from bubblescope.views.words import CAUSES

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

Event = dict[str, Any]

RUN = "bubblescope"
EVENTS = "events.out.tfevents.bubblescope"
SPAN = "1"
_STREAM = {"compute": 7, "comm": 20, "copy": 30}
_WORK, _BUBBLES = 1, 2


def write(report: ReportLike, directory: str | Path) -> Path:
    """Write ``<directory>/bubblescope/``; returns it. Raises InputError where the tensorboard package is missing."""
    folder = Path(directory) / RUN
    summaries = _Summaries.open(folder, datetime.fromisoformat(report.data["created"]).timestamp())
    summaries.fill(report)
    for gpu in report.data["gpus"]:
        text = json.dumps(trace(report, gpu["rank"]), sort_keys=True, allow_nan=False, separators=(",", ":"))
        path = folder / f"rank{gpu['rank']}.{SPAN}.pt.trace.json.gz"
        path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    return folder


# --- summaries -----------------------------------------------------------------------------------------------


class _Summaries:
    """One event file; steps are the training's, times the report's, so that the same report gives the same bytes."""

    def __init__(self, writer: Any, proto: Any, created: float) -> None:
        self.writer = writer
        self.proto = proto
        self.created = created
        self._write(file_version="brain.Event:2")

    @classmethod
    def open(cls, folder: Path, created: float) -> _Summaries:
        try:
            from tensorboard.compat import proto
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2  # noqa: F401
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise InputError(
                "writing for TensorBoard needs its package", hint="pip install 'bubblescope[tensorboard]'"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        return cls(RecordWriter((folder / EVENTS).open("wb")), proto, created)

    def fill(self, report: ReportLike) -> None:
        try:
            for step, values in _scalars(report):
                self._add(step, [{"tag": tag, "simple_value": value} for tag, value in sorted(values.items())])
            for step in _shown(report):
                picture = raster.timeline(report, step)
                image = {
                    "height": picture.shape[0], "width": picture.shape[1], "colorspace": 3,
                    "encoded_image_string": raster.png(picture),
                }  # fmt: skip
                self._add(step, [{"tag": "timeline", "image": image}])
            self._text("summary", markdown.render(report))
            self._text("timeline/colours", raster.legend())
        finally:
            self.writer.close()

    def _text(self, tag: str, text: str) -> None:
        metadata = {"plugin_data": {"plugin_name": "text"}}
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        self._add(0, [{"tag": tag, "metadata": metadata, "tensor": tensor}])

    def _add(self, step: int, values: list[dict[str, Any]]) -> None:
        summary = self.proto.summary_pb2.Summary(value=[self.proto.summary_pb2.Summary.Value(**v) for v in values])
        self._write(step=step, summary=summary)

    def _write(self, **event: Any) -> None:
        self.writer.write(self.proto.event_pb2.Event(wall_time=self.created, **event).SerializeToString())


def _scalars(report: ReportLike) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, tag -> value): the step's length, idle share and causes; idle share of each GPU. Unknown ones are left
    out, never 0."""
    gaps = report.gaps
    ranks = [gpu["rank"] for gpu in report.data["gpus"]]
    for row in report.steps.to_dict("records"):
        step = int(row["step"])
        mine = gaps[gaps["step"] == step]
        out = {"step/seconds": float(row["seconds"]), "step/idle_fraction": float(row["idle_fraction"])}
        for cause in CAUSES:
            if report.data["causes"][cause.name]["sure"] != "unavailable":
                out[f"causes/{cause.name}_seconds"] = float(mine[cause.name].sum()) / len(ranks)
        for rank in ranks:
            idle = float(mine.loc[mine["rank"] == rank, "idle_s"].sum())
            out[f"gpu/{rank}_idle_fraction"] = idle / float(row["seconds"]) if row["seconds"] else 0.0
        yield step, {tag: value for tag, value in out.items() if value == value}


def _shown(report: ReportLike) -> list[int]:
    """The first, the middle and the last analysed step."""
    steps = [int(s) for s in report.steps["step"]]
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


# --- traces --------------------------------------------------------------------------------------------------


def trace(report: ReportLike, rank: int) -> Event:
    """One GPU as torch.profiler would have exported it: steps, its kernels (else its operations as kernels), and the
    bubbles with their causes as annotations."""
    events = [*_steps(report, rank), *_device(report, rank), *_gaps(report, rank)]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "GPU", "totalGlobalMem": 0, "numSms": 1}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": len(report.data["gpus"]),
        },
        "traceEvents": events,
        "traceName": f"rank{rank}",
    }  # fmt: skip


def _event(cat: str, name: str, start: float, end: float, place: tuple[int, int], args: Event | None = None) -> Event:
    at = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3), "pid": place[0], "tid": place[1]}
    return {"ph": "X", "cat": cat, "name": name, "args": args or {}, **at}


def _steps(report: ReportLike, rank: int) -> Iterator[Event]:
    for row in report.steps.to_dict("records"):
        name = f"ProfilerStep#{int(row['step'])}"
        yield _event("user_annotation", name, row["start_s"], row["end_s"], (1000 + rank, _WORK))


def _device(report: ReportLike, rank: int) -> Iterator[Event]:
    kernels = report.device
    if len(kernels):
        for row in kernels[kernels["rank"] == rank].to_dict("records"):
            stream = int(row["stream"])
            cat = "gpu_memcpy" if row["lane"] == "copy" else "kernel"
            yield _kernel(cat, row["name"] or row["lane"], row["start_s"], row["end_s"], rank, stream)
        return
    for op in report.ops[report.ops["rank"] == rank].to_dict("records"):
        waits = op["kind"] in ("send", "recv", "wait")
        name = f"{'nccl:' if waits else ''}{op['kind']}{op['microbatch'] if op['microbatch'] >= 0 else ''}"
        stream = _STREAM["comm" if waits else "compute"]
        yield _kernel("kernel", name, op["start_s"], op["end_s"], rank, stream)


def _kernel(cat: str, name: str, start: float, end: float, rank: int, stream: int) -> Event:
    args = {"device": rank, "stream": stream, "correlation": 0, "grid": [1, 1, 1], "block": [1, 1, 1]}
    return _event(cat, name, start, end, (rank, stream), args)


def _gaps(report: ReportLike, rank: int) -> Iterator[Event]:
    for gap in report.gaps[report.gaps["rank"] == rank].to_dict("records"):
        args = {"step": int(gap["step"]), "phase": gap["phase"], "waiting before": gap["before"] or "end of step"}
        name = f"bubble: {gap['cause']}"
        yield _event("user_annotation", name, gap["start_s"], gap["end_s"], (1000 + rank, _BUBBLES), args)
