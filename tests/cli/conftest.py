"""Commands are run as users run them: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_runner import Commands, Runner


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.close()


@pytest.fixture
def bubblescope(commands: Commands, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Run `bubblescope ARG…` in an empty folder; gives stdout, stderr and the exit status. env: further variables, read
    by an interpreter that starts with them."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        if env is None:
            return commands.run(arguments, tmp_path, tmp_path_factory.mktemp("output"))
        return subprocess.run(
            [sys.executable, "-m", "bubblescope", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            timeout=240,
        )

    return run
