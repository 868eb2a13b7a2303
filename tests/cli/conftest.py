"""Commands are run as users run them: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runner import Runner


@pytest.fixture
def bubblescope(tmp_path: Path) -> Runner:
    """Run `bubblescope ARG…` in an empty folder; gives stdout, stderr and the exit status."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bubblescope", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            timeout=240,
        )

    return run
