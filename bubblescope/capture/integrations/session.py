"""What every trainer callback does: record while the trainer trains, then log what was found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bubblescope.capture.environment import rank_and_world
from bubblescope.capture.integrations import results, trackers


class Session:
    """One training run of a trainer; its callback is a class of both. folder, every, warmup, max_steps: as for
    `bubblescope.record`.

    log: whether rank 0 analyses the recording at the end, and logs bubble ratio and causes to the active run.
    results: what was logged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "runs/bubblescope",
        *,
        every: int | None = None,
        warmup: int = 1,
        max_steps: int | None = None,
        log: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self._options: dict[str, Any] = {"every": every, "warmup": warmup, "max_steps": max_steps}
        self._log = log
        self._recording: Any = None
        self._seen = False
        self.results: dict[str, float] = {}

    def begin(self) -> None:
        """Start recording this rank; does nothing while that goes on."""
        from bubblescope.capture.recorder import record

        if self._recording is None:
            self._recording = record(self.folder, **self._options)

    def stop(self) -> Path | None:
        """Stop recording; the folder, None when this session did not record, or had stopped before."""
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        folder: Path | None = recording.folder
        recording.stop()
        self._seen = recording.recorder is not None and recording.recorder.recorded_steps > 0
        return folder

    def end(self, step: int | None = None, tensorboard: Any = None) -> dict[str, float]:
        """Stop; on rank 0 also analyse and log. What was logged, {} elsewhere, and when it had stopped before."""
        folder = self.stop()
        if not self._log or folder is None or rank_and_world()[0] != 0 or not any(folder.glob("rank-*.jsonl")):
            return {}
        if not self._seen:
            results.log.warning(
                "bubblescope: no results to log: no pipeline was recorded (no finished step of a pipeline that "
                "bubblescope knows; mark your own with bubblescope.span and bubblescope.step)"
            )
            return {}
        self.results = results.metrics(folder)
        trackers.log_metrics(self.results, step, tensorboard)
        return self.results
