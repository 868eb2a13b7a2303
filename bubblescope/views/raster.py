"""Small pictures without a drawing library: who did what when, as PNG, for places that show images only."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.views.words import CAUSE

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

Image = NDArray[np.uint8]

WIDTH, ROW, GAP = 1200, 24, 4
WORK = {"F": "#4c78a8", "B": "#2f5b87", "I": "#2f5b87", "W": "#7ea6cf", "optimizer": "#8c8c8c", "loss": "#a0a0a0"}
IDLE = {
    "schedule": "#f2cf5b", "imbalance": "#e45756", "communication": "#f58518", "step end": "#b79a20",
    "host": "#72b7b2", "unexplained": "#d8d8d8",
}  # fmt: skip
"""One colour a kind of work, and one a family of causes."""


def legend() -> str:
    """The colours as a Markdown table."""
    rows = [*WORK.items(), *(((f"idle: {family}"), colour) for family, colour in IDLE.items())]
    return "| colour | what |\n|---|---|\n" + "\n".join(f"| {colour} | {name} |" for name, colour in rows)


def timeline(report: ReportLike, step: int) -> Image:
    """One step, a row a GPU, time from left to right; shape (height, WIDTH, 3)."""
    ranks = [gpu["rank"] for gpu in report.data["gpus"]]
    ops, gaps = (t[t["step"] == step] for t in (report.ops, report.gaps))
    image = np.full((len(ranks) * (ROW + GAP) + GAP, WIDTH, 3), 255, dtype=np.uint8)
    if not len(gaps) and not len(ops):
        return image
    low = min(float(t["start_s"].min()) for t in (ops, gaps) if len(t))
    scale = WIDTH / max(max(float(t["end_s"].max()) for t in (ops, gaps) if len(t)) - low, 1e-12)
    for table, colour_of in ((gaps, _of_gap), (ops, _of_work)):
        for row in table.to_dict("records"):
            colour = colour_of(row)
            if colour:
                top = ranks.index(row["rank"]) * (ROW + GAP) + GAP
                left, right = (int((row[t] - low) * scale) for t in ("start_s", "end_s"))
                image[top : top + ROW, left : max(right, left + 1)] = _rgb(colour)
    return image


def _of_gap(row: Mapping[Hashable, Any]) -> str:
    return IDLE[CAUSE.get(row["cause"], CAUSE["unexplained"]).family]


def _of_work(row: Mapping[Hashable, Any]) -> str:
    return WORK.get(row["kind"], "")


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def png(image: Image) -> bytes:
    """The picture as a PNG file (RFC 2083): 8 bits, red, green, blue.

    >>> png(np.zeros((1, 2, 3), dtype=np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, _ = image.shape
    # Each line begins with its filter, 0 = none.
    lines = np.concatenate([np.zeros((height, 1), dtype=np.uint8), image.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
