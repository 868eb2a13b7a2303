"""One recording window in a training process: hooks in, so many steps or seconds, hooks out.

Hooks go in and out on the training thread (`SafePoint`); everything slow (imports, the file, the device's last
times) happens on the window's own thread. It ends by itself: at its limit, when the client that wanted it falls
silent, or with the job.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bubblescope.attach.protocol import ProtocolError
from bubblescope.attach.safepoint import SafePoint
from bubblescope.capture import hooks
from bubblescope.capture.recorder import Options, Recorder

MOST_STEPS = 100_000
MOST_SECONDS = 3600.0
LEASE_SECONDS = 20.0
"""A window whose client has not asked for its status so long is ended."""

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Limits:
    """What was asked for. steps: recorded steps, or None. seconds: of recording, never unlimited."""

    out: Path
    steps: int | None
    seconds: float
    lease_s: float


def limits_of(request: dict[str, Any]) -> Limits:
    """From the fields of a `start` request. Raises ProtocolError for one that is not exactly what it should be."""
    out = request.get("out")
    if not isinstance(out, str) or not out.startswith("/") or "\0" in out or len(out) > 4000:
        raise ProtocolError("`out` must be the absolute path of a folder")
    steps = request.get("steps")
    if steps is not None and (type(steps) is not int or not 1 <= steps <= MOST_STEPS):
        raise ProtocolError(f"`steps` must be a whole number from 1 to {MOST_STEPS}")
    seconds = _seconds(request, "seconds", MOST_SECONDS)
    return Limits(Path(out), steps, seconds, _seconds(request, "lease_s", LEASE_SECONDS))


def _seconds(request: dict[str, Any], name: str, most: float) -> float:
    value = request.get(name, most)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ProtocolError(f"`{name}` must be a number above 0 and at most {most:g}")
    return float(value)


class Window:
    """state: importing → arming → recording → removing → finishing → done, or failed (see `error`)."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = "importing"
        self.error = ""
        self.stall_ms = 0.0
        self._recorder: Recorder | None = None
        self._stopping = threading.Event()
        self._last_asked = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="bubblescope-window", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed")

    def request_stop(self) -> None:
        """Begin the way out; again: nothing."""
        self._stopping.set()

    def keep_alive(self) -> None:
        """The client is still there."""
        self._last_asked = time.monotonic()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def describe(self) -> dict[str, Any]:
        """See `client.WindowState`."""
        recorder = self._recorder
        optimizer = None if recorder is None else recorder.patches.hooks.get("optimizer.step")
        return {
            "state": self.state,
            "error": self.error,
            "out": str(self.limits.out),
            "steps": 0 if recorder is None else recorder.recorded_steps,
            "pipeline": recorder is not None and recorder.device_known,
            "optimizer_steps": 0 if optimizer is None else optimizer.hits,
            "file": str(recorder.writer.path) if recorder is not None and recorder.writer.path else None,
            "stall_ms": round(self.stall_ms, 3),
            "warnings": [] if recorder is None else [text[:500] for text in recorder.patches.warnings[:20]],
        }

    # ---- the window's own thread

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:  # ours; it must end here, and be told to the client
            self.error = f"{type(error).__name__}: {error}"
            self.state = "failed"

    def _run(self) -> None:
        _check_writable(self.limits.out)
        preload()
        self._recorder = recorder = Recorder(self.limits.out, Options(every=1, warmup=0))
        self.state = "arming"
        if not self._at_safe_point(lambda: _install(recorder), self._may_go_on):
            self.error = "the window was ended before the job came to the start of a step"
            self.state = "failed"
            return
        self.state = "recording"
        self._record(recorder)
        self.state = "removing"
        # However long the job takes to its next step: what has gone in must come out.
        self._at_safe_point(recorder.unhook, lambda: True)
        self.state = "finishing"
        recorder.stop()
        self.state = "done"

    def _record(self, recorder: Recorder) -> None:
        ends = time.monotonic() + self.limits.seconds
        wanted = self.limits.steps
        while recorder.running and self._may_go_on() and time.monotonic() < ends:
            if wanted is not None and recorder.recorded_steps >= wanted:
                return
            time.sleep(POLL_SECONDS)

    def _may_go_on(self) -> bool:
        asked = time.monotonic() - self._last_asked
        return not self._stopping.is_set() and asked < self.limits.lease_s

    def _at_safe_point(self, action: Callable[[], None], patience: Callable[[], bool]) -> bool:
        """Run `action` on the training thread, as long as `patience()` holds; False when it did not run."""

        def timed() -> None:
            began = time.perf_counter_ns()
            action()
            self.stall_ms = max(self.stall_ms, (time.perf_counter_ns() - began) / 1e6)

        point = SafePoint(timed)
        if not point.arm():
            raise RuntimeError("this process has imported no training framework that can be hooked")
        while not point.wait(POLL_SECONDS):
            if not patience() and point.disarm():
                return False
        if point.error is not None:
            raise point.error
        return True


def _install(recorder: Recorder) -> None:
    try:
        recorder.start()
    except BaseException:
        recorder.patches.restore()
        raise


def preload() -> None:
    """Import here what installing hooks would import, so that the training thread does not wait for a disk."""
    for needed, module in hooks.REGISTRY.values():
        if needed in sys.modules:
            importlib.import_module(module)


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written by the job's user")
