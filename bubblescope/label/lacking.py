"""Stages of which no rank is known: their traces are missing."""

from __future__ import annotations

from bubblescope.model import Notice, Run


def label(run: Run) -> Run:
    """A Notice about stages between the known ones that no rank holds.

    Example: three files whose ranges name stages 0, 2 and 3: stage 1 has no trace, however the files are named.
    """
    held = set(run.layout.stage_rank)
    replicas = {replica for replica, _ in held}
    last = max((stage for _, stage in held), default=-1)
    lacking = sorted({stage for r in replicas for stage in range(last) if (r, stage) not in held})
    if not lacking:
        return run
    listed = ", ".join(map(str, lacking[:8])) + (f", … ({len(lacking)} in all)" if len(lacking) > 8 else "")
    where = f" in each of the {len(replicas)} pipelines" if len(replicas) > 1 else ""
    message = f"stage {listed} has no rank that is known{where}; what waits for it cannot be split into causes"
    return run.with_notices(Notice("stage-missing", message))
