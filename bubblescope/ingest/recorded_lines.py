"""One file of a recording, line by line (CONTRACT.md "Recording"): decoded, and checked before it counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bubblescope.errors import InputError
from bubblescope.ingest import hostclocks, recorded_rows
from bubblescope.ingest.identity import MOST_RANKS
from bubblescope.model import Names, Notice, Spans

SCHEMA_VERSION = 1
"""The newest that this reader understands."""


class Columns(msgspec.Struct):
    kind: list[str]
    lane: list[str]
    stage: list[int]
    chunk: list[int]
    microbatch: list[int]
    start_ns: list[int]
    end_ns: list[int]
    peer: list[int]
    bytes: list[int]
    group: list[int]
    seq: list[int]
    device: list[int]
    name: list[int]
    host_start_ns: list[int] | None = None
    host_end_ns: list[int] | None = None


NO_COLUMNS = Columns([], [], [], [], [], [], [], [], [], [], [], [], [])
"""In place of lists that were packed into arrays, so that memory holds them once."""


class Header(msgspec.Struct, tag="header", tag_field="kind"):
    rank: int
    clock: tuple[int, int]
    schema_version: int = SCHEMA_VERSION
    world: int | None = None
    host: str = ""
    boot_id: str = ""
    pid: int = -1
    job: str = ""
    framework: str = ""
    versions: dict[str, str] = {}
    hooks: dict[str, Any] = {}
    options: dict[str, Any] = {}
    common: dict[str, int] | None = None
    """Written by `bubblescope attach`, once the steps of several ranks have been numbered alike."""


class Device(msgspec.Struct):
    type: str = ""
    index: int = 0
    name: str = ""


class LayoutLine(msgspec.Struct, tag="layout", tag_field="kind"):
    stages: list[int]
    num_stages: int
    microbatches: int
    pp_ranks: list[int]
    stage_ranks: list[int]
    schedule: str = ""
    schedule_class: str = ""
    device: Device = msgspec.field(default_factory=Device)

    @property
    def pipeline(self) -> tuple[object, ...]:
        """The same for steps of one pipeline, whose number of micro-batches may change."""
        return (self.stages, self.num_stages, self.pp_ranks, self.stage_ranks, self.schedule, self.schedule_class)


class StepLine(msgspec.Struct, tag="step", tag_field="kind"):
    step: int
    columns: Columns
    texts: list[str]
    warmup: bool = False
    partial: bool = False
    eval: bool = False
    marked: bool = False
    timing: str = "host"
    own_ns: int = 0
    clock: tuple[int, int] | None = None
    seen_ns: int | None = None
    hits: dict[str, int] = {}
    dropped: dict[str, int] = {}
    warnings: list[str] = []


class EndLine(msgspec.Struct, tag="end", tag_field="kind"):
    steps: int = 0
    error: str = ""
    clock: tuple[int, int] | None = None
    lost_lines: int = 0
    hits: dict[str, int] = {}
    dropped: dict[str, int] = {}
    warnings: list[str] = []


_Line = Header | LayoutLine | StepLine | EndLine | hostclocks.Reading
_decoder = msgspec.json.Decoder(_Line)


@dataclass
class File:
    """What one file said. layout: the newest; layouts: that of each step. spans: its rows, once all lines are taken
    (`rows`: until then); `names` are theirs alone. whole: numbers of its steps that had ended."""

    path: Path
    header: Header
    layout: LayoutLine | None = None
    steps: list[StepLine] = field(default_factory=list)
    layouts: list[LayoutLine | None] = field(default_factory=list)
    rows: list[recorded_rows.Rows] = field(default_factory=list)
    spans: Spans = field(default_factory=Spans.empty)
    names: Names = field(default_factory=Names)
    whole: set[int] = field(default_factory=set)
    end: EndLine | None = None
    readings: list[hostclocks.Reading] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def host_key(self) -> str:
        """Ranks with the same key share one monotonic clock."""
        return self.header.boot_id or self.header.host

    @property
    def last_step(self) -> int:
        """-1 before any."""
        return max((s.step for s in self.steps if not s.partial), default=-1)


def take(path: Path, raw: bytes, made: File | None) -> tuple[File | None, str]:
    """Add one line to the file's value; returns it, and what is wrong with the line ("" = nothing)."""
    try:
        line = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_newer(path, raw)
        return made, str(error)[:120]
    if isinstance(line, Header):
        _refuse_newer(path, raw)
        if made is not None:
            return made, "a second header"
        problem = _header_problem(line)
        if problem:
            raise InputError(
                f"its header names {problem}",
                hint="the file is damaged, or was not written by bubblescope's recorder: record this rank again",
                where=str(path),
            )
        return File(path, line), ""
    if made is None:
        return None, "no header before it"
    if isinstance(line, LayoutLine):
        problem = _layout_problem(line, made.header.world)
        if not problem:
            made.layout = line
        return made, problem
    if isinstance(line, EndLine):
        made.end = line
        return made, ""
    if isinstance(line, hostclocks.Reading):
        if not hostclocks.sane(line):
            return made, "an impossible clock reading"
        made.readings.append(line)
        return made, ""
    whole = not (line.eval or line.partial)
    if whole and line.step in made.whole:
        return made, f"step {line.step} a second time"
    problem = _range_problem(line)
    rows = problem or recorded_rows.pack(line.columns, len(line.texts))
    if isinstance(rows, str):
        return made, rows
    if made.layout is not None and rows.numbers["stage"].max(initial=-1) >= made.layout.num_stages:
        return made, f"a stage out of range of its {made.layout.num_stages}"
    if whole:
        made.whole.add(line.step)
    line.columns = NO_COLUMNS
    made.steps.append(line)
    made.layouts.append(made.layout)
    made.rows.append(rows)
    return made, ""


def _refuse_newer(path: Path, raw: bytes) -> None:
    found = re.match(rb'\{"kind":\s*"header",\s*"schema_version":\s*(\d{1,9})\b', raw)
    if found and int(found[1]) > SCHEMA_VERSION:
        raise InputError(
            f"the recording has schema_version {int(found[1])}, this bubblescope reads up to {SCHEMA_VERSION}",
            hint="upgrade bubblescope on this machine to the version that recorded it",
            where=str(path),
        )


def _header_problem(header: Header) -> str:
    if header.world is not None and not 1 <= header.world <= MOST_RANKS:
        return f"a world size of {header.world}"
    if not 0 <= header.rank < (header.world or MOST_RANKS):
        of = f" of a job of {header.world} ranks" if header.world is not None else ""
        return f"rank {header.rank}{of}"
    return "" if all(0 <= value < 2**61 for value in header.clock) else f"the clock reading {header.clock}"


def _layout_problem(line: LayoutLine, world: int | None) -> str:
    if not 1 <= line.microbatches < 2**31:
        return f"{line.microbatches} micro-batches"
    if len(line.stage_ranks) != line.num_stages or not line.pp_ranks or not line.stages:
        return "stages and ranks do not fit together"
    if not all(0 <= stage < line.num_stages for stage in line.stages):
        return f"a stage out of range of its {line.num_stages}"
    if not all(0 <= rank < (world or MOST_RANKS) for rank in (*line.pp_ranks, *line.stage_ranks)):
        return "a rank in it is out of range"
    return "" if len(set(line.pp_ranks)) == len(line.pp_ranks) else "a rank stands twice in its pipeline"


def _range_problem(line: StepLine) -> str:
    if not -1 <= line.step < 2**31:
        return f"step {line.step} is out of range"
    return "a number out of range" if abs(line.seen_ns or 0) >= recorded_rows.MAX_NS else ""
