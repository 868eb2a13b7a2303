"""Parts that were read before, in the user's cache folder: the second analysis of the same files reads no trace.

The key is the content of the file, its path (rank and window may be told by it), the options, and this version of
the readers. Whatever does not fit exactly, or is damaged, is read anew. The oldest parts make room for new ones.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from bubblescope._version import __version__
from bubblescope.ingest import partfile, userfolder
from bubblescope.ingest.options import ReadOptions
from bubblescope.ingest.part import Part

SMALLEST = 256 << 10
"""Files below this many bytes are read faster than they are looked up."""
MOST_BYTES = 2 << 30
"""What the folder may hold; BUBBLESCOPE_CACHE_BYTES says otherwise."""
_WRITING_S = 3600
"""A part that is not finished after so many seconds will never be."""


def through(path: str, options: ReadOptions, read: Callable[[str], Part]) -> Part:
    """`read(path)`, or what it gave the last time. Never fails for the cache's sake; InputErrors are not kept."""
    place = _place(path, options) if options.cache else None
    if place is None:
        return read(path)
    kept = partfile.read(place)
    if kept is not None:
        _touch(place)
        return kept
    part = read(path)
    try:
        partfile.write(part, place)
    except OSError:
        return part  # a full disk costs the cache, not the analysis
    return part


def prune(most_bytes: int | None = None) -> None:
    """Remove the parts that were not used for longest until the folder holds `most_bytes`, and what processes that were
    killed had not written to its end."""
    limit = most_bytes if most_bytes is not None else _limit()
    try:
        found = [(p.stat(), p) for p in userfolder.cache_folder("parts").iterdir()]
    except OSError:
        return
    total = sum(info.st_size for info, _ in found)
    for info, path in sorted(found, key=lambda entry: entry[0].st_mtime_ns):
        unfinished = path.name.startswith(partfile.UNFINISHED)
        if time.time() - info.st_mtime > _WRITING_S if unfinished else total > limit:
            path.unlink(missing_ok=True)
            total -= info.st_size


def _limit() -> int:
    given = os.environ.get("BUBBLESCOPE_CACHE_BYTES", "")
    return int(given) if given.isdigit() else MOST_BYTES


def _touch(place: Path) -> None:
    try:
        os.utime(place)
    except OSError:
        return  # read-only folder: it is only for the order of removal


def _place(path: str, options: ReadOptions) -> Path | None:
    """Where the part of this file is kept; None when it is not to be."""
    if "://" in path:
        return None
    import hashlib  # brings OpenSSL: four megabytes

    try:
        if Path(path).stat().st_size < SMALLEST:  # a pipe, which waits for its writer, has no size
            return None
        with Path(path).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        folder = userfolder.cache_folder("parts")
    except OSError:
        return None
    key = hashlib.sha256(b"\0".join([content, os.fsencode(Path(path).absolute()), os.fsencode(path), _version(),
                                     _told(options).encode()]))  # fmt: skip
    return folder / f"{key.hexdigest()[:40]}.part"


def _told(options: ReadOptions) -> str:
    told = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "cache"}
    return repr(sorted(told.items()))


@functools.cache
def _version() -> bytes:
    """Of all that decides what a part is: this release, and the readers' own source."""
    import hashlib

    digest = hashlib.sha256(__version__.encode())
    here = Path(__file__).parent
    for source in sorted([*here.rglob("*.py"), *here.rglob("*.c"), *here.parent.joinpath("model").glob("*.py")]):
        digest.update(source.read_bytes())
    return digest.digest()
