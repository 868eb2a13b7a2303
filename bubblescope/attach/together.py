"""One recording window over the agents of several ranks: all start, one common stretch, all stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bubblescope.attach import client, process
from bubblescope.attach.discover import Rank
from bubblescope.attach.early import Early
from bubblescope.errors import AttachError, BubblescopeError
from bubblescope.model.notice import counted

EXTRA_STEPS = 3
"""Recorded beyond what was asked for: a step that was open when the last rank joined, and the first of each rank,
are left out."""

LONGEST_SECONDS = 3600.0
LEASE_SECONDS = 15.0
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 10.0
"""After so long the user is told what is being waited for."""

OUT_SECONDS = 120.0
"""How long hooks may take to come out before we stop watching; the agent takes them out at the next step anyway."""

NO_SCHEDULE_SECONDS = 30.0
"""Optimizer steps so far apart with no schedule call between them: this rank runs no pipeline that we can see."""

PIPELINES = (
    "what is recorded is a schedule of torch.distributed.pipelining, Megatron-Core or DeepSpeed, or a loop marked with "
    "bubblescope.span"
)


class Refused(AttachError):
    """A rank cannot be recorded now. Nothing records."""


@dataclass
class Watch:
    """One rank during a window. ended: why there is nothing more to come from it; gone: because its process is.
    steps: recorded so far; base: when the common stretch began. pipeline, optimizer_steps: see `WindowState`;
    first_s, last_s: when such a step was first and last seen."""

    rank: Rank
    state: str = ""
    ended: str = ""
    gone: bool = False
    steps: int = 0
    base: int = 0
    pipeline: bool = False
    optimizer_steps: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    stall_ms: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.state == "done"

    @property
    def unseen(self) -> str:
        """Why nothing is recorded though it trains; "" when that is not so."""
        if self.pipeline or not self.optimizer_steps:
            return ""
        return f"no pipeline schedule ran in {counted(self.optimizer_steps, 'optimizer step')}"

    @property
    def hopeless(self) -> bool:
        """Whether it has trained for so long without a schedule that waiting for one makes no sense."""
        return bool(self.unseen) and self.last_s - self.first_s >= NO_SCHEDULE_SECONDS


def record(
    ranks: Sequence[Rank],
    folder: Path,
    seconds: float | None,
    steps: int | None,
    early: Early,
    tell: Callable[[str], None],
) -> list[Watch]:
    """Record so many steps, or seconds, during which all ranks record; less when it is to end early, or where no
    pipeline is seen. Hooks are out when this returns, but for ranks that came to no further step.

    Raises Refused when a rank refuses; then no rank records any more. Raises AttachError when one's answers make no
    sense.
    """
    watches = [Watch(rank) for rank in ranks]
    try:
        _start(watches, folder)
        wait = partial(_await, watches, early=early, tell=tell)
        wait(lambda w: w.state == "recording", "the next call of a schedule, or of an optimizer's zero_grad,")
        began = time.monotonic()
        for watch in watches:
            watch.base = watch.steps
        if steps is not None:
            wanted = steps + EXTRA_STEPS
            wait(lambda w: w.steps >= w.base + wanted, f"{wanted} further steps")
        else:
            lasts = seconds or 0.0
            wait(lambda w: time.monotonic() - began >= lasts, f"{lasts:g} s to pass", tell=lambda text: None)
    except Refused:
        _stop(watches)
        _come_out([watch for watch in watches if watch.state], early, tell)
        raise
    finally:
        _stop(watches)
    _come_out(watches, early, tell)
    return watches


def _start(watches: Sequence[Watch], folder: Path) -> None:
    """Every rank is asked before the first one starts. Raises Refused."""
    start = partial(_ask, command="start", out=str(folder), seconds=LONGEST_SECONDS, lease_s=LEASE_SECONDS)
    for act in (_check, start):
        for watch in watches:
            try:
                act(watch)
            except AttachError as error:
                raise Refused(f"{watch.rank.label}: {error.what}", hint=error.hint) from error


def _check(watch: Watch) -> None:
    assert watch.rank.agent is not None
    if why := client.ask(watch.rank.agent, "status").get("refuses"):
        raise AttachError(f"the agent refuses: {client.printable(why)}")


def _stop(watches: Sequence[Watch]) -> None:
    for watch in watches:
        if watch.state and not watch.over:
            try:
                _ask(watch, "stop")
            except BubblescopeError:
                continue  # it is gone, or its lease ends it


def _await(
    watches: Sequence[Watch], ready: Callable[[Watch], bool], what: str, *, early: Early, tell: Callable[[str], None]
) -> None:
    """Until every rank that still records is ready. A job's step may take minutes, so there is no limit, but for
    ranks that train without a pipeline."""
    told = False
    began = time.monotonic()
    while not early:
        for watch in watches:
            _update(watch)
        missing = [watch for watch in watches if not (watch.over or watch.hopeless or ready(watch))]
        if not missing:
            return
        if not told and time.monotonic() - began > PATIENCE_SECONDS:
            told = True
            first = missing[0]
            so_far = f": {first.unseen} so far" if first.unseen else ""
            tell(f"waiting for {what} in {first.rank.label}{so_far} (Ctrl-C ends it, and takes the hooks out)")
        time.sleep(POLL_SECONDS)


def _come_out(watches: Sequence[Watch], early: Early, tell: Callable[[str], None]) -> None:
    if early:
        tell(f"{early.says}: hooks come out at the next step")
    ends = time.monotonic() + OUT_SECONDS
    while any(not watch.over for watch in watches):
        for watch in watches:
            _update(watch)
            if not watch.over and time.monotonic() > ends:
                watch.ended = "it has come to no further step; its hooks come out when it does"
        time.sleep(POLL_SECONDS / 4)


def _update(watch: Watch) -> None:
    if watch.over:
        return
    try:
        _ask(watch, "status")
    except client.NoAgent:
        if not process.exists(watch.rank.pid):
            watch.gone = True
            watch.ended = "it ended while it was being recorded"


def _ask(watch: Watch, command: str, **fields: Any) -> None:
    assert watch.rank.agent is not None
    window = client.ask_window(watch.rank.agent, command, **fields)
    watch.state = window.state
    watch.steps = window.steps
    watch.pipeline = window.pipeline
    if window.optimizer_steps > watch.optimizer_steps:
        watch.last_s = time.monotonic()
        watch.first_s = watch.first_s or watch.last_s
    watch.optimizer_steps = window.optimizer_steps
    watch.stall_ms = max(watch.stall_ms, window.stall_ms)
    watch.warnings = [client.printable(text) for text in window.warnings]
    if watch.state == "failed":
        watch.ended = client.printable(window.error)
