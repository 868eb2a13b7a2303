"""Megatron's training logs -> a Run of totals: how long each rank computed in an iteration, not when.

Only ``--timing-log-option all`` gives numbers per rank. Nothing is placed within the iteration, so there is no bubble
here, no phase and no cause: busy and idle, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bubblescope.errors import InputError
from bubblescope.ingest.decompress import blocks, open_binary
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.ingest.parallel import Executor
from bubblescope.model import Clock, Kind, Lane, Layout, Names, Notice, Run, Source, SpanBuilder

_MARKS = (b"elapsed time per iteration (ms):", b"time across ranks (ms):", b"times across ranks (ms):")
_PEEK = 8 << 20
_ITERATION = re.compile(r"iteration\s+(\d{1,12})/.*elapsed time per iteration \(ms\):\s*([\d.]{1,20})")
_NAME = re.compile(r"\s+([a-z][\w-]{2,60}):\s*$")
_RANK = re.compile(r"\s+rank\s+(\d{1,7}):\s*([\d.]{1,20})\s*$")
_UNREAD = re.compile(r"\s+rank\s+\d+:")
_SPREAD = re.compile(r"\s+([a-z][\w-]{2,60})\s*\.*:\s*\(([\d.]{1,20}), ([\d.]{1,20})\)")
_MOST = re.compile(r"\s+([a-z][\w-]{2,60})\s*\.+:\s*([\d.]{1,20})\s*$")

BUSY = ("forward-compute", "backward-compute", "optimizer")
"""Timers of work that do not overlap; what stands between them is waiting, or not timed."""


def looks_like(name: str) -> bool:
    """Whether a file in a folder is worth opening, by its name."""
    return name.lower().endswith((".log", ".out", ".txt"))


def can_read(path: Path) -> bool:
    """Whether the file at `path` is a log with Megatron's timers, or at least its iteration times."""
    other = path.suffix.lower() in (".json", ".jsonl", ".gz", ".zst", ".sqlite", ".parquet")
    return path.is_file() and not other and sniff(str(path))


def sniff(path: str) -> bool:
    """As `can_read`, for any address."""
    try:
        with open_binary(path) as file:
            start = file.read(_PEEK)
    except InputError:
        return False
    return b"\0" not in start[:4096] and any(mark in start for mark in _MARKS)


def read(paths: Sequence[str | Path], options: ReadOptions = DEFAULT, executor: Executor | None = None) -> Run:
    """One Run. Raises InputError where the log has no times per rank; the message holds the totals that it has."""
    files = [str(p) for p in paths]
    notices: list[Notice] = []
    lines = (line for path in files for line in _lines(path, notices, options))
    log = _parse(lines)
    usable = [i for i in log.iterations if all(name in i.times for name in BUSY[:2])]
    if not usable:
        raise _no_ranks(log, files[0])
    if log.unread:
        notices.append(Notice("line-skipped", f"{log.unread} times of ranks cannot be read", files[0]))
    return _build(usable, files, notices)


def _lines(path: str, notices: list[Notice], options: ReadOptions) -> Iterator[str]:
    return iter(b"".join(blocks(path, options.max_bytes, notices)).decode("utf-8", "replace").splitlines())


@dataclass(eq=False)
class _Iteration:
    """times: timer -> rank -> ms per iteration."""

    number: int
    elapsed_ms: float
    times: dict[str, dict[int, float]] = field(default_factory=dict)


@dataclass(eq=False)
class _Log:
    iterations: list[_Iteration] = field(default_factory=list)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    unread: int = 0


def _parse(lines: Iterator[str]) -> _Log:
    log, timer = _Log(), ""
    for line in lines:
        iteration, name, rank = _ITERATION.search(line), _NAME.match(line), _RANK.match(line)
        spread, most = _SPREAD.match(line), _MOST.match(line)
        if iteration:
            log.iterations.append(_Iteration(int(iteration[1]), _ms(iteration[2])))
            timer = ""
        elif rank and timer and log.iterations:
            log.iterations[-1].times.setdefault(timer, {})[int(rank[1])] = _ms(rank[2])
        elif timer and _UNREAD.match(line):
            log.unread += 1
        elif name:
            timer = name[1]
        elif spread:
            log.spread[spread[1]] = (_ms(spread[2]), _ms(spread[3]))
        elif most:
            log.spread[most[1]] = (float("nan"), _ms(most[2]))
    return log


def _ms(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _no_ranks(log: _Log, path: str) -> InputError:
    known = ", ".join(f"{n} {_range(low, high)}" for n, (low, high) in log.spread.items() if n in _TOLD)
    if known:
        what = f"the log holds totals over all ranks only ({known} ms in the last iteration)"
    elif log.iterations:
        what = f"the log holds iteration times only (the last {log.iterations[-1].elapsed_ms:.1f} ms) and no timers"
    else:
        what = "the log holds no iteration times"
    return InputError(
        f"{what}: how long each GPU was idle cannot be told",
        hint="log per rank (--timing-log-level 2 --timing-log-option all), or better: record a trace",
        where=path,
    )


_TOLD = ("forward-backward", *BUSY)


def _range(low: float, high: float) -> str:
    return f"up to {high:.1f}" if low != low else f"{low:.1f}-{high:.1f}"


def _build(iterations: list[_Iteration], files: list[str], notices: list[Notice]) -> Run:
    """Per rank and iteration: work from the iteration's start, for as long as its timers say. Only lengths count."""
    names, rows = Names(), SpanBuilder()
    work = names.intern("total of " + ", ".join(BUSY))
    mark = names.intern("end of the iteration")
    ranks = sorted({r for i in iterations for t in BUSY for r in i.times.get(t, {})})
    whole = {r for r in ranks if all(r in i.times[t] for i in iterations for t in BUSY[:2])}
    for rank in sorted(set(ranks) - whole):
        text = f"rank {rank} lacks a time of {' or '.join(BUSY[:2])} in an iteration; it is left out"
        notices.append(Notice("rank-incomplete", text, files[0]))
    ranks = sorted(whole)
    if not ranks:
        raise InputError(
            "no rank has its times in every iteration that the log holds",
            hint="log per rank (--timing-log-level 2 --timing-log-option all), and cut the log to whole iterations",
            where=files[0],
        )
    at, too_long = 0, 0
    for iteration in iterations:
        length = round(iteration.elapsed_ms * 1e6)
        step = names.intern(f"step {iteration.number}")
        for rank in ranks:
            busy = round(sum(iteration.times.get(t, {}).get(rank, 0.0) for t in BUSY) * 1e6)
            too_long += busy > length
            end = at + min(busy, length)
            common = {"rank": rank, "step": iteration.number}
            rows.add(**common, lane=Lane.COMPUTE, device=0, start_ns=at, end_ns=end, name=work)
            # Holds the window open to the end of the iteration; it takes no time.
            rows.add(**common, lane=Lane.COPY, kind=Kind.MEMCPY, device=0, start_ns=at + length, end_ns=at + length,
                     name=mark)  # fmt: skip
            rows.add(**common, lane=Lane.RANGE, kind=Kind.STEP, start_ns=at, end_ns=at + length, name=step)
        at += length
    message = (
        f"a log of timers: {len(iterations)} iterations as totals per rank ({', '.join(BUSY)}), not placed in time; "
        "idle is what is left, also what no timer covers, and no bubble, phase or cause can be told from it"
    )
    notices.append(Notice("totals-only", message, files[0]))
    if too_long:
        text = f"in {too_long} cases the timers add up to more than the iteration; they are cut to it"
        notices.append(Notice("totals-exceed-iteration", text, files[0]))
    unknown = np.full(len(ranks), -1, dtype=np.int64)
    layout = Layout(
        ranks=np.array(ranks, dtype=np.int64), pp=unknown, replica=unknown, tp=unknown,
        host=np.full(len(ranks), names.intern("one log")), device_type="cuda", framework="megatron",
    )  # fmt: skip
    clock = Clock(aligned=True, how="totals, not times")
    return Run(rows.build(), names, layout, clock=clock, notices=tuple(notices),
               source=Source("megatron_log", tuple(files), "totals"))  # fmt: skip
