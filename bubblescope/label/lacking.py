"""Stages of which no rank is known: their traces are missing."""

from __future__ import annotations

from bubblescope.model import Notice, Run
from bubblescope.model.notice import some_of_all


def label(run: Run) -> Run:
    """A Notice about stages up to the last known one that no rank of a pipeline holds.

    Example: three files whose ranges name stages 0, 2 and 3: stage 1 has no trace, however the files are named.
    """
    held = set(run.layout.stage_rank)
    replicas = {replica for replica, _ in held}
    last = max((stage for _, stage in held), default=-1)
    holes = {(stage, r) for r in replicas for stage in range(last + 1) if (r, stage) not in held}
    if not holes:
        return run
    lacking, pipelines = sorted({stage for stage, _ in holes}), len({replica for _, replica in holes})
    listed = some_of_all(lacking)
    where = f" in {pipelines} of {len(replicas)} pipelines" if len(replicas) > 1 else ""
    message = f"no rank is known that holds stage {listed}{where}; what waits for it cannot be split into causes"
    return run.with_notices(Notice("stage-missing", message))
