"""Small files that people write for us: rules of names, layer times, schedules."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

MOST_BYTES = 64 << 20


def text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The file's UTF-8 text, with or without a byte order mark, each line ending in a newline character.

    Raises UnicodeDecodeError, and OSError, also for more than `most` bytes: /dev/zero has no end.
    """
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return io.StringIO(data.decode("utf-8-sig"), newline=None).read()
