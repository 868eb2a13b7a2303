"""Rows of one optimizer step, and the rule that says where one step ends and the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bubblescope.model.kinds import SHORT, Kind, Lane

MAX_EVENTS = 100_000
"""Events kept of one step (some 200 bytes each); more are dropped and counted."""

UNDECIDED_CALLS = 16
"""So many schedule calls without any optimizer step mean that this job has none we can see."""


class Label(NamedTuple):
    """What a recorded event was. Made once and used again in each step, so that recording one costs an append.

    microbatch: within its schedule call. Other fields as in `Spans`; kept for messages and collectives.
    """

    kind: Kind
    stage: int = -1
    microbatch: int = -1
    name: str = ""
    peer: int = -1
    bytes: int = -1
    group: str = ""
    seq: int = -1


Event = tuple[Lane, Any, Any, int, int, int, tuple[Any, ...]]
"""(lane, start, end, host_start_ns, host_end_ns, offset, labels): one interval; a row for each label, as the
messages of one call share it. A bare tuple: hooks make one in every call.

start, end: integer ns, or the device marks that will become them. host_start_ns, host_end_ns: the host's own times,
-1 on CPU ranks (there they equal start and end). offset: of its schedule call's micro-batches in the step.
labels: `Label`s; until `StepBuffer.settle` they may be (function, its arguments) that makes them.
"""


def host_ns(mark: Any) -> int:
    """The host's time of a mark of any timer."""
    return int(mark if isinstance(mark, int) else mark.host_ns)


Cut = tuple[int, int, dict[str, Any], bool]
"""(first event, microbatch offset, layout, whether it was the first of its schedule) of a schedule call."""


@dataclass(slots=True)
class StepBuffer:
    """What one step collected. index: step number, -1 for evaluation.

    layout: of its pipeline (see `Recorder.schedule_begins`), None where no schedule call told it. cuts: its schedule
    calls, for splitting it later. accumulated: microbatches of these so far. extra: further fields of its line.
    """

    index: int
    warmup: bool = False
    evaluation: bool = False
    sampled: bool = True
    events: list[Event] = field(default_factory=list)
    layout: dict[str, Any] | None = None
    cuts: list[Cut] = field(default_factory=list)
    offset: int = 0
    accumulated: int = 0
    busy: bool = False
    optimizer_seen: bool = False
    partial: bool = False
    device: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    settled: int = 0

    def settle(self, failed: Callable[[str, Exception], None]) -> None:
        """Make the labels that hooks left for later: in one go, while caches are warm. Called when a schedule call
        ends, so that nothing of the job is kept beyond it. failed: called with the name of one that raised and with
        what it raised; that event then has none."""
        events = self.events
        known: Any = None
        made: tuple[Any, ...] = ()
        for i in range(self.settled, len(events)):
            labels = events[i][6]
            if not labels or not callable(labels[0]):
                continue
            if labels is not known:  # a post and its wait share them
                try:
                    made = labels[0](*labels[1])
                    known = labels
                except Exception as error:  # ours, and the job is about to go on
                    failed(getattr(labels[0], "__name__", "event").strip("_"), error)
                    made = ()
            events[i] = (*events[i][:6], made)
        self.settled = len(events)


_KIND_TEXT = [SHORT.get(kind, kind.name) for kind in sorted(Kind)]
"""By value: F, B, I, W as schedules write them; other kinds by name. A list, because hashing an enum is slow."""

_LANE_TEXT = [lane.name.lower() for lane in sorted(Lane)]
_HOST_LANES = (Lane.HOST, Lane.RANGE)


def columns(buffer: StepBuffer) -> dict[str, Any]:
    """The events as columns, a row for each label; `name` and `group` are indices into the line's `texts`.

    >>> buffer = StepBuffer(4, layout={"stages": [2, 0]})
    >>> buffer.events.append((Lane.COMPUTE, 10, 20, -1, -1, 8, (Label(Kind.FORWARD, 2, 5),)))
    >>> made = columns(buffer)
    >>> made["columns"]["kind"], made["columns"]["chunk"], made["columns"]["microbatch"], made["texts"]
    (['F'], [1], [13], [''])
    """
    texts: dict[str, int] = {"": 0}
    rows = [(*event[:-1], label) for event in buffer.events for label in event[-1]]
    lane, start, end, host_start, host_end, offset, labels = zip(*rows, strict=True) if rows else ((),) * 7
    kind, stage, microbatch, name, peer, size, group, seq = zip(*labels, strict=True) if rows else ((),) * 8
    stages = [] if buffer.layout is None else sorted(buffer.layout["stages"])
    chunk, device = {s: i for i, s in enumerate(stages)}.get, buffer.device
    made: dict[str, Any] = {
        "kind": [_KIND_TEXT[k] for k in kind],
        "lane": [_LANE_TEXT[x] for x in lane],
        "stage": stage,
        "chunk": [chunk(s, -1) for s in stage],
        "microbatch": [o + m if m >= 0 else -1 for o, m in zip(offset, microbatch, strict=True)],
        "start_ns": start,
        "end_ns": end,
        "peer": peer,
        "bytes": size,
        "group": [texts.setdefault(text, len(texts)) for text in group],
        "seq": seq,
        "device": [-1 if x in _HOST_LANES else device for x in lane],
        "name": [texts.setdefault(text, len(texts)) for text in name],
    }
    if any(ns >= 0 for ns in host_start):
        made["host_start_ns"], made["host_end_ns"] = host_start, host_end
    return {"columns": made, "texts": list(texts)}


class StepRule:
    """Cuts the stream of events into optimizer steps.

    A new step opens at the first data loading, schedule call or forward after an optimizer step: several
    optimizers in one step are one step; several schedule calls before an optimizer step are gradient accumulation.
    A job whose optimizer cannot be seen (none in `UNDECIDED_CALLS` schedule calls): each schedule call is a step.

    open_step makes the buffer of a step number; close_step receives each finished buffer, in order.
    """

    def __init__(self, open_step: Callable[[int], StepBuffer], close_step: Callable[[StepBuffer], None]) -> None:
        self._make = open_step
        self._close = close_step
        self._mode = "undecided"
        self._resting: StepBuffer | None = None
        self._pending_cut: int | None = None
        self.in_schedule = False
        self.current = open_step(0)

    @property
    def marked(self) -> bool:
        """Whether the user says where steps end."""
        return self._mode == "manual"

    def _roll(self) -> None:
        finished = self.current
        self.current = self._make(finished.index + 1)
        self._pending_cut = None
        self._close(finished)

    def step(self) -> None:
        """The user says that a step ends here; from now on only the user does."""
        self._mode = "manual"
        if self.current.events or self.current.busy or not self.current.sampled:
            self._roll()

    def work_begins(self) -> None:
        """Data loading or a forward outside of a schedule call begins."""
        if self.in_schedule or self.current.evaluation or self._mode == "manual":
            return
        if self.current.optimizer_seen or (self._mode == "schedule" and self.current.cuts):
            self._roll()
        elif self._mode == "undecided" and self.current.cuts and self._pending_cut is None:
            self._pending_cut = len(self.current.events)

    def schedule_begins(self, layout: dict[str, Any], training: bool, first: bool = False) -> None:
        """A schedule call begins (see `Recorder.schedule_begins`). first: its step is a warm-up too."""
        if self.in_schedule:  # the call before raised, and the job went on
            self.current.partial = True
            self.schedule_ends()
        if not training:
            self._resting, self.current = self.current, StepBuffer(-1, evaluation=True, layout=layout)
            self.in_schedule = True
            return
        self.work_begins()
        if self._mode == "undecided" and len(self.current.cuts) >= UNDECIDED_CALLS:
            self._mode = "schedule"
            self._split()
        here = self.current
        cut = len(here.events) if self._pending_cut is None else self._pending_cut
        self._pending_cut = None
        here.offset = here.accumulated
        here.accumulated += layout["microbatches"]
        here.cuts.append((cut, here.offset, layout, first))
        here.layout = layout
        here.warmup = here.warmup or first
        here.busy = self.in_schedule = True

    def schedule_ends(self) -> None:
        """The schedule call returned. (One that raised leaves `in_schedule` set: its step is partial.)"""
        self.in_schedule = False
        if self._resting is not None:
            finished, self.current, self._resting = self.current, self._resting, None
            self._close(finished)

    def optimizer_stepped(self) -> None:
        """An optimizer step ended. One before any pipeline work of the step is not this pipeline's."""
        if not self.current.busy or self._mode == "manual":
            return
        self.current.optimizer_seen = True
        self._mode = "optimizer"

    def _split(self) -> None:
        """No optimizer came: what was taken for one step was one step for each schedule call."""
        whole = self.current
        tail = len(whole.events) if self._pending_cut is None else self._pending_cut
        starts = [0, *(cut[0] for cut in whole.cuts[1:]), tail]
        for i, (_, offset, layout, first) in enumerate(whole.cuts):
            part = self._make(whole.index + i)
            part.layout, part.warmup = layout, part.warmup or first
            part.events = [
                (*event[:5], event[5] - offset, event[6]) for event in whole.events[starts[i] : starts[i + 1]]
            ]
            part.extra = whole.extra
            self._close(part)
        self.current = self._make(whole.index + len(whole.cuts))
        self.current.events = whole.events[tail:]
        self._pending_cut = None

    def finish(self) -> None:
        """Recording ends: hand over what is there, marked partial when its step had not ended."""
        if self._resting is not None:
            self.current, self._resting = self._resting, None
        here = self.current
        if self._mode == "undecided" and len(here.cuts) > 1 and not self.in_schedule:
            self._split()
            here = self.current
        elif self._mode in ("undecided", "schedule"):
            here.partial = self.in_schedule
        elif self._mode == "optimizer":
            here.partial = not here.optimizer_seen
        else:
            here.partial = True
        if here.events and here.busy:
            self._close(here)
