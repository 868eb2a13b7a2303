"""Records what a training process does, step by step, while it trains.

``with bubblescope.record("runs/x"): …`` in every rank is all that a training script needs. Everything here runs
inside someone else's job: it never raises into it, never blocks it on a disk, and never waits for the device.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from bubblescope.capture import environment, hooks, messages, notes
from bubblescope.capture.hostclocks import HostClocks
from bubblescope.capture.patching import PatchSet, log
from bubblescope.capture.steps import MAX_EVENTS, Label, StepBuffer, StepRule, columns
from bubblescope.capture.timers import HostTimer, Timer, cuda_timer, events_may_serialise
from bubblescope.capture.writer import SCHEMA_VERSION, RankWriter, write_job_file
from bubblescope.errors import UsageError
from bubblescope.model import checks
from bubblescope.model.kinds import FROM_SHORT, Kind, Lane

_HOST_LANES = (Lane.HOST, Lane.RANGE)

SAMPLED_EVERY = 10
"""One step in so many is recorded where recording may slow the job, unless `Options.every` says otherwise."""


@dataclass(frozen=True)
class Options:
    """every: record one step in so many; None = all, or one in `SAMPLED_EVERY` where that is safer.
    warmup: first steps flagged, which analysis leaves out; unless it is 0, so is the first one of another schedule.
    max_steps: stop recording after so many recorded steps beside those; None = until stopped.
    framework: whose hooks, a key of `hooks.CHOICES`. ranks: global ranks that record; None = all.
    launched: nobody asked for it in this process (`bubblescope run`): it imports no framework itself, and writes
    nothing unless this process turns out to be a rank that runs a pipeline."""

    every: int | None = None
    warmup: int = 1
    max_steps: int | None = None
    framework: str = "auto"
    ranks: frozenset[int] | None = None
    launched: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "warmup", checks.whole("warmup", self.warmup, least=0))
        for name in ("every", "max_steps"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.whole(name, getattr(self, name)))


def _no_mark() -> None:
    return None


class Recorder:
    """One per process: owns the patches, the open step and the file. Hooks call its methods.

    Thread-safe: rows may come from several threads. In a forked child (a DataLoader worker) it is inert.
    """

    def __init__(self, folder: str | os.PathLike[str], options: Options | None = None) -> None:
        self.folder = Path(folder)
        self.options = options or Options()
        self.every = self.options.every or 1
        self.patches = PatchSet()
        self.writer = RankWriter(self.folder, self._lines_lost)
        self.running = False
        self.framework = ""
        self.recorded_steps = 0
        self._warmup_steps = 0
        self._clock = environment.clock_anchor()
        self._lock = threading.RLock()
        self._drop_lock = threading.Lock()  # of its own: the writer's thread takes it while `stop` waits for that
        self._timer: Timer | None = None
        # Hooks read `rule.current.sampled` (whether the open step is recorded at all) and call `mark` (now, on the
        # device's timeline; None before the device is known). Attributes, because every hook needs them.
        self.device_known = False
        self.mark: Callable[[], Any] = _no_mark
        self.rule = StepRule(self._open_step, self._close_step)
        self._layout: dict[str, Any] | None = None  # of the newest layout line
        self._dropped: dict[str, int] = {}
        self._hits: dict[str, int] = {}
        self._own_ns = 0
        self._told = 0
        self._error = ""
        self._host_clocks: HostClocks | None = None

    # ---- life

    def start(self) -> None:
        """Install the hooks. Raises UsageError when this process already records."""
        global _active
        if _active is not None and _active.running:
            raise UsageError(
                f"this process already records, into {_active.folder}",
                hint="one recorder per process: stop the other one first",
            )
        hooks.require_torch()
        hooks.install(self)
        self.running = True
        _active = self
        atexit.register(self.stop)

    def stop(self, error: str = "") -> None:
        """Restore every original, write what is complete and an end line. Calling it again does nothing."""
        global _active
        if not self.running:
            return
        self.running = False
        if _active is self:
            _active = None
        self.patches.restore()
        atexit.unregister(self.stop)
        try:
            self._finish(error)
        except Exception as problem:  # ours; a job that ends must end as it would without us
            self.patches.fault(f"the end of the recording was lost: {type(problem).__name__}: {problem}")
        self.patches.tell_faults()

    def _finish(self, error: str) -> None:
        with self._lock:
            self._error = error
            self.rule.finish()
            if self._timer is not None:
                for buffer in self._timer.drain(wait_s=2.0):
                    self._submit(buffer)
                self._drop_all(self._timer.dropped())
            if self.options.launched and not self.writer.started:
                return  # this process ran no pipeline
            if not self._start_writer():
                return
        self.ending()
        if self._host_clocks is not None:
            self._host_clocks.stop()
        self.writer.submit(self._end_line)
        self.writer.close()

    def abandon(self) -> None:
        """In a forked child: put the originals back and never write; the parent goes on recording."""
        global _active
        self.running = False
        _active = None
        self.writer.abandon()
        atexit.unregister(self.stop)
        self.patches.restore()

    def adopt(self) -> None:
        """In a forked child of a process that was launched and ran no pipeline: this one may be the rank."""
        self._lock, self._drop_lock = threading.RLock(), threading.Lock()
        self.rule.current.events.clear()

    def unhook(self) -> None:
        """On the training thread, where another one stops: restore every original, leave nothing in the job's store."""
        self.patches.restore()
        if self._host_clocks is not None:
            self._host_clocks.leave_store()

    def ending(self) -> None:
        """The job is about to end its process group: the last moment to compare clocks over it."""
        if self._host_clocks is not None:
            self._host_clocks.end()

    # ---- what hooks ask

    def add(self, lane: Lane, start: Any, end: Any, labels: tuple[Any, ...], host_end_ns: int = -1) -> None:
        """Record one interval, a row for each label (see `Event`). start, end: from `mark`, or host ns for the lanes
        HOST and RANGE. host_end_ns: when the host's call ended, where `end` is not that moment. Called in every
        hook: appending to a list needs no lock."""
        if start is None or end is None:
            return
        buffer = self.rule.current
        if len(buffer.events) >= MAX_EVENTS:
            self.drop("events-per-step")
            return
        buffer.events.append((lane, start, end, -1, host_end_ns, buffer.offset, labels))

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows that were lost, for the next line."""
        with self._drop_lock:
            self._dropped[reason] = self._dropped.get(reason, 0) + count

    def _drop_all(self, counts: dict[str, int]) -> None:
        for reason, count in counts.items():
            self.drop(reason, count)
        if "graph-capture" in counts:
            self.patches.warn(
                "what runs while a CUDA graph is captured is not timed: an event would become part of the graph"
            )

    def _lines_lost(self, message: str) -> None:
        notes.leave(notes.LOST, message)
        self.patches.warn(f"{message}; training goes on without it")

    def settle(self) -> None:
        """Give the open step's events the labels that hooks left for later."""
        self.rule.current.settle(self._label_failed)

    def _label_failed(self, what: str, error: Exception) -> None:
        self.patches.fault(f"rows of {what} were lost, without a label: {type(error).__name__}: {error}", what)
        self.drop("no-label")

    def use_device(self, device_type: str, device_index: int) -> None:
        """The pipeline's work runs on that device: its kind of clock is used from now on."""
        self._timer = cuda_timer(max(device_index, 0)) if device_type == "cuda" else HostTimer()
        self.mark = self._timer.mark
        self.device_known = True
        if device_type == "cuda" and events_may_serialise():
            self._mind_connections()
        if device_type not in ("cpu", "cuda"):
            self.patches.warn(f"no device timing for {device_type}: times are those of the host that launches")

    def _mind_connections(self) -> None:
        risk = "CUDA_DEVICE_MAX_CONNECTIONS=1: timing events may make communication wait for compute (pytorch#143890)"
        if self.options.every is None:
            self.every = SAMPLED_EVERY
            self.patches.warn(f"{risk}, so one step in {self.every} is recorded; every=N takes one in N")
        elif self.every == 1:
            self.patches.warn(f"{risk}; compare step times, or record one step in N with every=N")

    def hold_stream(self, held: bool) -> None:
        """Whether marks keep to the stream that is current now: for calls that switch to others and back."""
        if self._timer is not None:
            self._timer.hold_stream(held)

    def forward_begins(self) -> None:
        """A forward is about to run: it may open a step."""
        if self.rule.current.optimizer_seen:
            with self._lock:
                self.rule.work_begins()
        self.rule.current.busy = True

    def data_begins(self) -> None:
        """Data loading begins: it may open a step."""
        with self._lock:
            self.rule.work_begins()

    def schedule_begins(self, layout: dict[str, Any], training: bool, first: bool = False) -> None:
        """A schedule call begins. layout: the layout line's fields (see CONTRACT.md "Recording"), with
        ``stages``, ``microbatches`` and ``device`` {type, index, name}. first: this schedule was not called before, so
        the step is a warm-up: shapes are inferred in it."""
        with self._lock:
            if self._timer is None:
                device = layout["device"]
                self.use_device(device["type"], device["index"])
            if self._layout is None and not self._tell_layout(layout):
                return
            self.rule.schedule_begins(layout, training, first and self.options.warmup > 0)

    def schedule_ends(self, failed: bool = False) -> None:
        """The schedule call returned, or raised."""
        with self._lock:
            self.settle()
            if not failed:
                self.rule.schedule_ends()

    def optimizer_stepped(self) -> None:
        """An optimizer step ended."""
        with self._lock:
            self.rule.optimizer_stepped()

    def step(self) -> None:
        """The user's own loop says that a step ends here (`bubblescope.step`)."""
        with self._lock:
            self.rule.step()

    # ---- steps and lines

    def _open_step(self, index: int) -> StepBuffer:
        return StepBuffer(
            index,
            warmup=index < self.options.warmup,
            sampled=index % self.every == 0,
        )

    def _close_step(self, buffer: StepBuffer) -> None:
        if self._host_clocks is not None and self.running:
            self._host_clocks.look()
        if not buffer.sampled or not buffer.events:
            return
        buffer.settle(self._label_failed)
        if len(buffer.cuts) > 1:
            self._one_layout(buffer)
        buffer.device = 0 if self._timer is None else self._timer.device_index
        ready = [buffer]
        if self._timer is not None:
            ready = self._timer.close(buffer)
            self._drop_all(self._timer.dropped())
        for finished in ready:
            self._submit(finished)
        if not buffer.evaluation and not buffer.partial:
            self.recorded_steps += 1
            self._warmup_steps += buffer.warmup
        limit = self.options.max_steps
        if limit is not None and self.recorded_steps - self._warmup_steps >= limit and self.running:
            self.stop()

    def _one_layout(self, buffer: StepBuffer) -> None:
        """Of a step with several schedule calls."""
        layouts = [layout for _, _, layout, _ in buffer.cuts]
        others = [layout for layout in layouts if layout is not layouts[0]]
        if any(_pipeline(layout) != _pipeline(layouts[0]) for layout in others):
            buffer.layout = max(layouts, key=lambda layout: int(layout["num_stages"]))
            self.patches.warn(
                "a step runs several pipelines, or several schedules: they are recorded as one, and the shape and the "
                "closed form are those of the one with most stages"
            )

    def _tell_layout(self, layout: dict[str, Any]) -> bool:
        """Write what holds for the steps from now on; False when this process does not record."""
        known, self._layout = self._layout, layout
        if not self._start_writer():
            return False
        if not self.writer.submit(partial(_layout_line, dict(layout))):
            self._layout = known  # the next step tries again
        return True

    def _submit(self, buffer: StepBuffer) -> None:
        if not self._start_writer():
            return
        layout = buffer.layout
        if layout is not None and layout is not self._layout and layout != self._layout:
            self._tell_layout(layout)
        if not self.writer.submit(partial(self._step_line, buffer)):
            self.drop("queue-full", len(buffer.events))

    def _step_line(self, buffer: StepBuffer) -> dict[str, Any]:
        """Built on the writer's thread, as the other lines are: the training waits for none of it."""
        flags = {name: True for name in ("warmup", "partial") if getattr(buffer, name)}
        if buffer.evaluation:
            flags["eval"] = True
        if self.rule.marked:
            flags["marked"] = True
        return {
            "kind": "step",
            "step": buffer.index,
            **flags,
            **columns(buffer),
            **self._since_last_line(),
            "clock": (perf_counter_ns(), time.time_ns()),
            "timing": "host" if self._timer is None or self._timer.device_type != "cuda" else "events",
            **self._losses(),
            **buffer.extra,
        }

    def _since_last_line(self) -> dict[str, Any]:
        """Hook hits, and the time that they took."""
        hits, own = {}, 0
        for label, hook in list(self.patches.hooks.items()):
            own += hook.own_ns
            now = hook.hits
            if now != self._hits.get(label, 0):
                hits[label] = now - self._hits.get(label, 0)
                self._hits[label] = now
        spent, self._own_ns = own - self._own_ns, own
        return {"hits": hits, "own_ns": spent}

    def _losses(self) -> dict[str, Any]:
        """What was dropped, and the warnings given, since the last line."""
        with self._drop_lock:
            dropped, self._dropped = self._dropped, {}
        warnings = self.patches.warnings[self._told :]
        self._told += len(warnings)
        made: dict[str, Any] = {}
        if dropped:
            made["dropped"] = dropped
        if warnings:
            made["warnings"] = warnings
        return made

    def _start_writer(self) -> bool:
        """Open the file; False when this process turns out to be none of the ranks that record."""
        if self.writer.started:
            return True
        rank, world = environment.rank_and_world()
        if self.options.launched:
            unchosen = rank not in (self.options.ranks or (rank,))
            if unchosen:
                notes.leave(notes.UNCHOSEN, str(world or ""))
            if unchosen or environment.owned_by_another(rank):
                self.abandon()
                return False
            notes.leave_rank(rank)
            environment.mark_owner(rank)
            _stop_before_workers_exit(self.stop)
        header = {
            "kind": "header",
            "schema_version": SCHEMA_VERSION,
            "rank": rank,
            "world": world,
            "framework": self.framework,
            "layout": self._layout,
            "clock": self._clock,
            "hooks": {"installed": sorted(self.patches.hooks), "refused": dict(self.patches.refused)},
            "options": {
                "every": self.every,
                "warmup": self.options.warmup,
                "max_steps": self.options.max_steps,
            },
            **environment.describe_process(),
        }
        self.writer.start(rank, partial(_header_line, self.folder, header))
        self._host_clocks = HostClocks(rank, world or 1, environment.host_key(), self._write_clock)
        return True

    def _write_clock(self, line: dict[str, Any]) -> None:
        self.writer.submit(lambda: line)

    def _end_line(self) -> dict[str, Any]:
        """Short, so that a full disk may still take it."""
        if self.writer.lost_lines:
            self._told = 0  # among the lost lines may be those that told of a warning
        return {
            "kind": "end",
            "steps": self.recorded_steps,
            "error": self._error,
            "clock": environment.clock_anchor(),
            "lost_lines": self.writer.lost_lines,
            "hits": {label: hook.hits for label, hook in self.patches.hooks.items() if hook.hits},
            **self._losses(),
        }


def _header_line(folder: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Built on the writer's thread, because job.json is a file too."""
    job = {key: header[key] for key in ("schema_version", "world", "job", "framework", "versions", "host")}
    write_job_file(folder, header["rank"], {**job, "started_ns": header["clock"][1]})
    return header


def _stop_before_workers_exit(stop: Callable[[], None]) -> None:
    """Processes that multiprocessing forked (mp.spawn, mp.start_processes) end without calling atexit."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, stop, exitpriority=100)


def _layout_line(layout: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "layout", **layout}


def _pipeline(layout: dict[str, Any]) -> dict[str, Any]:
    """What tells one pipeline from another: the number of micro-batches may change from step to step."""
    return {key: value for key, value in layout.items() if key != "microbatches"}


# ---- the one recorder of this process, and the public functions

_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder of this process, if it records."""
    return _active


def _after_fork_in_child() -> None:
    if _active is None:
        return
    if _active.options.launched and not _active.writer.started:
        _active.adopt()
    else:
        _active.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Recording:
    """Handle of a started recording: a context manager with `stop`."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    @property
    def folder(self) -> Path | None:
        """Where it is written; None when this handle records nothing."""
        return None if self._recorder is None else self._recorder.folder

    @property
    def recorder(self) -> Recorder | None:
        return self._recorder

    def stop(self) -> None:
        """Stop recording, restore the framework, write the end line. Calling it again does nothing."""
        if self._recorder is not None:
            self._recorder.stop()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.stop(kind.__name__ if kind is not None else "")


def record(
    folder: str | os.PathLike[str], *, every: int | None = None, warmup: int = 1, max_steps: int | None = None
) -> Recording:
    """Record this rank's pipeline work into `folder`, until the ``with`` block (or the process) ends.

    Call it in every rank; one folder per job. Recording starts at once, also without ``with``.
    every: record one step in so many; None = all, but one in ten on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=1, where
    timing events may slow the job. warmup: first steps, flagged so that analysis leaves them out (they set up
    communicators and infer shapes); the first one of another schedule is flagged too, unless `warmup` is 0.
    max_steps: stop by itself after so many recorded steps beside those.
    Raises UsageError on options that make no sense. When this process already records, that recording goes on and
    the handle does nothing.

    >>> import bubblescope
    >>> with bubblescope.record("runs/x"):  # doctest: +SKIP
    ...     train()
    """
    recorder = Recorder(checks.path("folder", folder), Options(every, warmup, max_steps))
    if _active is not None and _active.running:
        log.warning("bubblescope: this process already records into %s; that goes on", _active.folder)
        return Recording(None)
    try:
        recorder.start()
    except UsageError:
        raise
    except Exception as error:  # a framework that we do not understand must not cost the user the training run
        recorder.patches.restore()
        log.warning("bubblescope: nothing is recorded: %s: %s", type(error).__name__, error)
        return Recording(None)
    return Recording(recorder)


def instrument(
    schedule_or_engine: Any,
    out: str | os.PathLike[str],
    *,
    every: int | None = None,
    warmup: int = 1,
    max_steps: int | None = None,
) -> Recording:
    """Record the pipeline that this schedule object runs; `stop` on the handle ends it.

    Raises UsageError when it is not an object of a framework that bubblescope has hooks for.
    """
    framework = hooks.framework_of(schedule_or_engine)
    if framework is None:
        raise UsageError(
            f"{type(schedule_or_engine).__module__}.{type(schedule_or_engine).__qualname__} is not a pipeline "
            "schedule that bubblescope knows",
            hint="pass a torch.distributed.pipelining schedule, or mark your own loop with bubblescope.span and "
            "bubblescope.step",
        )
    return record(out, every=every, warmup=warmup, max_steps=max_steps)


@contextmanager
def span(kind: Kind | str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
    """Mark one operation of a pipeline that no hook knows. Costs nothing when nothing is recorded.

    kind: "F", "B", "I", "W" or the name of a `Kind` ("loss", "optimizer", "data", "collective"); around what sends
    or receives: "send_forward", "recv_forward", "send_backward", "recv_backward" (`messages.KINDS`), with the stage
    that does it, so that both ends of a message are known to belong together.
    stage: global (virtual) stage. microbatch: its number within the step. Both count from 0; -1: none. Raises
    UsageError on an unknown kind, and on numbers that are none or below -1.

    >>> with span("F", stage=0, microbatch=3):
    ...     pass
    """
    recorder = _active
    if type(stage) is not int or type(microbatch) is not int or stage < -1 or microbatch < -1:
        stage = checks.whole("stage", stage, least=-1)
        microbatch = checks.whole("microbatch", microbatch, least=-1)
    message = messages.label(kind, stage, microbatch)
    meant = message.kind if message is not None else _kind(kind)
    if recorder is None or not recorder.running:
        yield
        return
    works = meant in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    if (works or message is not None) and not recorder.device_known:
        recorder.use_device(*hooks.default_device())
        notes.leave(notes.MARKED)
    if works:
        recorder.forward_begins()
    lane = _LANE_OF.get(meant, Lane.COMPUTE)
    start = perf_counter_ns() if lane in _HOST_LANES else recorder.mark()
    label = message or Label(meant, stage, microbatch)
    try:
        yield
    except GeneratorExit:  # nobody left it: when it ended is not known
        if recorder.running:
            recorder.drop("span-not-left")
            recorder.patches.warn(f"a span '{kind}' was entered and not left, so it is not recorded: use it by `with`")
        raise
    except BaseException as error:
        _end_span(recorder, lane, start, label._replace(name=label.name or f"ended by {type(error).__name__}"))
        raise
    _end_span(recorder, lane, start, label)


def _end_span(recorder: Recorder, lane: Lane, start: Any, label: Label) -> None:
    if not recorder.running or not recorder.rule.current.sampled:
        return
    try:
        end = perf_counter_ns() if lane in _HOST_LANES else recorder.mark()
        if label.seq >= 0:  # a message, whose other end is looked for
            recorder.add(Lane.POST, start, start, (label,))
        recorder.add(lane, start, end, (label,))
    except Exception as error:  # ours, and the job's own may be on its way
        recorder.patches.fault(f"a span was lost: {type(error).__name__}: {error}")
        recorder.drop("span-failed")


def step() -> None:
    """Say that an optimizer step of your own training loop ends here (see `span`)."""
    if _active is not None and _active.running:
        _active.step()


_LANE_OF = {
    Kind.SEND: Lane.WAIT,
    Kind.RECV: Lane.WAIT,
    Kind.COLLECTIVE: Lane.WAIT,
    Kind.MEMCPY: Lane.COPY,
    Kind.DATA: Lane.HOST,
    Kind.HOST: Lane.HOST,
    Kind.LAUNCH: Lane.HOST,
    Kind.STEP: Lane.RANGE,
}


def _kind(kind: Kind | str) -> Kind:
    if isinstance(kind, Kind):
        return kind
    found = (FROM_SHORT.get(kind) or Kind.__members__.get(kind.upper())) if isinstance(kind, str) else None
    if found is None:
        raise UsageError(
            f"'{kind}' is not a kind of work",
            hint=f"use F, B, I, W, or one of {', '.join(k.name.lower() for k in Kind)}",
        )
    return found
