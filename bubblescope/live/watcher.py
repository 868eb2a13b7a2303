"""From a growing recording to the state that the page and the metrics show.

Steps are analysed in passes over the lines in memory: through history in large ones, then over the last steps. A GPU
step is counted once it and the step after it are complete, because its window may end where the next one begins;
so the sums are those that an analysis of the whole recording gives.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bubblescope.align import prepare
from bubblescope.errors import InputError
from bubblescope.ingest import recording
from bubblescope.live.follow import Follower, RankFile, newest_job
from bubblescope.live.totals import Totals, only_warmup
from bubblescope.model import Notice
from bubblescope.report.build import Report, ReportOptions, build

log = logging.getLogger("bubblescope.live")

BATCH = 50
"""Steps of history in one pass."""
SILENT_STEPS = 5
"""A rank is silent after so many times the usual step time without a line (and `patience_s` at least)."""
EXPECTED_CODES = ("recording-open", "rank-ended-early")
"""Notices that only say that a recording is still being written."""

TRAINING, SILENT, ENDED, MISSING = "training", "silent", "ended", "not seen"


@dataclass(frozen=True)
class WatchOptions:
    """steps: how many the page and the gauges look back on. patience_s: how long ranks may be late.

    Raises UsageError for what `ReportOptions` refuses."""

    steps: int = 20
    patience_s: float = 10.0
    price_per_gpu_hour: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        _ = self.report

    @property
    def report(self) -> ReportOptions:
        return ReportOptions(price_per_gpu_hour=self.price_per_gpu_hour, currency=self.currency)


@dataclass(frozen=True)
class RankState:
    """One rank. heard: Unix time of its newest line, None when there never was one. gpu: index on its host, None
    where it has no GPU. error: with which the recording of this rank ended."""

    rank: int
    state: str
    stage: int | None = None
    host: str = ""
    gpu: int | None = None
    last_step: int = -1
    heard: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Snapshot:
    """All that is known at one moment; never changed once made, and not made anew while nothing changes.

    state: "waiting" until the first step, then that of the job: training while one rank does. behind: bytes of
    history that are still to be read.
    """

    version: int = 0
    made: float = 0.0
    path: str = ""
    options: WatchOptions = field(default_factory=WatchOptions)
    state: str = "waiting"
    report: Report | None = None
    totals: Totals = field(default_factory=Totals)
    ranks: tuple[RankState, ...] = ()
    notices: tuple[Notice, ...] = ()
    behind: int = 0
    errors: int = 0
    pass_seconds: float = 0.0

    @property
    def content(self) -> tuple[object, ...]:
        """What tells two snapshots apart, but for when they were made."""
        return (id(self.report), self.totals.steps, self.state, self.ranks, self.notices, self.behind, self.errors)

    @property
    def silent(self) -> list[RankState]:
        return [rank for rank in self.ranks if rank.state == SILENT]


@dataclass(frozen=True)
class _Pass:
    """Steps first..last are analysed, those that are new up to `count_to` are added to the sums. before: the step that
    is read with them because the first of them may begin where it ends. history: there is more to count after it, so
    what it shows is only for the time being."""

    before: int | None
    first: int
    last: int
    count_to: int
    history: bool = False


class Watcher:
    """`refresh` reads and analyses a little more and publishes a new `snapshot`. One thread calls it; any may read
    `snapshot`."""

    def __init__(self, path: Path, options: WatchOptions, *, now: Callable[[], float] = time.time) -> None:
        self.follower = Follower(path, now=now)
        self.options = options
        self.snapshot = Snapshot(path=str(path), options=options)
        self._now = now
        self._current: dict[int, RankFile] = {}
        self._left: list[RankFile] = []
        self._restarts = 0
        self._errors = 0
        self._pass_seconds = 0.0
        self._last_look = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Know of a run what a watcher knows that is started now: nothing."""
        self.follower.begin_anew()
        self._clocks: dict[int, tuple[int, int]] = {}
        self._seen_since: float | None = None
        self._counted = -1
        self._shown = -1
        self._report: Report | None = None
        self._totals = Totals()

    def refresh(self) -> bool:
        """One poll, at most one pass, one snapshot. Whether there is more to do at once."""
        self.follower.poll()
        self._choose_files()
        todo = self._next_pass(final=self._over())
        if todo is not None:
            self._run(todo)
        self._publish()
        return todo is not None or self._can_read_on()

    def read_all(self) -> None:
        """Everything that is there, for who will not look again: a job of which nothing is heard counts as ended."""
        self._last_look = True
        while self.refresh():
            pass

    # ---- which files, which steps

    def _choose_files(self) -> None:
        chosen, left = newest_job(self.follower.files.values())
        clocks = _clocks(chosen)
        if _other_run(self._clocks, clocks):
            self._restarts += 1
            self._begin_anew()
            self.follower.poll()
            chosen, left = newest_job(self.follower.files.values())
            clocks = _clocks(chosen)
        self._clocks |= clocks
        for file in left:
            file.forget(file.last_step + 1)
        self._current, self._left = chosen, left
        if chosen and self._seen_since is None:
            self._seen_since = self._now()

    def _next_pass(self, *, final: bool) -> _Pass | None:
        known = sorted({step for file in self._current.values() for step, _ in file.steps})
        ready = self._ready(final=final)
        steps = [step for step in known if step <= ready]
        countable = steps if final else steps[:-1]
        new = [step for step in countable if step > self._counted]
        if not new and (not steps or steps[-1] == self._shown):
            return None
        # Of the first step held, where it begins is known only when it is the first of all.
        earliest = min(len(steps) - 1, int(self._forgot_before(steps[0])))
        at = max(len(steps) - self.options.steps, earliest)
        if new and steps.index(new[0]) < at:
            at = steps.index(new[0])
            end = min(at + BATCH, len(countable))
            last = steps[min(end, len(steps) - 1)]
            return _Pass(_before(steps, at), steps[at], last, countable[end - 1], history=True)
        return _Pass(_before(steps, at), steps[at], steps[-1], new[-1] if new else self._counted)

    def _forgot_before(self, step: int) -> bool:
        return any(file.first_step is not None and file.first_step < step for file in self._current.values())

    def _ready(self, *, final: bool) -> int:
        """The last step that every rank has which is still expected to have it."""
        files = list(self._current.values())
        if not files or (self._some_missing() and not final and self._waited() < self.options.patience_s):
            return -1
        awaited = [file for file in files if file.end is None and not self._is_silent(file)]
        return max(file.last_step for file in files) if final or not awaited else min(f.last_step for f in awaited)

    def _some_missing(self) -> bool:
        return len(self._current) < self._world()

    def _world(self) -> int:
        return max((f.header.world or 0 for f in self._current.values() if f.header is not None), default=0)

    def _waited(self) -> float:
        return 0.0 if self._seen_since is None else self._now() - self._seen_since

    def _is_silent(self, file: RankFile) -> bool:
        limit = self.options.patience_s
        if file.last_step < 0:
            limit *= 6  # starting up
        elif self._report is not None:
            every = int(file.header.options.get("every") or 1) if file.header is not None else 1
            limit = max(limit, SILENT_STEPS * self._report.data["steps"]["seconds_median"] * every)
        return self._now() - file.heard > limit

    def _over(self) -> bool:
        """Whether no rank is expected to write any more. While all of them are silent the job may be stopped, and go on
        later with steps that some ranks have written already."""
        files = self._current.values()
        quiet = all(not f.behind and (f.end is not None or self._is_silent(f)) for f in files)
        return quiet and (self._last_look or any(f.end is not None for f in files)) and bool(files)

    def _can_read_on(self) -> bool:
        return any(file.behind and not self.follower.full(file) for file in self._current.values())

    # ---- analysis

    def _run(self, todo: _Pass) -> None:
        began = time.perf_counter()
        try:
            report = self._analyse(todo)
            self._totals.add(report.attribution, self._counted, todo.count_to)
            if not only_warmup(report.attribution):
                self._report = report
        except InputError as error:
            log.info("steps %d to %d cannot be analysed: %s", todo.first, todo.last, error)
        except Exception:  # a bug of ours must not end the watch; the steps are left out, and counted as an error
            self._errors += 1
            log.exception("steps %d to %d could not be analysed", todo.first, todo.last)
        self._counted = todo.count_to
        self._shown = -1 if todo.history else todo.last
        for file in self._current.values():
            file.forget(self._oldest_needed(file))
        self._pass_seconds = time.perf_counter() - began

    def _analyse(self, todo: _Pass) -> Report:
        first = todo.first if todo.before is None else todo.before
        run = recording.parse({file.path: file.text(first, todo.last) for file in self._current.values()})
        if todo.before is not None:
            run = replace(run, source=replace(run.source, details={**run.source.details, "step_before": todo.before}))
        return build(prepare(run), self.options.report)

    def _oldest_needed(self, file: RankFile) -> int:
        """The last step counted gives the next one its beginning; the page looks back further, where there is room."""
        oldest, size = self._counted, 0
        for step, line in list(file.steps)[: -self.options.steps - 2 : -1]:
            size += len(line)
            if size > self.follower.room // 2:
                break
            oldest = min(oldest, step)
        return oldest

    # ---- what is shown

    def _publish(self) -> None:
        ranks = self._rank_states()
        made = Snapshot(
            version=self.snapshot.version + 1,
            made=self._now(),
            path=str(self.follower.path),
            options=self.options,
            state=self._job_state(ranks),
            report=self._report,
            totals=copy.deepcopy(self._totals),
            ranks=ranks,
            notices=self._notices(),
            behind=sum(file.behind for file in self._current.values()),
            errors=self._errors,
            pass_seconds=self._pass_seconds,
        )
        if made.content != self.snapshot.content:
            self.snapshot = made

    def _job_state(self, ranks: tuple[RankState, ...]) -> str:
        if self._report is None:
            return "waiting"
        states = {rank.state for rank in ranks} - {MISSING}
        return next((state for state in (TRAINING, SILENT) if state in states), ENDED)

    def _rank_states(self) -> tuple[RankState, ...]:
        seen = {rank: self._rank_state(rank, file) for rank, file in self._current.items()}
        missing = {rank: RankState(rank, MISSING) for rank in range(self._world()) if rank not in seen}
        return tuple(state for _, state in sorted((seen | missing).items()))

    def _rank_state(self, rank: int, file: RankFile) -> RankState:
        state = ENDED if file.end is not None else SILENT if self._is_silent(file) else TRAINING
        layout = file.layout
        stage = layout.pp_ranks.index(rank) if layout is not None and rank in layout.pp_ranks else None
        on_gpu = layout is not None and layout.device.type == "cuda"
        return RankState(
            rank,
            state,
            stage,
            file.header.host if file.header is not None else "",
            layout.device.index if layout is not None and on_gpu else None,
            file.last_step,
            file.heard,
            file.end.error if file.end is not None else "",
        )

    def _notices(self) -> tuple[Notice, ...]:
        made = self.follower.notices
        if self._left:
            text = f"{len(self._left)} files of earlier runs are in this folder; only the newest run is followed"
            made.append(Notice("several-jobs", text, str(self.follower.path)))
        if self._restarts:
            text = f"the job started anew while it was watched ({self._restarts}×); the sums are of its newest run"
            made.append(Notice("job-restarted", text, ""))
        if self._errors:
            text = f"{self._errors} passes failed by a bug of bubblescope and are left out; its log has the traceback"
            made.append(Notice("pass-failed", text, ""))
        for rank, file in self._current.items():
            if file.unfinished and self._is_silent(file):
                text = f"rank {rank}: the file ends in {file.unfinished} bytes of an unfinished line; it is not counted"
                made.append(Notice("tail-cut", text, str(file.path)))
        every = max((int(f.header.options.get("every") or 1) for f in self._current.values() if f.header), default=1)
        if every > 1:
            text = f"one step in {every} is recorded, so what is counted is about 1/{every} of what was lost"
            made.append(Notice("steps-sampled", text, ""))
        return tuple(made)


def _before(steps: list[int], at: int) -> int | None:
    return steps[at - 1] if at else None


def _clocks(files: dict[int, RankFile]) -> dict[int, tuple[int, int]]:
    """The clock in the header of each rank's file: no two starts of a rank have the same."""
    return {rank: file.header.clock for rank, file in files.items() if file.header is not None}


def _other_run(old: dict[int, tuple[int, int]], new: dict[int, tuple[int, int]]) -> bool:
    """Whether a rank of `old` started again, or all are others. One whose file is gone for a moment is no new run.

    >>> _other_run({0: (1, 5)}, {1: (1, 6), 0: (1, 5)}), _other_run({0: (1, 5)}, {}), _other_run({}, {0: (1, 5)})
    (False, False, False)
    >>> _other_run({0: (1, 5), 1: (1, 6)}, {0: (1, 9)}), _other_run({0: (1, 5)}, {1: (1, 9)})
    (True, True)
    """
    same = old.keys() & new.keys()
    return any(old[rank] != new[rank] for rank in same) or bool(old and new and not same)
