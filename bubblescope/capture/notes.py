"""What the processes of a launched job leave for `bubblescope run`, on the same host, where no recording can say it:
that the recorder was loaded, why a rank did not record, what could not be written.

A note is a small file in the folder that `BUBBLESCOPE_NOTES` names; where there is none, nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "BUBBLESCOPE_NOTES"

LOADED = "loaded"
"""A process that imports torch has the recorder in it."""
IMPORTED = "imported"
"""One of them imported what can run a pipeline."""
MARKED = "marked"
"""One of them ran an operation that `bubblescope.span` marks."""
UNCHOSEN = "unchosen"
"""A rank does not record, because the user chose others. The text is the world size, "" when unknown."""
LOST = "lost"
"""Lines of a recording could not be written. The text says why."""
INNER = "inner"
"""Another `bubblescope run` in the command, or `bubblescope.record` in the script, records. The text is its folder."""
_RANK = "rank-"


def leave(name: str, text: str = "", environ: Mapping[str, str] = os.environ) -> None:
    """Leave that note. Never raises: it is in somebody else's job."""
    folder = environ.get(VARIABLE)
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / name).write_text(text)


def leave_rank(rank: int) -> None:
    """Leave that this rank begins its recording."""
    leave(f"{_RANK}{rank:05d}")


@contextlib.contextmanager
def folder() -> Iterator[Path | None]:
    """A new folder for notes, until the block ends; None where there can be none."""
    try:
        made = tempfile.TemporaryDirectory(prefix="bubblescope-notes-", ignore_cleanup_errors=True)
    except OSError:
        yield None
        return
    with made as path:
        yield Path(path)


def read(folder: Path | None) -> dict[str, str]:
    """Name -> text of the notes there; what cannot be read is not there."""
    found: dict[str, str] = {}
    if folder is not None:
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                found[path.name] = path.read_text(errors="replace")
    return found


def ranks(found: Mapping[str, str]) -> set[str]:
    """The ranks that began a recording, as the stems of their files' names.

    >>> sorted(ranks({"loaded": "", "rank-00001": "", "rank-00000": ""}))
    ['rank-00000', 'rank-00001']
    """
    return {name for name in found if name.startswith(_RANK)}
