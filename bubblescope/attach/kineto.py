"""Kineto traces from ranks that poll for a profiler daemon: be that daemon for one window, collect the files.

The window is Kineto's: bubblescope places nothing into the process. What can go wrong is Kineto's too: a process
that exits while its trace is being collected crashes at exit, so callers say how long the window is (`Plan.lasts`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bubblescope.attach import process
from bubblescope.attach.discover import Rank
from bubblescope.attach.early import Early, EndedEarly
from bubblescope.attach.kineto_daemon import DIRECTORY_VARIABLE, Endpoint
from bubblescope.errors import AttachError, InputError
from bubblescope.model.notice import counted, some

DEFAULT_POLL_SECONDS = 10.0
WARMUP_SECONDS = 1
MARGIN_SECONDS = 4.0
"""From a fetched config to the start of its warm-up: Kineto drops a request that comes too late for its start."""

EXPORT_SECONDS = 60.0
"""How long writing a trace may take once its window is over."""

LONGEST_DIRECTORY = 54
"""Kineto's clients are called ``dynoconfigclient`` and a UUID, and a socket's path has at most 107 characters."""

MOST_ROUNDS = 4
TRACE_VARIABLE = "KINETO_ONDEMAND_TRACE_DIR"
_INTERVAL = re.compile(r"^\s*ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS\s*=\s*(\d{1,4})\s*$", re.MULTILINE)
_HEAD_BYTES = 1 << 16

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to trace, and into which folder. seconds or steps, one of them."""

    folder: Path
    seconds: float | None = None
    steps: int | None = None

    def lasts(self, ranks: Sequence[Rank]) -> str:
        """For the user: how long the job must live on for this to be safe."""
        poll = max(map(poll_seconds, ranks))
        if self.seconds is not None:
            return _within(_lead(ranks, MARGIN_SECONDS) + self.seconds)
        return f"within its next {self.steps} steps and {math.ceil(3 * poll) + 5} s"


@dataclass(frozen=True)
class Traces:
    """files: one per rank, renamed so that they tell their rank. lost: {label of a rank: why it has no file}.
    pending: some will still be written, as Kineto cannot be told to end a window early."""

    files: tuple[Path, ...]
    lost: Mapping[str, str]
    pending: bool = False


def poll_seconds(rank: Rank) -> float:
    """How often that process asks; Kineto's default unless the file named by its KINETO_CONFIG says otherwise."""
    named = (rank.environ or {}).get("KINETO_CONFIG", "")
    try:
        found = _INTERVAL.search(Path(named).read_text(errors="replace")) if named else None
    except OSError:
        found = None
    return max(1.0, float(found[1])) if found else DEFAULT_POLL_SECONDS


def collect(ranks: Sequence[Rank], plan: Plan, early: Early, tell: Tell) -> Traces:
    """Trace all these ranks in one common window. plan.folder is there, and the job's user can write to it.

    Raises AttachError when another daemon owns the endpoint, a rank is being traced already, or no rank gives a
    trace; InputError when the ranks' windows have no moment in common.
    """
    with ExitStack() as stack:
        endpoints = _endpoints(ranks, stack)
        _await_ready(ranks, endpoints, early, tell)
        if plan.seconds is not None:
            made = _by_duration(ranks, plan, endpoints, early, tell)
        else:
            made = _by_iterations(ranks, plan, endpoints, early, tell)
    if not made.files:
        reasons = "; ".join(f"{who}: {why}" for who, why in made.lost.items())
        if early:
            raise EndedEarly(early, f"no rank wrote a trace: {reasons}", pending=made.pending)
        raise AttachError(
            f"no rank wrote a trace: {reasons}",
            hint="the job's own log has Kineto's words on it; some versions write only below the job's temporary "
            "folder: try --out there",
        )
    return made


# ---- endpoints and readiness

_Endpoints = dict[str | None, Endpoint]


def _directory(rank: Rank) -> str | None:
    return (rank.environ or {}).get(DIRECTORY_VARIABLE) or None


def _endpoints(ranks: Sequence[Rank], stack: ExitStack) -> _Endpoints:
    uids = frozenset(rank.uid for rank in ranks)
    directories = {_directory(rank) for rank in ranks}
    return {one: stack.enter_context(Endpoint(one, uids)) for one in directories}


def _await_ready(ranks: Sequence[Rank], endpoints: _Endpoints, early: Early, tell: Tell) -> None:
    """Until every rank has polled. Those that say they are busy are traced already, by the job or by another."""
    patience = max(map(poll_seconds, ranks)) * 2 + 2
    tell(f"waiting for {counted(len(ranks), 'rank')} to ask (at most {patience:.0f} s)")
    ends = time.monotonic() + patience
    while time.monotonic() < ends and not all(rank.pid in endpoints[_directory(rank)].seen() for rank in ranks):
        if early:
            raise EndedEarly(early, "no rank was asked for a trace")
        time.sleep(0.05)
    seen = {pid: poll for endpoint in endpoints.values() for pid, poll in endpoint.seen().items()}
    silent = [rank for rank in ranks if rank.pid not in seen]
    if silent:
        raise AttachError(
            f"{some([rank.label for rank in silent], 4, count_rest=True)} did not ask for a trace in {patience:.0f} s",
            hint=_why_silent(silent[0]),
        )
    busy = [rank.label for rank in ranks if not seen[rank.pid].ready]
    if busy:
        raise AttachError(
            f"a trace is running already, by the job itself or by somebody else, in {some(busy, 4, count_rest=True)}",
            hint="wait until that has ended: two profilers in one process crash it",
        )


def _why_silent(rank: Rank) -> str:
    if len(_directory(rank) or "") > LONGEST_DIRECTORY:
        return (
            f"its {DIRECTORY_VARIABLE} is longer than {LONGEST_DIRECTORY} characters, so that the sockets that Kineto "
            "makes there have names too long for the kernel; start the job with a shorter one"
        )
    return "KINETO_USE_DAEMON=1 works when it is set before the job starts, in a torch with Kineto"


# ---- the two kinds of window


def _by_duration(ranks: Sequence[Rank], plan: Plan, endpoints: _Endpoints, early: Early, tell: Tell) -> Traces:
    """One start time for all, late enough that each rank has fetched its config and warmed up. A busy machine can
    make a rank too late for it all the same: then once more for all, with more time."""
    assert plan.seconds is not None
    lead, longer = _lead(ranks, MARGIN_SECONDS), _lead(ranks, 4 * MARGIN_SECONDS)
    while True:
        text = (
            f"PROFILE_START_TIME={int((time.time() + lead) * 1000)}\n"
            f"ACTIVITIES_DURATION_MSECS={max(1, round(plan.seconds * 1000))}\n"
        )
        made = _round(ranks, plan.folder, endpoints, text, lead + plan.seconds, early)
        late = [rank.label for rank in ranks if rank.label in made.lost and process.exists(rank.pid)]
        if early or not late or lead == longer:
            return made
        lead = longer
        tell(
            f"no trace of {some(late, 4, count_rest=True)} ({made.lost[late[0]]}); again, for all ranks: the job must "
            f"not end {_within(lead + plan.seconds)}"
        )
        for path in made.files:
            path.unlink()


def _lead(ranks: Sequence[Rank], margin: float) -> float:
    """Seconds until a window begins: every rank asks, has that margin and warms up."""
    return max(map(poll_seconds, ranks)) + WARMUP_SECONDS + margin


def _within(seconds: float) -> str:
    return f"within the next {math.ceil(seconds) + 5} s"


def _by_iterations(ranks: Sequence[Rank], plan: Plan, endpoints: _Endpoints, early: Early, tell: Tell) -> Traces:
    """Ranks count their steps alike but ask at different moments, so one start number is needed that none of them
    has passed: a multiple of a number of steps that lasts longer than the ranks take to ask."""
    multiple = 1
    poll = max(map(poll_seconds, ranks))
    for attempt in range(MOST_ROUNDS):
        text = (
            f"PROFILE_START_ITERATION=0\nPROFILE_START_ITERATION_ROUNDUP={multiple}\n"
            f"ACTIVITIES_ITERATIONS={plan.steps}\n"
        )
        made = _round(ranks, plan.folder, endpoints, text, 8 * poll + 60, early)
        windows = [_window(path) for path in made.files]
        if early or not made.files or overlap(windows) >= 0.5:
            return made
        assert plan.steps is not None
        step_s = max(1e-4, sum(end - start for start, end in windows) / len(windows) / plan.steps)
        multiple = max(2, math.ceil(4 * poll / step_s))
        if attempt < MOST_ROUNDS - 1:
            tell(f"the ranks' windows were apart; again, at a multiple of {multiple} steps of {step_s * 1e3:.0f} ms")
            for path in made.files:
                path.unlink()
    raise InputError(
        f"the ranks traced different steps in {MOST_ROUNDS} tries",
        hint="use --duration, whose start is a time and not a number of steps",
        where=str(plan.folder),
    )


def overlap(windows: Sequence[tuple[float, float]]) -> float:
    """Share of the longest window that all of them have in common.

    >>> overlap([(0.0, 10.0), (5.0, 15.0)]), overlap([(0.0, 1.0), (2.0, 3.0)])
    (0.5, 0.0)
    """
    longest = max((end - start for start, end in windows), default=0.0)
    common = min((end for _, end in windows), default=0.0) - max((start for start, _ in windows), default=0.0)
    return max(0.0, common / longest) if longest > 0 else 0.0


def _round(ranks: Sequence[Rank], folder: Path, endpoints: _Endpoints, text: str, lasts: float, early: Early) -> Traces:
    """Offer one config to all, wait for what comes of it."""
    stamp = f".kineto-{os.getpid()}-{time.monotonic_ns()}"
    wanted = {rank.pid: _writes_to(rank, folder) / f"{stamp}_{rank.pid}.json" for rank in ranks}
    for rank in ranks:
        # Kineto puts the process id before the suffix.
        config = f"ACTIVITIES_LOG_FILE={_writes_to(rank, folder) / stamp}.json\n"
        config += f"ACTIVITIES_WARMUP_PERIOD_SECS={WARMUP_SECONDS}\n{text}"
        endpoints[_directory(rank)].offer({rank.pid: config})
    try:
        _await_files(wanted, time.monotonic() + lasts + EXPORT_SECONDS, early)
    finally:
        for endpoint in endpoints.values():
            endpoint.withdraw()
    taken = {pid for endpoint in endpoints.values() for pid in endpoint.taken()}
    return _gather(ranks, folder, wanted, taken, early)


def _writes_to(rank: Rank, folder: Path) -> Path:
    """Newer versions of Kineto write on-demand traces into one folder only, where the job names one."""
    return Path((rank.environ or {}).get(TRACE_VARIABLE) or folder)


def _await_files(wanted: Mapping[int, Path], ends: float, early: Early) -> None:
    """Until each rank has a file, or has ended."""
    while time.monotonic() < ends and not early:
        if all(path.exists() or not process.exists(pid) for pid, path in wanted.items()):
            return
        time.sleep(0.05)


def _gather(ranks: Sequence[Rank], folder: Path, wanted: Mapping[int, Path], taken: set[int], early: Early) -> Traces:
    files, lost, pending = [], {}, False
    for order, rank in enumerate(ranks):
        path = wanted[rank.pid]
        unfinished = path.with_name(path.name + ".tmp")
        if path.exists():
            number = rank.rank if rank.rank is not None else order
            files.append(_named(path, folder, number, rank.world))
        elif not process.exists(rank.pid):
            lost[rank.label] = "it ended before its trace was written"
        elif rank.pid not in taken:
            lost[rank.label] = "it did not fetch the request"
        elif early:
            pending = True
            lost[rank.label] = f"it traces its window to the end: the job must not end before it has written {path}"
            continue
        elif unfinished.exists():
            lost[rank.label] = "its trace was begun and not written (Kineto says why in the job's log)"
        else:
            lost[rank.label] = "Kineto dropped the request (it says why in the job's log)"
        unfinished.unlink(missing_ok=True)
    return Traces(tuple(files), lost, pending)


# ---- files


def _named(path: Path, folder: Path, rank: int, world: int | None) -> Path:
    """``rank-N.pt.trace.json``; daemon traces do not say whose they are, so it is written into them too."""
    target = folder / f"rank-{rank}.pt.trace.json"
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        at = head.find(b"{")
        if at < 0 or b'"distributedInfo"' in head or world is None:
            shutil.move(path, target)
            return target
        info = json.dumps({"distributedInfo": {"rank": rank, "world_size": world}})[1:-1].encode()
        with target.open("xb") as out:
            out.write(head[: at + 1] + info + b",\n" + head[at + 1 :])
            while block := file.read(1 << 20):
                out.write(block)
    path.unlink()
    return target


_EVENT_TIME = re.compile(rb'"ts":\s*(\d+(?:\.\d+)?),\s*"dur":\s*(\d+(?:\.\d+)?)')


def _window(path: Path) -> tuple[float, float]:
    """Seconds from the first event's start to the last one's end; all ranks of a host share the clock."""
    first, last = math.inf, -math.inf
    for found in _EVENT_TIME.finditer(path.read_bytes()):
        start = float(found[1])
        first, last = min(first, start), max(last, start + float(found[2]))
    return (first / 1e6, last / 1e6) if first < last else (0.0, 0.0)
