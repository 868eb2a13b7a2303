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


@dataclass
class Watch:
    """One rank during a window. ended: why there is nothing more to come from it; gone: because its process is.
    steps: recorded so far; base: when the common stretch began."""

    rank: Rank
    state: str = ""
    ended: str = ""
    gone: bool = False
    steps: int = 0
    base: int = 0
    stall_ms: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.state == "done"


def record(
    ranks: Sequence[Rank],
    folder: Path,
    seconds: float | None,
    steps: int | None,
    early: Early,
    tell: Callable[[str], None],
) -> list[Watch]:
    """Record so many steps, or seconds, during which all ranks record; less when it is to end early. Hooks are out
    when this returns, but for ranks that came to no further step.

    Raises AttachError when a rank refuses; then no rank records.
    """
    watches = [Watch(rank) for rank in ranks]
    try:
        _start(watches, folder)
        wait = partial(_await, watches, early=early, tell=tell)
        wait(lambda w: w.state == "recording", "the start of the next step")
        began = time.monotonic()
        for watch in watches:
            watch.base = watch.steps
        if steps is not None:
            wanted = steps + EXTRA_STEPS
            wait(lambda w: w.steps >= w.base + wanted, f"{wanted} further steps")
        else:
            lasts = seconds or 0.0
            wait(lambda w: time.monotonic() - began >= lasts, f"{lasts:g} s to pass", tell=lambda text: None)
    finally:
        _stop(watches)
    _come_out(watches, early, tell)
    return watches


def _start(watches: Sequence[Watch], folder: Path) -> None:
    for watch in watches:
        try:
            _ask(watch, "start", out=str(folder), seconds=LONGEST_SECONDS, lease_s=LEASE_SECONDS)
        except AttachError as error:
            raise AttachError(f"{watch.rank.label}: {error.what}", hint=error.hint) from error


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
    """Until every rank that still records is ready. A job's step may take minutes, so there is no limit."""
    told = False
    began = time.monotonic()
    while not early:
        for watch in watches:
            _update(watch)
        missing = [watch for watch in watches if not watch.over and not ready(watch)]
        if not missing:
            return
        if not told and time.monotonic() - began > PATIENCE_SECONDS:
            told = True
            tell(f"waiting for {what} in {missing[0].rank.label} (Ctrl-C ends it, and takes the hooks out)")
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
    window = client.ask(watch.rank.agent, command, **fields)["window"]
    watch.state = str(window["state"])
    watch.steps = int(window["steps"])
    watch.stall_ms = max(watch.stall_ms, float(window["stall_ms"]))
    watch.warnings = [client.printable(text) for text in window["warnings"]]
    if watch.state == "failed":
        watch.ended = client.printable(window["error"])
