"""Rows of one optimizer step, and the rule that says where one step ends and the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bubblescope.model.kinds import SHORT, Kind, Lane

UNDECIDED_CALLS = 16
"""So many schedule calls without any optimizer step mean that this job has none we can see."""


class Row(NamedTuple):
    """One recorded span. start, end: integer ns, or the device marks that will become them.

    host_start_ns, host_end_ns: the host's own times, -1 on CPU ranks (there they equal start and end).
    """

    kind: Kind
    lane: Lane
    stage: int
    chunk: int
    microbatch: int
    start: Any
    end: Any
    peer: int
    bytes: int
    group: str
    seq: int
    device: int
    name: str
    host_start_ns: int
    host_end_ns: int


@dataclass
class StepBuffer:
    """What one step collected. index: step number, -1 for evaluation.

    cuts: (first row, microbatch offset) of each schedule call in it, for splitting it later.
    extra: device clock readings. accumulated: microbatches of the schedule calls so far.
    """

    index: int
    warmup: bool = False
    evaluation: bool = False
    sampled: bool = True
    rows: list[Row] = field(default_factory=list)
    cuts: list[tuple[int, int]] = field(default_factory=list)
    offset: int = 0
    accumulated: int = 0
    busy: bool = False
    optimizer_seen: bool = False
    partial: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def kind_text(kind: Kind) -> str:
    """F, B, I, W as schedules write them; other kinds by name."""
    return SHORT.get(kind, kind.name)


def columns(rows: list[Row]) -> dict[str, Any]:
    """The rows as columns; `name` and `group` become indices into tables of the line.

    >>> row = Row(Kind.FORWARD, Lane.COMPUTE, 2, 0, 5, 10, 20, -1, -1, "", -1, 0, "", -1, -1)
    >>> made = columns([row])
    >>> made["columns"]["kind"], made["columns"]["microbatch"], made["texts"]
    (['F'], [5], [''])
    """
    texts: dict[str, int] = {"": 0}
    across = list(zip(*rows, strict=True)) if rows else [()] * len(Row._fields)
    made: dict[str, list[Any]] = dict(zip(Row._fields, map(list, across), strict=True))
    made["kind"] = [kind_text(kind) for kind in made["kind"]]
    made["lane"] = [lane.name.lower() for lane in made["lane"]]
    made["group"] = [texts.setdefault(text, len(texts)) for text in made["group"]]
    made["name"] = [texts.setdefault(text, len(texts)) for text in made["name"]]
    made["start_ns"] = made.pop("start")
    made["end_ns"] = made.pop("end")
    if all(value == -1 for value in made["host_start_ns"]):
        del made["host_start_ns"], made["host_end_ns"]
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

    def _roll(self) -> None:
        finished = self.current
        self.current = self._make(finished.index + 1)
        self._pending_cut = None
        self._close(finished)

    def step(self) -> None:
        """The user says that a step ends here; from now on only the user does."""
        self._mode = "manual"
        if self.current.rows or self.current.busy or not self.current.sampled:
            self._roll()

    def work_begins(self) -> None:
        """Data loading or a forward outside of a schedule call begins."""
        if self.in_schedule or self.current.evaluation or self._mode == "manual":
            return
        if self.current.optimizer_seen or (self._mode == "schedule" and self.current.cuts):
            self._roll()
        elif self._mode == "undecided" and self.current.cuts and self._pending_cut is None:
            self._pending_cut = len(self.current.rows)

    def schedule_begins(self, microbatches: int, training: bool) -> None:
        """A schedule call with that many microbatches begins."""
        if self.in_schedule:  # the call before raised, and the job went on
            self.current.partial = True
            self.schedule_ends()
        if not training:
            self._resting, self.current = self.current, StepBuffer(-1, evaluation=True)
            self.in_schedule = True
            return
        self.work_begins()
        if self._mode == "undecided" and len(self.current.cuts) >= UNDECIDED_CALLS:
            self._mode = "schedule"
            self._split()
        here = self.current
        cut = len(here.rows) if self._pending_cut is None else self._pending_cut
        self._pending_cut = None
        here.offset = here.accumulated
        here.accumulated += microbatches
        here.cuts.append((cut, here.offset))
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
        tail = len(whole.rows) if self._pending_cut is None else self._pending_cut
        starts = [0, *(cut for cut, _ in whole.cuts[1:]), tail]
        for i, (_, offset) in enumerate(whole.cuts):
            part = self._make(whole.index + i)
            part.rows = [
                row._replace(microbatch=row.microbatch - offset) if row.microbatch >= 0 else row
                for row in whole.rows[starts[i] : starts[i + 1]]
            ]
            part.extra = whole.extra
            self._close(part)
        self.current = self._make(whole.index + len(whole.cuts))
        self.current.rows = whole.rows[tail:]
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
        if here.rows and here.busy:
            self._close(here)
