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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import stats
from bubblescope.errors import InputError
from bubblescope.ingest import recorded_rows, settled
from bubblescope.ingest.combined import split_combined
from bubblescope.ingest.options import DEFAULT, ReadOptions, beyond_limit
from bubblescope.ingest.parallel import Executor, attempt, over_files
from bubblescope.ingest.recorded_clocks import clock as clock_of
from bubblescope.ingest.recorded_clocks import on_host_clock
from bubblescope.ingest.recorded_layers import take_layers
from bubblescope.ingest.recorded_lines import EndLine, File, LayoutLine, StepLine, take
from bubblescope.ingest.recorded_links import links
from bubblescope.model import (
    BACKWARD_KINDS,
    Kind,
    Layout,
    Names,
    Notice,
    Run,
    Source,
    Spans,
)
from bubblescope.model.layers import LayerTime
from bubblescope.model.notice import counted, some

Int = NDArray[np.int64]

_FILE = re.compile(r"rank-\d+(\.\d+(-\d+)?)?\.jsonl\Z")
_HEADER = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"kind"\s*:\s*"header"')

_Parsed = tuple[File | None, list[Notice]]
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


def is_job_file(path: str | Path) -> bool:
    """Whether it is the recorder's job.json, which describes a job and holds none of its steps. Never raises."""
    try:
        return re.match(rb'\{"schema_version":\s*\d+,\s*"world":', _start(Path(path))) is not None
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


def read(
    paths: str | Path | Sequence[str | Path], executor: Executor | None = None, options: ReadOptions = DEFAULT
) -> Run:
    """One `Run` of all rank files among `paths` (files, or folders that hold them). A file that cannot be used becomes
    a Notice as long as another one can.

    Times are nanoseconds since the earliest row; ``source.details["origin_ns"]`` is that instant in Unix time.
    Evaluation rows have step -1. Steps that had not ended are left out, and named.
    Raises InputError when there is no readable recording there.
    """
    found = _rank_files([paths] if isinstance(paths, str | Path) else paths)
    if not found:
        raise _nothing("there is no recording here", _text(paths))
    read_file = functools.partial(_read_file, options=options)
    return _assemble(over_files(read_file, [str(path) for path in found], executor), found)


def parse(contents: Mapping[Path, bytes]) -> Run:
    """Like `read`, of lines that the caller holds already, one text for each file (a header first): for who follows
    a recording and keeps only its newest steps."""
    results = [(str(path), attempt(functools.partial(_parse, data=data), str(path))) for path, data in contents.items()]
    return _assemble(results, list(contents))


def is_rank_file(path: Path) -> bool:
    """Whether the recorder gives its files such a name."""
    return bool(_FILE.match(path.name))


def _assemble(results: Iterable[tuple[str, _Parsed | InputError]], found: list[Path]) -> Run:
    files: list[File] = []
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
    chosen = _numbered_alike(_one_per_rank(_one_job(files, notices), notices), notices)
    _newest_pipeline(chosen, notices)
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


def _read_file(path: str, options: ReadOptions) -> _Parsed:
    if Path(path).is_fifo():  # who reads one waits for whoever writes to it
        raise InputError("it is a pipe, not a file", hint="save what comes out of it as a file", where=path)
    try:
        if Path(path).stat().st_size > options.max_bytes:
            raise beyond_limit(f"the file is larger than {options.max_bytes:,} bytes", "bytes", path)
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"the file cannot be read ({error.strerror or error})", hint="check the permissions", where=path
        ) from error
    return _parse(path, data, options.max_events)


def _parse(where: str, data: bytes, max_events: int = DEFAULT.max_events) -> _Parsed:
    """All whole lines of one file, and what is wrong with it; no file when there is not even a header. Raises
    InputError when the header is one of a newer version, or impossible, and for more rows than `max_events`."""
    path = Path(where)
    made: File | None = None
    notices: list[Notice] = []
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    tail = lines.pop()
    skipped: list[str] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        made, problem = take(path, raw, made)
        if problem:
            skipped.append(f"line {number} ({problem})")
    if tail.strip():
        # Without its newline a line may be cut, or being written just now; taken when it is whole all the same.
        made, problem = take(path, tail, made)
        if problem:
            notices.append(_tail_notice(path, made, len(tail)))
    if skipped:
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        message = f"{len(skipped)} of {len(lines)} lines cannot be read and are left out: {', '.join(skipped[:3])}"
        notices.append(Notice("line-skipped", message + more, where))
    if made is None:
        notices.append(Notice("file-empty", "holds no header, so nothing is known of its rank", where))
    else:
        if sum(map(len, made.rows)) > max_events:
            raise beyond_limit(f"more than {max_events:,} events", "events", where)
        made.spans, made.rows = _spans_of(made), []
    return made, notices


def _tail_notice(path: Path, made: File | None, size: int) -> Notice:
    who = f"rank {made.rank}" if made is not None else path.name
    last = f"after step {made.steps[-1].step}" if made is not None and made.steps else "before any step"
    message = f"{who}: the file ends in {size} bytes of an unfinished line {last}; that line is lost"
    return Notice("tail-cut", message, str(path))


# ---- which files belong to the run


def _one_job(files: list[File], notices: list[Notice]) -> list[File]:
    """The job with most ranks, of equal ones the newest, when a folder holds several (a restart, a second run into
    the same folder, a file that strayed in). Plain torchrun gives every run of a machine the same identity: then runs
    are told apart by their size."""
    jobs: dict[tuple[str, int | None], list[File]] = defaultdict(list)
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


def _began(group: list[File]) -> int:
    return max(file.header.clock[1] for file in group)


def _one_per_rank(files: list[File], notices: list[Notice]) -> list[File]:
    ranks: dict[int, list[File]] = defaultdict(list)
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


def _numbered_alike(files: list[File], notices: list[Notice]) -> list[File]:
    """Ranks that were attached to begin at different steps; once they are numbered alike the headers say so."""
    chosen = [file for file in files if file.header.common is not None] or files
    for file in files:
        if file not in chosen:
            message = (
                f"rank {file.rank} is left out: the attach that records it has not ended (it goes on, or was killed), "
                "so its steps do not have the numbers of the others'"
            )
            notices.append(Notice("steps-differ", message, str(file.path)))
    return chosen


def _newest_pipeline(files: list[File], notices: list[Notice]) -> None:
    """A job may train one pipeline after another, or several in turn: of each rank the last one counts, and its
    layout. The steps in which any rank ran another one are left out."""
    left: dict[int, str] = {}
    for file in files:
        if {id(of) for of in file.layouts} != {id(file.layout)}:
            left |= _other_pipelines(file)
    if not left:
        return
    others = " and ".join(sorted(set(left.values())))
    for file in files:
        file.spans = file.spans.take(~np.isin(file.spans.step, list(left)))
    there = [file for file in files if file.spans.step.max(initial=-1) >= 0]
    if not there:
        raise InputError(
            f"the job ran several pipelines ({others}), and in no step all ranks their newest one",
            hint="record one of them alone: begin as its first step does",
        )
    kept = {file.rank: file.layout for file in there if file.layout is not None}
    for file in files:
        if file not in there:  # its last steps were of another one
            file.layout = next((of for of in kept.values() if file.rank in of.pp_ranks), None)
    names = " and ".join(sorted({_in_words(of) for of in kept.values()}))
    message = (
        f"the job ran several pipelines; the newest is analysed, {names}. Left out: {counted(len(left), 'step')} of "
        f"{others} ({some(sorted(left), count_rest=True)})"
    )
    notices.append(Notice("several-pipelines", message, str(files[0].path.parent)))


def _other_pipelines(file: File) -> dict[int, str]:
    """{step: its pipeline in words} of those that ran another one than the newest, whose layout becomes the file's. One
    that has only begun, with warm-up steps, is not the newest yet."""
    whole = [(s, of) for s, of in zip(file.steps, file.layouts, strict=True) if not (s.partial or s.eval)]
    if not whole:
        return {}
    _, newest = next((one for one in reversed(whole) if not one[0].warmup), whole[-1])
    if newest is None:
        return {}
    file.layout = newest
    return {
        s.step: _in_words(of) for s, of in whole if of is not newest and (of is None or of.pipeline != newest.pipeline)
    }


def _in_words(layout: LayoutLine | None) -> str:
    if layout is None:
        return "one that no line describes"
    return f"{layout.schedule or 'one'} with {counted(layout.num_stages, 'stage')}"


def _agree_on_pipelines(files: list[File], notices: list[Notice]) -> None:
    """A rank is in one pipeline: where layouts contradict each other, the one that most of its ranks state holds for
    all of them, and for a rank that none of the others has in its pipeline its own is left out."""
    stated: dict[tuple[int, ...], list[File]] = defaultdict(list)
    for file in files:
        if file.layout is not None:
            stated[tuple(file.layout.pp_ranks)].append(file)
    placed: dict[int, LayoutLine | None] = {}
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


def _build(files: list[File], notices: list[Notice], found: list[Path]) -> Run:
    names = Names()
    for file in files:
        notices.extend(_file_notices(file))
    notices.extend(_rank_notices(files))
    parts = [_renamed(file, names) for file in files]
    clock, moves = clock_of(files)
    parts = [move(part) for part, move in zip(parts, moves, strict=True)]
    spans = Spans.concat(parts).sorted()
    if all(file.layout is None for file in files):
        for mend in (settled.ended, functools.partial(settled.from_zero, world=files[0].header.world)):
            spans, said = mend(spans)
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
        links=links(spans),
        clock=clock,
        notices=tuple(notices),
        source=_source(files, origin, layers),
    )


def _source(files: list[File], origin: int, layers: list[LayerTime]) -> Source:
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


def _file_notices(file: File) -> list[Notice]:
    where = str(file.path)
    made = []
    lines: list[StepLine | EndLine] = [*file.steps, *([file.end] if file.end else [])]
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


def _refused(file: File) -> dict[str, str]:
    refused = file.header.hooks.get("refused", {})
    return {str(k): str(v) for k, v in refused.items()} if isinstance(refused, dict) else {}


def _rank_notices(files: list[File]) -> list[Notice]:
    """Ranks that stopped before the others: killed, crashed, or their file was cut."""
    most = max(file.last_step for file in files)
    ended = [file for file in files if file.end is not None]
    made = []
    for file in files:
        behind = file.last_step < most
        if not behind and (file.end is not None or not ended):
            continue
        how = "without an end line (killed?)" if file.end is None else f"({file.end.error or 'stopped'})"
        when = f"after step {file.last_step}" if file.last_step >= 0 else "before its first step ended"
        message = f"rank {file.rank} ends {how} {when}; the longest rank has step {most}"
        made.append(Notice("rank-ended-early", message, str(file.path)))
    if not ended:
        message = "no rank wrote an end line: the job is still running, or was killed as a whole"
        made.append(Notice("recording-open", message, str(files[0].path.parent)))
    return made


def _renamed(file: File, names: Names) -> Spans:
    to = file.names.mapping_to(names)
    return file.spans.with_columns(name=to[file.spans.name], group=to[file.spans.group])


def _spans_of(file: File) -> Spans:
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
    return on_host_clock(file, spans) if any(step.timing == "events" for step in file.steps) else spans


def _spans_of_step(file: File, step: StepLine, rows: recorded_rows.Rows) -> Spans:
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


# ---- layout


def _layout(files: list[File], names: Names, spans: Spans) -> Layout:
    known = [(file, file.layout) for file in files if file.layout is not None]
    inferred = {"microbatches": "micro-batches seen in most steps"}
    shape = None if known else settled.shape_of(spans)
    if shape is not None:
        of_stage, ranks = shape
        layout = LayoutLine(list(range(len(of_stage))), len(of_stage), _microbatches(spans) or 0, ranks, of_stage)
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


def _per_rank(files: list[File], layouts: dict[int, LayoutLine], value: Any) -> Int:
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
