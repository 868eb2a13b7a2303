"""Readers: files made by others, or by our recorder, become a `Run`. Nothing is concluded here.

A new format is one new module here and one line in `FORMATS`. A module has ``can_read(path: Path) -> bool``
(a file or folder) and ``read(paths) -> Run``; where `Format.files` is true it is given single files, and takes
``options`` and ``executor``, where `Format.spread` is true ``executor`` alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from bubblescope.errors import InputError, UsageError
from bubblescope.ingest import discover, memory, usernames
from bubblescope.ingest.decompress import blocks
from bubblescope.ingest.options import DEFAULT, ReadOptions
from bubblescope.ingest.parallel import Executor
from bubblescope.model import Notice, Run, checks
from bubblescope.model.notice import some

__all__ = ["FORMATS", "Format", "ReadOptions", "read"]
_PACKING = re.compile(r"\.(?:gz|zstd?|bz2|xz|zip|7z|lz4)$", re.IGNORECASE)


@dataclass(frozen=True)
class Format:
    """A reader by name; its module is imported when it is needed."""

    name: str
    module: str
    files: bool = False
    spread: bool = False

    def load(self) -> Any:
        return importlib.import_module(self.module)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("recording", "bubblescope.ingest.recording", spread=True),
        Format("straggler", "bubblescope.ingest.straggler"),
        Format("megatronapp", "bubblescope.ingest.megatronapp", files=True),
        Format("ndtimeline", "bubblescope.ingest.ndtimeline", files=True),
        Format("megatron_log", "bubblescope.ingest.megatron_log", files=True),
        Format("nsys", "bubblescope.ingest.nsys", files=True),
        Format("kineto", "bubblescope.ingest.kineto", files=True),
    )
}
"""In the order in which they are asked whether they can read a path."""


def read(
    paths: str | Path | Sequence[str | Path],
    format: str = "auto",
    executor: Executor | None = None,
    options: ReadOptions = DEFAULT,
) -> Run:
    """The run that `paths` (files, folders, globs, fsspec URLs) hold, all of one format.

    Raises InputError when there is nothing to read, it cannot be read or formats are mixed, UsageError for an unknown
    `format`.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise UsageError("no path was given")
    with _telling(given):
        found = discover.expand([checks.path("path", p) for p in given], recordings=format in ("auto", "recording"))
        candidates = _candidates(format)
        claims = _claims(candidates, found)
        if not claims:
            claims = _hopeful(candidates, found)
        every = claims
        claims, said = _without_headless(claims)
        chosen = _choose(claims, found)
        said += _beside(claims, chosen)
        module = chosen.load()
        units = claims[chosen.name]
        if chosen.files:
            said += [*_unclaimed(every, found), *_misnamed(module, units, found)]
        if chosen.files:
            run = cast(Run, module.read(units, options=options, executor=executor))
        elif chosen.spread:
            run = cast(Run, module.read([Path(u) for u in units], executor=executor, options=options))
        else:
            run = cast(Run, module.read([Path(u) for u in units]))
    memory.give_back()
    return _with_names(replace(run, notices=(*run.notices, *said)), options)


@contextmanager
def _telling(paths: Sequence[str | Path]) -> Iterator[None]:
    """What the file system refuses, wherever a reader meets it, is told as an error about the input."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}",
            hint="check its permissions, and that its file system is well",
            where=str(error.filename or ", ".join(str(p) for p in paths[:3])),
        ) from error


def _with_names(run: Run, options: ReadOptions) -> Run:
    """The user's names of ranges travel with the run to where ranges are labelled; what is wrong with them is said."""
    if not options.names:
        return run
    run = run.with_notices(*usernames.notices(options.names, run))
    details = {**run.source.details, "names": tuple(options.range_rules())}
    return replace(run, source=replace(run.source, details=details))


def _candidates(format: str) -> list[Format]:
    if format == "auto":
        return list(FORMATS.values())
    if format not in FORMATS:
        raise UsageError(f"unknown format '{format}'", hint=f"one of auto, {', '.join(FORMATS)}")
    return [FORMATS[format]]


def _claims(candidates: list[Format], found: list[discover.Found]) -> dict[str, list[str]]:
    """Format -> what it takes; a file belongs to the first that knows it."""
    out: dict[str, list[str]] = {}
    taken: set[str] = set()
    for reader in candidates:
        units = [u for u in _claimed(reader, found, only=len(candidates) == 1) if u not in taken or not reader.files]
        if units:
            out[reader.name] = units
            taken.update(units if reader.files else ())
    return out


def _claimed(reader: Format, found: list[discover.Found], *, only: bool) -> list[str]:
    """What of `found` this reader takes. A format that the user named takes any file that was named with it."""
    module = reader.load()
    units: list[str] = []
    for item in found:
        if discover.is_url(item.unit):
            if reader.files and (only or (module.looks_like(item.unit) and module.sniff(item.unit))):
                units.append(item.unit)
            continue
        path = Path(item.unit)
        if path.is_dir() and reader.files:
            units.extend(_in_folder(module, item.unit))
        elif (only and path.is_file()) or module.can_read(path):
            units.append(item.unit)
    return units


def _without_headless(claims: dict[str, list[str]]) -> tuple[dict[str, list[str]], list[Notice]]:
    """Without recordings that hold no header (a rank was killed at once), where another format can read something."""
    from bubblescope.ingest import recording

    units = claims.get("recording", [])
    if len(claims) < 2 or not units or any(map(recording.has_header, units)):
        return claims, []
    message = "the recording here holds no header, so nothing of it can be read; it is left out"
    return {n: u for n, u in claims.items() if n != "recording"}, [Notice("file-empty", message, u) for u in units]


def _beside(claims: dict[str, list[str]], chosen: Format) -> list[Notice]:
    """What of other formats lies beside that which is read."""
    notices = []
    for name, units in claims.items():
        if name != chosen.name and FORMATS[name].files:
            listed = some([Path(u).name for u in units], 4)
            message = (
                f"{len(units)} of the files here are of format {name} ({listed}) and are not read; "
                f"--format {name} reads them, and not the {chosen.name}"
            )
            notices.append(Notice("other-format", message, str(Path(units[0]).parent)))
    return notices


def _unclaimed(claims: dict[str, list[str]], found: list[discover.Found]) -> list[Notice]:
    """Files that the user named and that no reader takes."""
    taken = {unit for units in claims.values() for unit in units}
    left = [f.unit for f in found if f.unit not in taken and not discover.is_url(f.unit) and Path(f.unit).is_file()]
    notices, others = [], []
    for path in left:
        try:
            _refuse_packed(path)
        except InputError as error:
            notices.append(Notice("file-ignored", f"{error.what}; it is not read", path))
        else:
            others.append(path)
    if others:
        listed = some([Path(path).name for path in others], 4)
        message = f"{len(others)} of the files given hold no trace that can be read: {listed}"
        notices.append(Notice("file-ignored", message, others[0] if len(others) == 1 else ""))
    return notices


def _misnamed(module: Any, units: list[str], found: list[discover.Found]) -> list[Notice]:
    """Files in a folder that hold a trace under the name of one that is read, but for its suffix."""
    stems = {_stem(unit) for unit in units}
    folders = [f.unit for f in found if Path(f.unit).is_dir()]
    alike = [
        path
        for folder in folders
        for path in discover.files_below(folder, lambda name: not module.looks_like(name) and _stem(name) in stems)
    ]
    message = "a trace, by its content, that is not read because of its name: rename it, or give the file itself"
    return [Notice("file-ignored", message, path) for path in alike if module.can_read(Path(path))]


def _stem(path: str) -> str:
    return _shape(path).partition(".")[0]


def _nested(found: list[discover.Found]) -> dict[str, list[str]]:
    """Format -> folders, in the folders that were given, which a reader would take whole if they were given."""
    inside = [path for item in found if Path(item.unit).is_dir() for path in sorted(Path(item.unit).iterdir())]
    readers = {f.name: f.load() for f in FORMATS.values() if not f.files}
    taken = {n: [str(p) for p in inside if p.is_dir() and module.can_read(p)] for n, module in readers.items()}
    return {name: folders for name, folders in taken.items() if folders}


def _hopeful(candidates: list[Format], found: list[discover.Found]) -> dict[str, list[str]]:
    """Files that only by their name are traces (in folders: packed ones): reading them says what is wrong."""
    from bubblescope.ingest import recording

    for item in found:
        if Path(item.unit).is_file() and recording.is_job_file(item.unit):
            raise InputError(
                "this file of a recording describes the job, and holds none of its steps",
                hint=f"give the folder: {Path(item.unit).parent}",
                where=item.unit,
            )
    for reader in reversed(candidates):
        if reader.files:
            module = reader.load()
            folders = [f.unit for f in found if Path(f.unit).is_dir()]
            units = [f.unit for f in found if module.looks_like(f.unit) and f.unit not in folders]
            units += [n for f in folders for n in discover.files_below(f, module.looks_like) if _PACKING.search(n)]
            if units:
                return {reader.name: units}
    return {}


def _in_folder(module: Any, folder: str) -> list[str]:
    """Trace files of a folder. Once one of them is a trace, damaged ones with such names belong to it too."""
    named = discover.files_below(folder, module.looks_like)
    good = {n for n in named if module.can_read(Path(n))}
    shapes = {_shape(n) for n in good}
    return [n for n in named if n in good or _shape(n) in shapes]


def _shape(path: str) -> str:
    """A file name without its numbers and its packing: ranks of one job differ only in these.

    >>> _shape("job/rank03.json.gz")
    'rank##.json'
    """
    return "".join("#" if c.isdigit() else c for c in _PACKING.sub("", Path(path).name))


def _refuse_packed(path: str) -> None:
    """Raise InputError for a file that is packed in a way that is not read, or cannot be opened."""
    next(blocks(path, DEFAULT.max_bytes, []), b"")


def _choose(claims: dict[str, list[str]], found: list[discover.Found]) -> Format:
    if not claims:
        for item in found:
            if discover.is_url(item.unit) or Path(item.unit).is_file():
                _refuse_packed(item.unit)
        raise InputError(
            "no readable trace or recording here",
            hint="looked for a recording (rank-00000.jsonl …) here, in recording/ and in each folder, and for traces "
            f"(.json, .json.gz, .sqlite …) at any depth; formats: {', '.join(FORMATS)}",
            where=found[0].unit,
        )
    if len(claims) == 1:
        return FORMATS[next(iter(claims))]
    # A folder of a recording may hold reports and traces as well: the first format wins if it claims all.
    for name, units in claims.items():
        if len(units) >= len(found) and not FORMATS[name].files:
            return FORMATS[name]
    counts = {name: len(units) for name, units in (_nested(found) | claims).items()}
    raise InputError(
        f"the paths mix formats: {', '.join(f'{count} {name}' for name, count in counts.items())}",
        hint="name one with --format, or give the paths of one format only",
        where=found[0].unit,
    )
