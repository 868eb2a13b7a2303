"""Files, folders, globs and URLs -> the files of one format. What does not fit is said, never skipped unsaid."""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from bubblescope.errors import InputError

_MOST_FILES = 200_000


@dataclass(frozen=True)
class Found:
    """`unit`: a file, or a folder that a reader takes whole. `given`: named by the user, not found in a folder."""

    unit: str
    given: bool


def is_url(path: str) -> bool:
    return "://" in path


def expand(paths: Sequence[str], recordings: bool = True) -> list[Found]:
    """Every file and folder that the user's words mean, in a stable order, each once.

    recordings: whether a folder may stand for a recording in it. Raises InputError for a word that means nothing.
    """
    out: dict[str, Found] = {}
    for path in paths:
        for found in _expand_url(path) if is_url(path) else _expand_local(path, recordings):
            out.setdefault(found.unit, found)
    return list(out.values())


def _expand_local(path: str, recordings: bool) -> list[Found]:
    given = Path(os.path.expanduser(path))  # noqa: PTH111  (pathlib's raises where there is no such user)
    if recordings and given.is_dir():
        return _expand_folder(given)
    if given.exists():
        return [Found(str(given), given=True)]
    matches = sorted(glob.glob(str(given), recursive=True)) if glob.has_magic(path) else []  # noqa: PTH207
    if not matches:
        raise InputError(
            f"'{path}' does not exist" if not glob.has_magic(path) else f"nothing matches '{path}'",
            hint="give a trace file, a folder of ranks, a glob in quotes, or a URL that fsspec knows",
            where=str(given.parent),
        )
    return [Found(m, given=True) for m in matches]


def _expand_folder(folder: Path) -> list[Found]:
    """The folder itself, or the recording that is meant by it: renamed files in it, ``recording/`` in it, or the one
    folder in it that is a recording. Raises InputError where several are."""
    from bubblescope.ingest import recording

    if recording.can_read(folder) or _holds_traces(map(str, _entries(folder))):
        return [Found(str(folder), given=True)]
    if renamed := [p for p in _entries(folder) if p.suffix == ".jsonl" and recording.can_read(p)]:
        return [Found(str(p), given=False) for p in renamed]
    inside = [p for p in _entries(folder) if p.is_dir() and recording.can_read(p)]
    chosen = [p for p in inside if p.name == "recording"] or inside
    if len(chosen) > 1 and _holds_traces(files_below(str(folder), lambda name: True)):
        chosen = []
    if len(chosen) > 1:
        listed = ", ".join(p.name for p in chosen[:8]) + (f" and {len(chosen) - 8} more" if len(chosen) > 8 else "")
        raise InputError(
            f"there are {len(chosen)} recordings in this folder: {listed}",
            hint=f"name one of them, for example {chosen[-1]}",
            where=str(folder),
        )
    return [Found(str(p), given=True) for p in chosen or [folder]]


def _holds_traces(paths: Iterable[str]) -> bool:
    """Whether one of these files is a trace that a reader takes."""
    from bubblescope.ingest import FORMATS

    readers = [f.load() for f in FORMATS.values() if f.files]
    return any(m.looks_like(path) and m.can_read(Path(path)) for path in paths for m in readers)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda p: _natural(str(p)))
    except OSError:
        return []


def _expand_url(path: str) -> list[Found]:
    protocol = path.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
        fs, inner = fsspec.core.url_to_fs(path)
        names = fs.glob(inner) if glob.has_magic(inner) else [inner]
        files: list[str] = []
        for name in names:
            files.extend(sorted(fs.find(name)) if fs.isdir(name) else [name])
        present = [f for f in files if fs.exists(f)]
    except Exception as error:  # every file system of fsspec raises its own kinds
        raise InputError(
            f"the address cannot be opened ({error})",
            hint=f"check it, and that fsspec's driver for '{protocol}' is installed",
            where=path,
        ) from error
    if not present:
        raise InputError(f"nothing is at '{path}'", hint="check the address", where=path)
    return [Found(_url(fs, f), given=len(files) == 1) for f in present]


def _url(fs: Any, name: str) -> str:
    return cast(str, fs.unstrip_protocol(name))


def files_below(folder: str, wanted: Callable[[str], bool]) -> list[str]:
    """Files under `folder` whose name is `wanted`, at any depth, symlinked folders not followed."""
    out: list[str] = []
    stack = [Path(folder)]
    while stack:
        here = stack.pop()
        try:
            entries = sorted(here.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir():
                if not entry.is_symlink() and not entry.name.startswith("."):
                    stack.append(entry)
            elif wanted(entry.name):
                out.append(str(entry))
        if len(out) > _MOST_FILES:
            raise InputError(f"more than {_MOST_FILES:,} trace files", hint="name a smaller folder", where=folder)
    return sorted(out, key=_natural)


def _natural(path: str) -> tuple[Any, ...]:
    """rank2 before rank10."""
    digits = "".join(c if c.isdigit() else " " for c in PurePosixPath(path).name).split()
    return (str(PurePosixPath(path).parent), [int(d[:18]) for d in digits], path)
