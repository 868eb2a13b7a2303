"""Kineto (torch.profiler) traces -> Run: ``.json``, ``.json.gz``, ``.json.zst``, one file per rank."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from bubblescope.errors import InputError
from bubblescope.ingest import memory, partcache
from bubblescope.ingest.decompress import blocks
from bubblescope.ingest.kineto_assemble import assemble
from bubblescope.ingest.kineto_scan import scan
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.ingest.parallel import Executor, over_files
from bubblescope.ingest.part import Part, merge
from bubblescope.model import Notice, Run

_SUFFIX = re.compile(r"\.json(\.(gz|zstd?|bz2|xz|zip|7z|lz4))?$|^rank\d+_trace$|\.pt\.trace(\.|$)", re.IGNORECASE)
_MARKS = (b'"traceEvents"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"')
_LIST_MARKS = (b'"ph"', b'"cat"')
_NOT_OURS = (b'"pp_rank"', b'"model_chunk"', b'"iteration begin"')
_PEEK = 1 << 20
_WINDOW = re.compile(r"(?:iteration|step|iter)[-_](\d+)", re.IGNORECASE)
_STAMP = re.compile(r"\.(\d{9,20})\.pt\.trace\.json")


def looks_like(name: str) -> bool:
    """Whether a file in a folder is worth opening, by its name."""
    return _SUFFIX.search(PurePosixPath(name).name) is not None


def can_read(path: Path) -> bool:
    """Whether the file at `path` begins like a Kineto trace. Never raises for a file that is merely damaged."""
    return path.is_file() and sniff(str(path))


def sniff(path: str) -> bool:
    """As `can_read`, for any address; a file with a trace's name that holds nothing readable counts as one,
    so that it is reported and not overlooked."""
    try:
        start = _peek(path)
    except InputError:
        return False
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n\0")
    if any(mark in start for mark in _NOT_OURS):
        return False
    if text.startswith(b"["):
        return any(mark in start for mark in _LIST_MARKS)
    return any(mark in start for mark in _MARKS)


def _peek(path: str) -> bytes:
    out = b""
    for block in blocks(path, 1 << 40, []):
        out += block
        if len(out) >= _PEEK:
            break
    return out


def read(paths: Sequence[str | Path], options: ReadOptions = DEFAULT, executor: Executor | None = None) -> Run:
    """One Run of all ranks in `paths` (files). A bad file becomes a Notice as long as another one is good.

    Raises InputError when nothing can be used.
    """
    parts, notices = _parts(paths, options, executor)
    parts = _with_ranks(parts, notices)
    if not any(part.timing for part in parts):
        _refuse_damaged(parts)
    memory.give_back()
    return merge(parts, notices, "kineto")


def _parts(
    paths: Sequence[str | Path], options: ReadOptions, executor: Executor | None
) -> tuple[list[Part], list[Notice]]:
    """All files that can be read, and what is wrong with the others. Raises InputError when none can."""
    files, notices = _latest_window([str(p) for p in paths])
    parts: list[Part] = []
    errors: list[InputError] = []
    for path, result in over_files(functools.partial(read_part, options=options), files, executor):
        if isinstance(result, InputError):
            errors.append(result)
            notices.append(Notice("file-unreadable", f"{result.what}; this rank is left out", result.where or path))
        else:
            parts.append(result)
    if options.cache:
        partcache.prune()
    if not parts:
        raise errors[0] if errors else InputError("no trace files were given")
    return parts, notices


def _refuse_damaged(parts: list[Part]) -> None:
    """Raise InputError where files without a GPU event are damaged: what was lost may well have been those events."""
    for part in parts:
        said = {notice.code: notice.message for notice in part.notices}
        packed = f" ({said['file-truncated']})" if "file-truncated" in said else ""
        if "trace-truncated" in said or packed:
            end = said.get("trace-truncated", f"its {part.events} complete events are used")
            what = f"the file is cut{packed}: {end.removeprefix('the file ends early; ')}"
        elif "trailing-bytes" in said:
            what = f"the list of events is followed by more than the end of the file: {said['trailing-bytes']}"
        elif "events-skipped" in said:
            what = f"the file is damaged, cut, or nested too deep: {said['events-skipped']}"
        else:
            continue
        raise InputError(
            f"{what}; no GPU event is among them",
            hint="copy it again from where it was recorded, or record again and let the profiler finish writing",
            where=part.path,
        )


def read_part(path: str, options: ReadOptions = DEFAULT) -> Part:
    """One file, or what is kept of it. Raises InputError when it is no trace, or not one rank's."""
    return partcache.through(path, options, functools.partial(_read_part, options=options))


def _read_part(path: str, options: ReadOptions) -> Part:
    found = scan(path, options)
    memory.give_back()
    if len(found.events) == 0 and any(mark in _peek(path) for mark in _NOT_OURS):
        raise InputError(
            "none of the events is one that torch.profiler writes; they name places in a pipeline, as the tracers of "
            "MegatronApp (a list of begins and ends) and ndtimeline do, but not in their form",
            hint="this is not a torch.profiler trace; docs/traces.md says what is read",
            where=path,
        )
    return assemble(found, options)


def _with_ranks(parts: list[Part], notices: list[Notice]) -> list[Part]:
    """Parts whose rank is known. A lone file without a rank is taken as rank 0; several are refused."""
    known = [p for p in parts if p.rank >= 0]
    unknown = [p for p in parts if p.rank < 0]
    if not unknown:
        return parts
    if len(parts) == 1:
        message = "the trace does not say its rank; as the only file it is taken as rank 0"
        notices.append(Notice("rank-assumed", message, parts[0].path))
        return [replace(parts[0], rank=0, rank_how="only file")]
    if not known:
        listed = ", ".join(PurePosixPath(p.path).name for p in unknown[:5])
        raise InputError(
            f"the ranks of {len(unknown)} files cannot be told ({listed}): no distributedInfo, no process-group "
            "arguments that say which rank is theirs, no number of a rank in the names",
            hint="name the files rank0.json, rank1.json, … or analyse them one by one",
            where=str(PurePosixPath(unknown[0].path).parent),
        )
    for part in unknown:
        notices.append(Notice("rank-unknown", "the rank of this file cannot be told; it is left out", part.path))
    return known


def _latest_window(files: list[str]) -> tuple[list[str], list[Notice]]:
    """Profilers write a file per rank and window (``iteration_10/``, ``worker.STAMP.pt.trace.json``).

    Windows are not glued together: the latest complete one is used, and the others are named.
    """
    windows: dict[tuple[int, str], list[str]] = {}
    for path, age in zip(files, _ages(files), strict=True):
        windows.setdefault((-age, _iteration(path)), []).append(path)
    if len(windows) <= 1:
        return files, []
    most = max(len(w) for w in windows.values())
    complete = [key for key, members in windows.items() if len(members) == most]
    chosen = max(complete, key=lambda key: (len(key[1]), key[1], key[0]))
    skipped = [_short(p) for key, members in windows.items() if key != chosen for p in members[:1]]
    message = (
        f"the traces are of {len(windows)} profiling windows; the latest complete one ({_short(windows[chosen][0])}"
        f" …) is analysed, and not those of {', '.join(sorted(skipped)[:6])}"
    )
    return windows[chosen], [Notice("windows-skipped", message)]


def _short(path: str) -> str:
    """The file with its folder, which may be what tells two windows apart."""
    return "/".join(PurePosixPath(path.replace("\\", "/")).parts[-2:])


def _iteration(path: str) -> str:
    """The number in a folder ``iteration_N``; "" elsewhere."""
    found = _WINDOW.fullmatch(PurePosixPath(path.replace("\\", "/")).parent.name)
    return found[1] if found else ""


def _ages(files: list[str]) -> list[int]:
    """For each file how many newer files its TensorBoard worker has (``worker.STAMP.pt.trace.json``); else 0."""
    stamps: dict[str, list[int]] = {}
    keys = []
    for path in files:
        found = _STAMP.search(path)
        key = (path[: found.start()], int(found[1])) if found else ("", -1)
        keys.append(key)
        if found:
            stamps.setdefault(key[0], []).append(key[1])
    for known in stamps.values():
        known.sort()
    return [len(stamps[worker]) - 1 - stamps[worker].index(stamp) if stamp >= 0 else 0 for worker, stamp in keys]
