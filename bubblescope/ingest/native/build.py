"""Compiles `scanner.c`. Apart from the loader, so that what it needs is imported only when something is built."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from bubblescope.ingest.native import digest

SOURCE = Path(__file__).with_name("scanner.c")
FLAGS = ("-std=c99", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden")
_SECONDS = 60


def find_compiler() -> str | None:
    """The command that compiles C here; None when there is none."""
    wanted = os.environ.get("CC")
    for name in ([wanted] if wanted else []) + ["cc", "gcc", "clang"]:
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return name
    return None


def compile_into(folder: Path, stem: str, compiler: str | None, flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile into ``STEM-DIGEST.so`` of `folder`, which is there as a whole or not at all: two processes may do this
    at once.

    Raises OSError, with what the compiler said, when it does not succeed.
    """
    if compiler is None:
        raise FileNotFoundError("no C compiler was found ($CC, cc, gcc, clang)")
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [*shlex.split(compiler), *flags, str(SOURCE), "-o", temporary, "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, text=True)
        return Path(temporary).replace(folder / f"{stem}-{digest(Path(temporary).read_bytes())}.so")
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        raise OSError(f"{compiler} does not compile {SOURCE.name}: {str(said).strip()[:200]}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
