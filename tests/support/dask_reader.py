"""What a dask worker runs in the tests: readers that take their worker down with them, once, or never end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from bubblescope.ingest.kineto import read_part
from bubblescope.ingest.part import Part


def fatal_once(path: str, marker: str) -> Part:
    """As `read_part`, but the first worker that is asked for a file is killed in the middle of it."""
    if not Path(marker).exists():
        Path(marker).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return read_part(path)


def endless(path: str) -> Part:
    """Longer than any test."""
    time.sleep(600)
    return read_part(path)
