"""Runs `bubblescope` commands as users do, each in a process of its own, without importing pandas each time.

A process that has imported what commands import forks for each: it takes requests as JSON lines and answers with exit
statuses. What is decided when an interpreter starts (the environment) needs a fresh one: see tests/cli/conftest.py.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

Runner = Callable[..., CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]


class Commands:
    """Such a process. `close` ends it."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: tuple[str, ...], folder: Path, scratch: Path) -> CompletedProcess[str]:
        """`bubblescope ARGUMENTS` in `folder`; its output goes through files in `scratch`."""
        out, errors = scratch / "stdout", scratch / "stderr"
        request = [list(arguments), str(folder), str(out), str(errors)]
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        return CompletedProcess(["bubblescope", *arguments], status, out.read_text(), errors.read_text())

    def close(self) -> None:
        self._server.communicate(timeout=20)


def _serve() -> None:
    from bubblescope.cli import main

    for entry in main.COMMANDS.values():
        importlib.import_module(entry.target.partition(":")[0])
    for name in ("bubblescope.report.build", "bubblescope.views.html", "bubblescope.ingest.recording", "pandas"):
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _be_the_command(main.main, *json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _be_the_command(main: Callable[[], None], arguments: list[str], folder: str, out: str, errors: str) -> None:
    status = 1
    try:
        for path, number in ((os.devnull, 0), (out, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.chdir(folder)
        del os.environ["PYTHONPATH"]
        sys.argv[:] = ["bubblescope", *arguments]
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
