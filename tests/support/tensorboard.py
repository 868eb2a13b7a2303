"""A real TensorBoard with torch-tb-profiler, from an environment of its own, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("BUBBLESCOPE_TOOLS", ROOT / ".venv-tools"))


class Board:
    """A running TensorBoard."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **query: Any) -> Any:
        url = f"{self.address}{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())

    def profiler(self, path: str, **query: Any) -> Any:
        return self.get(f"/data/plugin/pytorch_profiler/{path}", **query)

    def runs(self, seconds: float = 90) -> list[str]:
        """The profiler's runs, once it has read them all."""
        until = time.monotonic() + seconds
        found: dict[str, Any] = {}
        while time.monotonic() < until:
            with contextlib.suppress(urllib.error.URLError, OSError):
                found = self.profiler("runs")
                if found.get("runs") and not found.get("loading"):
                    break
            time.sleep(0.5)
        return list(found.get("runs", []))


def _program(name: str) -> Path:
    path = TOOLS / "bin" / name
    assert path.exists(), f"{path} is not there: scripts/test makes it"
    return path


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Board]:
    """TensorBoard over `folder` on a free port of this machine."""
    command = [_program("tensorboard"), "--logdir", folder, "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            yield Board(_address(process))
        finally:
            process.terminate()
            process.communicate(timeout=30)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/", line)
        if found:
            return found[1]
    raise RuntimeError("TensorBoard ended: " + "".join(said)[-2000:])


def python(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Python of the tools' environment; `env` is added to this one's."""
    command = [_program("python"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **(env or {})})
