"""Runs in .venv-tools: what traceinsight (the hta package) prints for a folder of traces, as JSON on stdout."""

from __future__ import annotations

import contextlib
import io
import json
import sys


def main(folder: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        from hta.trace_analysis import TraceAnalysis

        analysis = TraceAnalysis(trace_dir=folder)
        idle = analysis.get_temporal_breakdown(visualize=False)
        overlap = analysis.get_comm_comp_overlap(visualize=False)
    rows = {int(r["rank"]): dict(r) for r in idle.to_dict("records")}
    for row in overlap.to_dict("records"):
        rows[int(row["rank"])]["comp_comm_overlap_pctg"] = row["comp_comm_overlap_pctg"]
    print(json.dumps({rank: {k: float(v) for k, v in row.items()} for rank, row in rows.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
