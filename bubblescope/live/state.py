"""The state of a watch as one line of JSON, for scripts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from bubblescope.live.watcher import EXPECTED_CODES, Snapshot
from bubblescope.replay.causes import CAUSES
from bubblescope.views.json import strict


def as_data(snapshot: Snapshot) -> dict[str, Any]:
    """schema_version 1. report: report.json over the last steps, null before any; totals: since `first_step`."""
    totals = snapshot.totals
    report = None if snapshot.report is None else dict(snapshot.report.data)
    if report is not None:
        warnings = [w for w in report["source"]["warnings"] if w["code"] not in EXPECTED_CODES]
        report["source"] = {**report["source"], "warnings": warnings}
    return {
        "schema_version": 1,
        "state": snapshot.state,
        "made": snapshot.made,
        "behind_bytes": snapshot.behind,
        "report": report,
        "totals": {
            "first_step": totals.first_step,
            "steps": totals.steps,
            "wasted_gpu_hours": totals.lost_gpu_hours,
            "gpus": [
                {
                    "rank": rank,
                    "stage": gpu.stage,
                    "steps": gpu.steps,
                    "window_seconds": gpu.window,
                    "busy_seconds": gpu.busy,
                    "idle_seconds": {cause: float(gpu.idle[i]) for i, cause in enumerate(CAUSES)},
                }
                for rank, gpu in sorted(totals.gpus.items())
            ],
        },
        "ranks": [asdict(rank) for rank in snapshot.ranks],
        "notices": [asdict(notice) for notice in snapshot.notices],
    }


def as_line(snapshot: Snapshot) -> str:
    return json.dumps(strict(as_data(snapshot)), sort_keys=True, allow_nan=False) + "\n"
