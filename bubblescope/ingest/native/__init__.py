"""The native scanner: chunks of a trace -> columns in C, without the interpreter's lock. Optional, never required.

`scanner.c` is built with the system's compiler when it is first wanted, into the user's cache folder, and loaded
with ctypes. Where there is no compiler, or with ``BUBBLESCOPE_NATIVE=0``, traces are read in Python; the columns are
the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from bubblescope.ingest import userfolder

ABI = 4
_SOURCE = Path(__file__).with_name("scanner.c")
_OFF = ("0", "no", "off", "false")


@dataclass(frozen=True)
class Status:
    """`library` None: not in use, and `why`."""

    library: ctypes.CDLL | None
    why: str


@functools.cache
def status() -> Status:
    """The loaded library, built first where needed, or the reason for which there is none. Never raises."""
    if os.environ.get("BUBBLESCOPE_NATIVE", "").lower() in _OFF:
        return Status(None, "switched off by BUBBLESCOPE_NATIVE")
    if sys.byteorder != "little" or sys.platform == "win32":
        return Status(None, f"not made for {platform.machine()} {sys.platform}")
    try:
        path = built()
        return Status(_loaded(path), str(path))
    except (OSError, AttributeError) as error:
        # Every way in which a foreign compiler, cache folder or loader can fail ends here: Python reads then.
        return Status(None, str(error))


def built() -> Path:
    """The library in the user's cache folder, compiled unless it is there as it was compiled: loading one that was cut
    would kill this process. Raises OSError when that fails."""
    folder = userfolder.cache_folder("native")
    stem = f"scanner-{platform.machine()}-{digest(_SOURCE.read_bytes())}"
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if path.name == f"{stem}-{digest(path.read_bytes())}.so":
            return path
        path.unlink(missing_ok=True)
    from bubblescope.ingest.native.build import compile_into, find_compiler

    return compile_into(folder, stem, find_compiler())


def digest(data: bytes) -> str:
    """What tells these bytes from others. No cryptographic one: OpenSSL would take more memory than the scanner."""
    return f"{len(data)}-{zlib.crc32(data):08x}"


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.bubblescope_abi.restype = ctypes.c_int
    if library.bubblescope_abi() != ABI:
        raise OSError(f"{path} is of another version")
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("new", pointer, [ctypes.c_uint64]),
        ("free", None, [pointer]),
        ("category", ctypes.c_int, [pointer, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
        ("scan", ctypes.c_int, [pointer, pointer, ctypes.c_int64, ctypes.c_int, pointer, pointer]),
        ("arena", pointer, [pointer]),
        ("offsets", pointer, [pointer]),
    ):
        function = getattr(library, f"bubblescope_{name}")
        function.restype = result
        function.argtypes = arguments
    return library
