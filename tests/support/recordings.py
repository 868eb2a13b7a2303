"""Small recordings made by hand, for tests that need no training process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def header(rank: int = 0, world: int = 1, **more: Any) -> dict[str, Any]:
    """A header line. All ranks on one host, clock anchored at Unix second 1000."""
    return {
        "kind": "header",
        "schema_version": 1,
        "rank": rank,
        "world": world,
        "framework": "torch",
        "clock": [0, 1_000_000_000_000],
        "host": "node-a",
        "boot_id": "boot-a",
        "job": "job-1",
    } | more


def layout(rank: int = 0, world: int = 1, microbatches: int = 1, **more: Any) -> dict[str, Any]:
    """A layout line of a 1F1B pipeline of `world` stages."""
    return {
        "kind": "layout",
        "stages": [rank],
        "num_stages": world,
        "microbatches": microbatches,
        "schedule": "1F1B",
        "pp_ranks": list(range(world)),
        "stage_ranks": list(range(world)),
        "device": {"type": "cpu", "index": 0, "name": "x86_64"},
    } | more


def step(number: int, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A step line of these rows; a row gives what differs from the defaults here."""
    defaults = {
        "kind": "F", "lane": "compute", "stage": 0, "chunk": 0, "microbatch": 0, "start_ns": 0, "end_ns": 0,
        "peer": -1, "bytes": -1, "group": 0, "seq": -1, "device": 0, "name": 0,
    }  # fmt: skip
    columns = {name: [row.get(name, default) for row in rows] for name, default in defaults.items()}
    return {"kind": "step", "step": number, "columns": columns, "texts": ["", "pp", "act"]} | more


def end(**more: Any) -> dict[str, Any]:
    return {"kind": "end", "steps": 1, "error": "", "clock": [0, 1_000_000_000_000]} | more


def text(*lines: dict[str, Any]) -> bytes:
    """The lines as the recorder writes them."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def write(folder: Path, rank: int, *lines: dict[str, Any]) -> Path:
    """Write them as that rank's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}.jsonl"
    path.write_bytes(text(*lines))
    return path
