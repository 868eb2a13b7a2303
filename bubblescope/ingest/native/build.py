"""Compiles `scanner.c`. Apart from the loader, so that what it needs is imported only when something is built."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

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


def compile_to(target: Path, compiler: str | None, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile into a file beside `target`, then move it there: two processes may do this at once.

    Raises OSError, with what the compiler said, when it does not succeed.
    """
    if compiler is None:
        raise FileNotFoundError("no C compiler was found ($CC, cc, gcc, clang)")
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [*shlex.split(compiler), *flags, str(SOURCE), "-o", temporary, "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, text=True)
        Path(temporary).replace(target)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        raise OSError(f"{compiler} does not compile {SOURCE.name}: {str(said).strip()[:200]}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
