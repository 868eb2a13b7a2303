"""Reads the recorder's JSON Lines (CONTRACT.md "Recording") into one `Run`.

A recording may still be being written, may have lost its tail to kill -9 or a full disk, may lack ranks, and may
have been damaged since: every whole line counts, and what is missing is a `Notice` that says so with numbers.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import stats
from bubblescope.errors import InputError
from bubblescope.ingest import hostclocks, recorded_rows, settled
from bubblescope.ingest.combined import split_combined
from bubblescope.ingest.identity import MOST_RANKS
from bubblescope.ingest.parallel import Executor, attempt, over_files
from bubblescope.ingest.recorded_layers import take_layers
from bubblescope.model import (
    BACKWARD_KINDS,
    Clock,
    HostClock,
    Kind,
    Lane,
    Layout,
    Links,
    Names,
    Notice,
    Run,
    Source,
    Spans,
)
from bubblescope.model.layers import LayerTime
from bubblescope.model.notice import some

Int = NDArray[np.int64]

SCHEMA_VERSION = 1
"""The newest that this reader understands."""

_FILE = re.compile(r"rank-\d+(\.\d+(-\d+)?)?\.jsonl\Z")
_HEADER = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"kind"\s*:\s*"header"')
_HOST_LANES = (int(Lane.HOST), int(Lane.RANGE))
_MAX_DRIFT = 1e-3
"""Clocks differ by parts per million; a steeper line comes from damaged rows."""


class _Columns(msgspec.Struct):
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


_NO_COLUMNS = _Columns([], [], [], [], [], [], [], [], [], [], [], [], [])
"""In place of lists that were packed into arrays, so that memory holds them once."""


class _Header(msgspec.Struct, tag="header", tag_field="kind"):
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


class _Device(msgspec.Struct):
    type: str = ""
    index: int = 0
    name: str = ""


class _Layout(msgspec.Struct, tag="layout", tag_field="kind"):
    stages: list[int]
    num_stages: int
    microbatches: int
    pp_ranks: list[int]
    stage_ranks: list[int]
    schedule: str = ""
    schedule_class: str = ""
    device: _Device = msgspec.field(default_factory=_Device)


class _Step(msgspec.Struct, tag="step", tag_field="kind"):
    step: int
    columns: _Columns
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


class _End(msgspec.Struct, tag="end", tag_field="kind"):
    steps: int = 0
    error: str = ""
    clock: tuple[int, int] | None = None
    lost_lines: int = 0
    hits: dict[str, int] = {}
    dropped: dict[str, int] = {}
    warnings: list[str] = []


_Line = _Header | _Layout | _Step | _End | hostclocks.Reading
_decoder = msgspec.json.Decoder(_Line)


@dataclass
class _File:
    """What one file said. spans: its rows, once all lines are taken (`rows`: until then); `names` are theirs alone."""

    path: Path
    header: _Header
    layout: _Layout | None = None
    steps: list[_Step] = field(default_factory=list)
    rows: list[recorded_rows.Rows] = field(default_factory=list)
    spans: Spans = field(default_factory=Spans.empty)
    names: Names = field(default_factory=Names)
    end: _End | None = None
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
        return max((s.step for s in self.steps if not s.partial), default=-1)


_Parsed = tuple[_File | None, list[Notice]]
"""What one file gives: nothing without a header; and what is wrong with it."""

# ---- public


def can_read(path: str | Path) -> bool:
    """Whether `path` is a recording: a rank file, or a folder with such files in it. Never raises.

    A file of another name counts when its first line is our header.
    """
    try:
        path = Path(path)
        if path.is_dir():
            return any(_FILE.match(entry.name) for entry in path.iterdir())
        if not path.is_file():
            return False
        if _FILE.match(path.name):
            return True
        start = _start(path)
        return _HEADER.match(start) is not None and b'"schema_version"' in start
    except OSError:
        return False


def has_header(path: str | Path) -> bool:
    """Whether `path` is a rank file that begins with a header, or a folder with such a file in it. Never raises."""
    try:
        return any(_HEADER.match(_start(file)) for file in _rank_files([path]))
    except (OSError, InputError):
        return False


def _start(path: Path) -> bytes:
    if path.is_fifo():
        return b""
    with path.open("rb") as file:
        return file.read(200)


def read(paths: str | Path | Sequence[str | Path], executor: Executor | None = None) -> Run:
    """One `Run` of all rank files among `paths` (files, or folders that hold them). A file that cannot be used becomes
    a Notice as long as another one can.

    Times are nanoseconds since the earliest row; ``source.details["origin_ns"]`` is that instant in Unix time.
    Evaluation rows have step -1. Steps that had not ended are left out, and named.
    Raises InputError when there is no readable recording there.
    """
    found = _rank_files([paths] if isinstance(paths, str | Path) else paths)
    if not found:
        raise _nothing("there is no recording here", _text(paths))
    return _assemble(over_files(_read_file, [str(path) for path in found], executor), found)


def parse(contents: Mapping[Path, bytes]) -> Run:
    """Like `read`, of lines that the caller holds already, one text for each file (a header first): for who follows
    a recording and keeps only its newest steps."""
    results = [(str(path), attempt(functools.partial(_parse, data=data), str(path))) for path, data in contents.items()]
    return _assemble(results, list(contents))


def is_rank_file(path: Path) -> bool:
    """Whether the recorder gives its files such a name."""
    return bool(_FILE.match(path.name))


def _assemble(results: Iterable[tuple[str, _Parsed | InputError]], found: list[Path]) -> Run:
    files: list[_File] = []
    notices: list[Notice] = []
    errors: list[InputError] = []
    for path, result in results:
        if isinstance(result, InputError):
            errors.append(result)
            notices.append(Notice("file-unreadable", f"{result.what}; this rank is left out", path))
            continue
        made, said = result
        notices.extend(said)
        if made is not None:
            files.append(made)
    if not files and errors:
        raise errors[0]
    if not files:
        where = ", ".join(str(p) for p in found[:3])
        raise _nothing("no line of a bubblescope recording can be read", where)
    chosen = _one_per_rank(_one_job(files, notices), notices)
    _agree_on_pipelines(chosen, notices)
    return _build(chosen, notices, found)


def _nothing(what: str, where: str) -> InputError:
    return InputError(
        what, hint="give the folder that bubblescope.record wrote (it holds rank-00000.jsonl …)", where=where
    )


def _text(paths: str | Path | Sequence[str | Path]) -> str:
    return str(paths) if isinstance(paths, str | Path) else ", ".join(str(p) for p in paths)


# ---- files


def _rank_files(paths: Iterable[str | Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if is_rank_file(p))
            found.update(dict.fromkeys(inside))
        elif path.is_file():
            found[path] = None
        else:
            raise InputError("there is no such file or folder", hint="check the path", where=str(path))
    return list(found)


def _read_file(path: str) -> _Parsed:
    if Path(path).is_fifo():  # who reads one waits for whoever writes to it
        raise InputError("it is a pipe, not a file", hint="save what comes out of it as a file", where=path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"the file cannot be read ({error.strerror or error})", hint="check the permissions", where=path
        ) from error
    return _parse(path, data)


def _parse(where: str, data: bytes) -> _Parsed:
    """All whole lines of one file, and what is wrong with it; no file when there is not even a header. Raises
    InputError when the header is one of a newer version, or impossible."""
    path = Path(where)
    made: _File | None = None
    notices: list[Notice] = []
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    tail = lines.pop()
    skipped: list[str] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        made, problem = _take(path, raw, made)
        if problem:
            skipped.append(f"line {number} ({problem})")
    if tail.strip():
        # Without its newline a line may be cut, or being written just now; taken when it is whole all the same.
        made, problem = _take(path, tail, made)
        if problem:
            notices.append(_tail_notice(path, made, len(tail)))
    if skipped:
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        message = f"{len(skipped)} of {len(lines)} lines cannot be read and are left out: {', '.join(skipped[:3])}"
        notices.append(Notice("line-skipped", message + more, where))
    if made is None:
        notices.append(Notice("file-empty", "holds no header, so nothing is known of its rank", where))
    else:
        made.spans, made.rows = _spans_of(made), []
    return made, notices


def _tail_notice(path: Path, made: _File | None, size: int) -> Notice:
    who = f"rank {made.rank}" if made is not None else path.name
    last = f"after step {made.steps[-1].step}" if made is not None and made.steps else "before any step"
    message = f"{who}: the file ends in {size} bytes of an unfinished line {last}; that line is lost"
    return Notice("tail-cut", message, str(path))


def _take(path: Path, raw: bytes, made: _File | None) -> tuple[_File | None, str]:
    """Add one line to the file's value; returns it, and what is wrong with the line ("" = nothing)."""
    try:
        line = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_newer(path, raw)
        return made, str(error)[:120]
    if isinstance(line, _Header):
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
        return _File(path, line), ""
    if made is None:
        return None, "no header before it"
    if isinstance(line, _Layout):
        problem = _layout_problem(line, made.header.world)
        if not problem:
            made.layout = line
        return made, problem
    if isinstance(line, _End):
        made.end = line
        return made, ""
    if isinstance(line, hostclocks.Reading):
        if not hostclocks.sane(line):
            return made, "an impossible clock reading"
        made.readings.append(line)
        return made, ""
    problem = _range_problem(line)
    rows = problem or recorded_rows.pack(line.columns, len(line.texts))
    if isinstance(rows, str):
        return made, rows
    if made.layout is not None and rows.numbers["stage"].max(initial=-1) >= made.layout.num_stages:
        return made, f"a stage out of range of its {made.layout.num_stages}"
    line.columns = _NO_COLUMNS
    made.steps.append(line)
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


def _header_problem(header: _Header) -> str:
    if header.world is not None and not 1 <= header.world <= MOST_RANKS:
        return f"a world size of {header.world}"
    if not 0 <= header.rank < (header.world or MOST_RANKS):
        of = f" of a job of {header.world} ranks" if header.world is not None else ""
        return f"rank {header.rank}{of}"
    return "" if all(0 <= value < 2**61 for value in header.clock) else f"the clock reading {header.clock}"


def _layout_problem(line: _Layout, world: int | None) -> str:
    if not 1 <= line.microbatches < 2**31:
        return f"{line.microbatches} micro-batches"
    if len(line.stage_ranks) != line.num_stages or not line.pp_ranks or not line.stages:
        return "stages and ranks do not fit together"
    if not all(0 <= stage < line.num_stages for stage in line.stages):
        return f"a stage out of range of its {line.num_stages}"
    if not all(0 <= rank < (world or MOST_RANKS) for rank in (*line.pp_ranks, *line.stage_ranks)):
        return "a rank in it is out of range"
    return "" if len(set(line.pp_ranks)) == len(line.pp_ranks) else "a rank stands twice in its pipeline"


def _range_problem(line: _Step) -> str:
    if not -1 <= line.step < 2**31:
        return f"step {line.step} is out of range"
    return "a number out of range" if abs(line.seen_ns or 0) >= recorded_rows.MAX_NS else ""


# ---- which files belong to the run


def _one_job(files: list[_File], notices: list[Notice]) -> list[_File]:
    """The job with most ranks, of equal ones the newest, when a folder holds several (a restart, a second run into
    the same folder, a file that strayed in). Plain torchrun gives every run of a machine the same identity: then runs
    are told apart by their size."""
    jobs: dict[tuple[str, int | None], list[_File]] = defaultdict(list)
    for file in files:
        jobs[file.header.job, file.header.world].append(file)
    if len(jobs) < 2:
        return files
    newest = max(jobs.values(), key=_began)
    chosen = max(jobs.values(), key=lambda group: (len({f.rank for f in group}), _began(group)))
    left = sorted(f.path.name for group in jobs.values() if group is not chosen for f in group)
    which = "the newest" if chosen is newest else f"the one with most ranks ({len({f.rank for f in chosen})})"
    message = f"{len(jobs)} jobs recorded here; only {which} is read, {len(left)} files are left out: "
    notices.append(Notice("several-jobs", message + ", ".join(left[:4]), str(files[0].path.parent)))
    return chosen


def _began(group: list[_File]) -> int:
    return max(file.header.clock[1] for file in group)


def _one_per_rank(files: list[_File], notices: list[Notice]) -> list[_File]:
    ranks: dict[int, list[_File]] = defaultdict(list)
    for file in files:
        ranks[file.rank].append(file)
    chosen = []
    for rank, group in sorted(ranks.items()):
        group.sort(key=lambda f: (f.header.clock[1], f.path.name))
        chosen.append(group[-1])
        if len(group) > 1:
            left = ", ".join(f.path.name for f in group[:-1])
            message = f"rank {rank} wrote {len(group)} files; the newest is read, left out: {left}"
            notices.append(Notice("rank-duplicate", message, str(group[-1].path)))
    return chosen


def _agree_on_pipelines(files: list[_File], notices: list[Notice]) -> None:
    """A rank is in one pipeline: where layouts contradict each other, the one that most of its ranks state holds for
    all of them, and for a rank that none of the others has in its pipeline its own is left out."""
    stated: dict[tuple[int, ...], list[_File]] = defaultdict(list)
    for file in files:
        if file.layout is not None:
            stated[tuple(file.layout.pp_ranks)].append(file)
    placed: dict[int, _Layout | None] = {}
    for pipeline, members in sorted(stated.items(), key=lambda item: (-len(item[1]), item[0])):
        if not placed.keys() & set(pipeline):
            placed |= dict.fromkeys(pipeline, members[0].layout)
    for pipeline, members in stated.items():
        for file in members:
            settled_as = placed.get(file.rank)
            if settled_as is not None and tuple(settled_as.pp_ranks) == pipeline:
                continue
            file.layout = settled_as
            said = some(pipeline, count_rest=True)
            message = f"rank {file.rank}: its layout, a pipeline of ranks {said}, contradicts other ranks'"
            how = "; theirs is used" if settled_as is not None else "; it is not used"
            notices.append(Notice("layout-contradicts", message + how, str(file.path)))


# ---- building the run


def _build(files: list[_File], notices: list[Notice], found: list[Path]) -> Run:
    names = Names()
    for file in files:
        notices.extend(_file_notices(file))
    notices.extend(_rank_notices(files))
    parts = [_renamed(file, names) for file in files]
    clock, moves = _clock(files)
    parts = [move(part) for part, move in zip(parts, moves, strict=True)]
    spans = Spans.concat(parts).sorted()
    if all(file.layout is None for file in files):
        spans, said = settled.from_zero(spans, files[0].header.world)
        notices.extend(said)
    spans, layers = take_layers(settled.find_peers(spans), names)
    origin = int(spans.start_ns.min()) if len(spans) else 0
    spans = _shift(spans, -origin)
    layout = _layout(files, names, spans)
    missing = layout.missing_ranks
    if missing:
        message = f"{len(missing)} of {layout.world_size} ranks have no file: {some(missing, count_rest=True)}"
        notices.append(Notice("rank-missing", message, str(found[0].parent)))
    return Run(
        spans=spans,
        names=names,
        layout=layout,
        links=_links(spans),
        clock=clock,
        notices=tuple(notices),
        source=_source(files, origin, layers),
    )


def _source(files: list[_File], origin: int, layers: list[LayerTime]) -> Source:
    steps = [step for file in files for step in file.steps]
    warmup = sorted({step.step for step in steps if step.warmup and not step.eval})
    hits: Counter[str] = Counter()
    for step in steps:
        hits.update(step.hits)
    own = [step.own_ns for step in steps if not step.warmup]
    header = files[0].header
    return Source(
        format="recording",
        files=tuple(str(file.path) for file in files),
        timing="events" if any(step.timing == "events" for step in steps) else "host",
        details={
            "origin_ns": origin,
            "warmup_steps": warmup,
            "steps_marked": any(step.marked for step in steps),
            "evaluations": sum(step.eval for step in steps),
            "hook_hits": dict(sorted(hits.items())),
            "own_ns_per_step": int(np.median(own)) if own else None,
            "versions": header.versions,
            "options": header.options,
            "complete": all(file.end is not None for file in files),
            "layer_times": layers,
        },
    )


def _file_notices(file: _File) -> list[Notice]:
    where = str(file.path)
    made = []
    lines: list[_Step | _End] = [*file.steps, *([file.end] if file.end else [])]
    dropped: Counter[str] = Counter()
    for line in lines:
        dropped.update(line.dropped)
    for text in dict.fromkeys(text for line in lines for text in line.warnings):
        made.append(Notice("recorder-warning", f"rank {file.rank}: {text}", where))
    for reason, count in sorted(dropped.items()):
        made.append(Notice("rows-dropped", f"rank {file.rank}: the recorder lost {count} rows ({reason})", where))
    if file.end is not None and file.end.lost_lines:
        message = f"rank {file.rank}: {file.end.lost_lines} lines could not be written"
        made.append(Notice("lines-lost", message, where))
    partial = [step.step for step in file.steps if step.partial and not step.eval]
    if partial:
        ending = f" ({file.end.error})" if file.end is not None and file.end.error else ""
        which = some(partial, count_rest=True)
        message = f"rank {file.rank}: step {which} had not ended when recording stopped{ending}; left out"
        made.append(Notice("step-partial", message, where))
    for label, why in sorted(_refused(file).items()):
        made.append(Notice("hook-refused", f"rank {file.rank}: {label} is not recorded: {why}", where))
    return [*made, *file.notices]


def _refused(file: _File) -> dict[str, str]:
    refused = file.header.hooks.get("refused", {})
    return {str(k): str(v) for k, v in refused.items()} if isinstance(refused, dict) else {}


def _rank_notices(files: list[_File]) -> list[Notice]:
    """Ranks that stopped before the others: killed, crashed, or their file was cut."""
    most = max(file.last_step for file in files)
    ended = [file for file in files if file.end is not None]
    made = []
    for file in files:
        behind = file.last_step < most
        if not behind and (file.end is not None or not ended):
            continue
        how = "without an end line (killed?)" if file.end is None else f"({file.end.error or 'stopped'})"
        message = f"rank {file.rank} ends {how} after step {file.last_step}; the longest rank has step {most}"
        made.append(Notice("rank-ended-early", message, str(file.path)))
    if not ended:
        message = "no rank wrote an end line: the job is still running, or was killed as a whole"
        made.append(Notice("recording-open", message, str(files[0].path.parent)))
    return made


def _renamed(file: _File, names: Names) -> Spans:
    to = file.names.mapping_to(names)
    return file.spans.with_columns(name=to[file.spans.name], group=to[file.spans.group])


def _spans_of(file: _File) -> Spans:
    parts = []
    bad = combined = 0
    for step, rows in zip(file.steps, file.rows, strict=True):
        if step.partial:
            continue
        part, split = split_combined(_spans_of_step(file, step, rows), file.names)
        part = settled.evaluation(part, file.names) if step.eval else part
        combined += split
        good = part.end_ns >= part.start_ns
        bad += int((~good).sum())
        parts.append(part if good.all() else part.take(good))
    if bad:
        message = f"rank {file.rank}: {bad} rows that end before they start are left out"
        file.notices.append(Notice("rows-dropped", message, str(file.path)))
    if combined:
        message = (
            f"rank {file.rank}: {combined} calls ran a forward and a backward mixed; how they share the time is "
            "assumed, 1 to 2, or 1 to 1 where the weight gradients were measured apart"
        )
        file.notices.append(Notice("combined-split", message, str(file.path)))
    spans = settled.join_evaluations(Spans.concat(parts), file.names)
    return _on_host_clock(file, spans) if any(step.timing == "events" for step in file.steps) else spans


def _spans_of_step(file: _File, step: _Step, rows: recorded_rows.Rows) -> Spans:
    texts = np.array([file.names.intern(text) for text in step.texts] or [0], dtype=np.int64)
    return Spans.from_columns(
        len(rows),
        rank=file.rank,
        step=-1 if step.eval else step.step,
        kind=rows.kind,
        lane=rows.lane,
        name=texts[rows.name],
        group=texts[rows.group],
        **rows.numbers,
    )


def _shift(spans: Spans, by_ns: int) -> Spans:
    if not by_ns or not len(spans):
        return spans
    return spans.with_columns(start_ns=spans.start_ns + by_ns, end_ns=spans.end_ns + by_ns)


# ---- clocks


def _on_host_clock(file: _File, spans: Spans) -> Spans:
    """Put device times on the host's clock.

    Each event ran no earlier than the host recorded it; the largest (host - device) of a stretch is thus close
    to the true offset whenever the device had run out of work in it. A line through those of up to 16 stretches
    gives offset and drift.
    """
    centres, bounds = [], []
    for step, rows in zip(file.steps, file.rows, strict=True):
        if step.partial or not len(rows.host_start_ns):
            continue
        host, device = rows.host_start_ns, rows.numbers["start_ns"]
        on_device = (host >= 0) & ~np.isin(rows.lane, _HOST_LANES)
        if on_device.any():
            centres.append(int(device[on_device].mean()))
            bounds.append(int((host - device)[on_device].max()))
    if not bounds:
        return spans
    centre, offset, drift = envelope(np.array(centres), np.array(bounds))
    device_rows = ~np.isin(spans.lane, _HOST_LANES)

    def moved(times: Int) -> Int:
        shift = offset + np.rint((times - centre) * drift).astype(np.int64)
        return np.where(device_rows, times + shift, times)

    return spans.with_columns(start_ns=moved(spans.start_ns), end_ns=moved(spans.end_ns))


def envelope(times: Int, bounds: Int) -> tuple[int, int, float]:
    """(centre, offset, drift) of the line above lower bounds `bounds` at `times`: offset at centre, drift per ns.

    With fewer than 8 points the drift is 0.

    >>> envelope(np.array([0, 10]), np.array([3, 5]))
    (5, 5, 0.0)
    """
    centre = int(times.mean())
    if len(times) < 8:
        return centre, int(bounds.max()), 0.0
    blocks = np.array_split(np.argsort(times, kind="stable"), min(16, len(times) // 2))
    tops = np.array([block[np.argmax(bounds[block])] for block in blocks])
    drift = float(np.polyfit((times[tops] - centre).astype(float), bounds[tops].astype(float), 1)[0])
    if not abs(drift) <= _MAX_DRIFT:
        drift = 0.0
    residual = bounds[tops] - np.rint((times[tops] - centre) * drift).astype(np.int64)
    return centre, int(np.median(residual)), drift


def _clock(files: list[_File]) -> tuple[Clock, list[_Move]]:
    """What to add to each file's times. Ranks of one host share a clock, and must not be moved against each other."""
    anchors: dict[str, tuple[int, str]] = {}
    readings: dict[str, list[hostclocks.Reading]] = {}
    for file in files:
        perf, wall = file.header.clock
        anchors.setdefault(file.host_key, (wall - perf, file.header.host))
        readings.setdefault(file.host_key, []).extend(file.readings)
    related = hostclocks.relations(readings) if len(anchors) > 1 else None
    if related is not None and related[0] in anchors:
        return _related(files, anchors, *related)
    one = len(anchors) == 1
    hosts = tuple(
        HostClock(host, 0 if one else offset, 0.0, 0 if one else None, 0 if one else None)
        for offset, host in anchors.values()
    )
    how = "all ranks share one host's clock" if one else "each host's own wall clock; nothing bounds their offsets"
    return Clock(hosts, one, how), [_Move(hostclocks.Relation(), anchors[file.host_key][0]) for file in files]


def _related(
    files: list[_File],
    anchors: dict[str, tuple[int, str]],
    reference: str,
    relations: dict[str, hostclocks.Relation],
) -> tuple[Clock, list[_Move]]:
    """All hosts on the clock of rank 0's, by the readings that the job took."""
    base = anchors[reference][0]
    hosts = []
    for key, (own, host) in anchors.items():
        found = relations[key]
        # Against this host's own wall clock, so that the figure means something to people.
        offset = found.offset_ns + base - own
        hosts.append(HostClock(host, offset, found.drift, offset - found.half_ns, offset + found.half_ns))
    how = "rank 0's clock, read over the job's store at the start and the end"
    return Clock(tuple(hosts), True, how), [_Move(relations[file.host_key], base) for file in files]


@dataclass(frozen=True)
class _Move:
    """From a rank's monotonic time to Unix time on the reference host's clock."""

    relation: hostclocks.Relation
    base_ns: int

    def __call__(self, spans: Spans) -> Spans:
        start, end = spans.start_ns, spans.end_ns
        return spans.with_columns(
            start_ns=start + self.relation.at(start) + self.base_ns,
            end_ns=end + self.relation.at(end) + self.base_ns,
        )


# ---- layout


def _layout(files: list[_File], names: Names, spans: Spans) -> Layout:
    known = [(file, file.layout) for file in files if file.layout is not None]
    inferred = {"microbatches": "micro-batches seen in most steps"}
    shape = None if known else settled.shape_of(spans)
    if shape is not None:
        of_stage, ranks = shape
        layout = _Layout(list(range(len(of_stage))), len(of_stage), _microbatches(spans) or 0, ranks, of_stage)
        known = [(file, layout) for file in files if file.rank in ranks]
        inferred["stages"] = "which rank ran which stage"
    pipelines = sorted({tuple(layout.pp_ranks) for _, layout in known})
    by_rank = {file.rank: layout for file, layout in known}
    worlds = [file.header.world for file in files if file.header.world is not None]
    first = known[0][1] if known else None
    if len(pipelines) > 1:
        inferred["data_parallel"] = "number of distinct pipeline groups (tensor-parallel peers count as replicas)"
    return Layout(
        ranks=np.array([file.rank for file in files], dtype=np.int64),
        pp=_per_rank(files, by_rank, lambda layout, rank: _index(layout.pp_ranks, rank)),
        replica=_per_rank(files, by_rank, lambda layout, rank: pipelines.index(tuple(layout.pp_ranks))),
        tp=np.full(len(files), -1, dtype=np.int64),
        host=np.array([names.intern(file.header.host) for file in files], dtype=np.int64),
        world_size=max(worlds) if worlds else None,
        stages=len(first.pp_ranks) if first else None,
        chunks=max(1, first.num_stages // len(first.pp_ranks)) if first else None,
        microbatches=_microbatches(spans) or (first.microbatches if first else None),
        data_parallel=len(pipelines) or None,
        schedule=first.schedule or None if first else None,
        framework=files[0].header.framework or None,
        device_type=first.device.type or None if first else None,
        stage_rank={
            (pipelines.index(tuple(layout.pp_ranks)), stage): rank
            for _, layout in known
            for stage, rank in enumerate(layout.stage_ranks)
        },
        inferred=inferred,
    )


def _per_rank(files: list[_File], layouts: dict[int, _Layout], value: Any) -> Int:
    return np.array([value(layouts[f.rank], f.rank) if f.rank in layouts else -1 for f in files], dtype=np.int64)


def _index(ranks: list[int], rank: int) -> int:
    return ranks.index(rank) if rank in ranks else -1


def _microbatches(spans: Spans) -> int | None:
    """Distinct micro-batches of most steps (gradient accumulation counts on)."""
    rows = spans.where(kind=[Kind.FORWARD, *BACKWARD_KINDS]) & (spans.step >= 0) & (spans.microbatch >= 0)
    if not rows.any():
        return None
    ranks = int(spans.rank.max()) + 1
    of_rank = spans.step[rows].astype(np.int64) * ranks + spans.rank[rows]
    found, counts = stats.count_distinct(of_rank, spans.microbatch[rows].astype(np.int64))
    first = np.unique(found // ranks, return_index=True)[1]
    return stats.usual(np.maximum.reduceat(counts, first))


# ---- links


def _links(spans: Spans) -> Links:
    p2p, waits = _messages(spans)
    return Links(p2p=p2p, p2p_wait=waits, collective=_collectives(spans))


def _messages(spans: Spans) -> tuple[Int, Int]:
    """Pairs (send, receive) of POST rows, and the WAIT rows of the same messages.

    A message is known by step, source, destination and `seq`, in which both ends write direction, consuming stage,
    micro-batch and tensor; the k-th of equal ones (evaluation has step -1 throughout) pairs with the k-th.
    """
    messages = spans.where(kind=(Kind.SEND, Kind.RECV)) & (spans.seq >= 0)
    send = spans.kind == Kind.SEND
    source = np.where(send, spans.rank, spans.peer)
    target = np.where(send, spans.peer, spans.rank)
    ends = {
        (lane, kind): np.flatnonzero(messages & (spans.lane == lane) & (spans.kind == kind))
        for lane in (Lane.POST, Lane.WAIT)
        for kind in (Kind.SEND, Kind.RECV)
    }
    rows = np.concatenate(list(ends.values()))
    key = _ids([spans.step[rows], source[rows], target[rows], spans.seq[rows]])
    part = np.repeat(np.arange(len(ends)), [len(r) for r in ends.values()])
    key = _ids([key, _occurrence(_ids([key, part]))])
    keys = {end: key[part == i] for i, end in enumerate(ends)}
    post_send, post_recv = (Lane.POST, Kind.SEND), (Lane.POST, Kind.RECV)
    both, at_send, at_recv = np.intersect1d(keys[post_send], keys[post_recv], assume_unique=True, return_indices=True)
    pairs = np.column_stack([ends[post_send][at_send], ends[post_recv][at_recv]]).astype(np.int64)
    waits = np.column_stack(
        [_lookup(both, keys[(Lane.WAIT, kind)], ends[(Lane.WAIT, kind)]) for kind in (Kind.SEND, Kind.RECV)]
    ).astype(np.int64)
    return pairs, waits


def _collectives(spans: Spans) -> Int:
    """(instance, row): the k-th collective of a group within a step is one operation in all its ranks."""
    rows = np.flatnonzero(spans.where(kind=Kind.COLLECTIVE) & (spans.seq >= 0))
    if not len(rows):
        return np.empty((0, 2), dtype=np.int64)
    own = _ids([spans.step[rows], spans.group[rows], spans.rank[rows]])
    instance = _ids([spans.step[rows], spans.group[rows], _occurrence(own)])
    return np.column_stack([instance, rows]).astype(np.int64)


def _ids(columns: Sequence[NDArray[Any]]) -> Int:
    """One number for each distinct combination, the same for equal ones."""
    made = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        made = np.unique(made * max(len(values), 1) + at.reshape(-1), return_inverse=True)[1].reshape(-1)
    return made


def _occurrence(keys: Int) -> Int:
    """0 for the first of equal keys, 1 for the second, …

    >>> _occurrence(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.empty(0, np.int64)
    counted = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    made = np.empty(len(keys), dtype=np.int64)
    made[order] = counted
    return made


def _lookup(wanted: Int, keys: Int, rows: Int) -> Int:
    """rows[i] where keys[i] == wanted, else -1. Keys are distinct."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    hit = keys[order][at] == wanted
    return np.where(hit, rows[order][at], -1)
