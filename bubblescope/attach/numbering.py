"""Gives steps recorded by attaching the same numbers on all ranks.

Hooks go into each rank at its own next step, so each rank counts from another one. A stage's work in a step, from
its first forward to its last backward, lies within that of the stage before it: the middles of two ranks' windows
of one step are therefore less than half a step apart, and those of different steps more. That decides it, without
asking the job for anything.

>>> shifts({0: {0: 100, 1: 200, 2: 300}, 1: {0: 205, 1: 290}})
{0: 0, 1: 1}
"""

from __future__ import annotations

import fcntl
import os
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bubblescope.errors import InputError

LEFT_OUT = 1
"""First recorded steps that are not used: with gradient accumulation the first one may lack schedule calls."""

_COMPUTE = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Numbered:
    """What was made common. ranks: those with whole steps; silent: those without; recording: those of other hosts
    that are still being written. steps: how many they share."""

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    recording: tuple[int, ...]
    steps: int


@dataclass
class _File:
    path: Path
    rank: int
    lines: list[dict[str, Any]]

    @property
    def over(self) -> bool:
        return any(line.get("kind") == "end" for line in self.lines)

    @property
    def writer(self) -> tuple[object, object]:
        """Host and pid."""
        return self.lines[0].get("host"), self.lines[0].get("pid")

    def whole_steps(self) -> list[dict[str, Any]]:
        found = [line for line in self.lines if line.get("kind") == "step" and line["step"] >= 0]
        skip = 0 if "common" in self.lines[0] else LEFT_OUT
        return [line for line in found[skip:] if not line.get("partial")]

    def middles(self) -> dict[int, int]:
        """Middle of the work of each whole step, in wall-clock ns."""
        clock = self.lines[0]["clock"]
        return {line["step"]: _middle(line) + clock[1] - clock[0] for line in self.whole_steps()}


def make_common(folder: Path, keep: int | None = None, mine: Collection[tuple[object, object]] = ()) -> Numbered:
    """Rewrite the rank files of a finished recording: steps that all ranks have, numbered from 0, at most `keep`.

    mine: (host, pid) of the writers that are known to have ended. A file of another one without an end line may still
    be written to, and is left alone; when it is done, its ranks join the numbers of the others. Doing it again changes
    nothing. Raises InputError when no step is common to all ranks, OSError when a file cannot be written.
    """
    with _alone(folder):
        found = [one for one in map(_read, sorted(folder.glob("rank-*.jsonl"))) if one is not None]
        files = [one for one in found if one.over or one.writer in mine]
        middles = {one.rank: m for one in files if (m := one.middles())}
        shift = shifts(middles)
        numbers = [{step + shift[rank] for step in middles[rank]} for rank in shift]
        common = sorted(set.intersection(*numbers))[:keep] if numbers else []
        if not common:
            raise InputError(
                "no whole step was recorded that is common to all ranks",
                hint="record longer: --duration or --steps",
                where=str(folder),
            )
        for one in files:
            _rewrite(one, shift.get(one.rank, 0), common)
        silent = tuple(sorted(one.rank for one in files if one.rank not in shift))
        recording = tuple(sorted(one.rank for one in found if one not in files))
        return Numbered(tuple(sorted(shift)), silent, recording, len(common))


def shifts(middles: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """{rank: what to add to its step numbers}, so that steps whose middles are nearest get the same number.

    middles: {rank: {step: ns}}. The rank with the most steps (the lowest of these) is counted from.
    """
    if not middles:
        return {}
    reference = min(middles, key=lambda rank: (-len(middles[rank]), rank))
    theirs = middles[reference]
    out = {}
    for rank, mine in middles.items():
        nearest = (min(theirs, key=lambda step: abs(theirs[step] - at)) - own for own, at in mine.items())
        inner = _inside(mine, theirs)
        votes = Counter(shift for shift, own in zip(nearest, mine, strict=True) if own in inner or not inner)
        out[rank] = votes.most_common(1)[0][0]
    return out


def _inside(mine: Mapping[int, int], theirs: Mapping[int, int]) -> set[int]:
    """Own steps near enough to one of theirs to vote: those before its first or after its last have no partner."""
    times = sorted(theirs.values())
    period = statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0
    return {step for step, at in mine.items() if times[0] - period / 2 <= at <= times[-1] + period / 2}


def _middle(line: dict[str, Any]) -> int:
    columns = line["columns"]
    rows = [i for i, kind in enumerate(columns["kind"]) if kind in _COMPUTE] or range(len(columns["kind"]))
    start = min((columns["start_ns"][i] for i in rows), default=0)
    return int((start + max((columns["end_ns"][i] for i in rows), default=0)) // 2)


def _read(path: Path) -> _File | None:
    """None for a file without a header; a last line that was cut short is left out, as every reader does."""
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    if not lines or lines[0].get("kind") != "header":
        return None
    return _File(path, int(lines[0]["rank"]), lines)


def _rewrite(one: _File, shift: int, common: list[int]) -> None:
    """Written beside and renamed: a reader sees the old file or the new one.

    The folder may belong to the job's user while root writes here: nothing that stands there is written through.
    """
    number = {step: i for i, step in enumerate(common)}
    usable = {line["step"] for line in one.whole_steps()}
    out = []
    for line in one.lines:
        if line.get("kind") == "header":
            line = {**line, "common": {"first_recorded": common[0] - shift, "steps": len(common)}}
        elif line.get("kind") == "end":
            line = {**line, "steps": len(number)}
        elif line.get("kind") == "step":
            if line["step"] not in usable or line["step"] + shift not in number:
                continue
            line = {**line, "step": number[line["step"] + shift]}
        out.append(msgspec.json.encode(line) + b"\n")
    beside = one.path.with_suffix(".tmp")
    beside.unlink(missing_ok=True)
    with beside.open("xb") as file:
        file.write(b"".join(out))
    beside.replace(one.path)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = os.open(folder / ".numbering.lock", os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
