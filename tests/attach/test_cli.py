"""`bubblescope attach` as a user meets it where nothing can be attached to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sleeping import ROOT


def attach(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bubblescope", "attach", *arguments],
        env={**os.environ, "BUBBLESCOPE_SOCKET_DIR": str(folder / "s"), "PYTHONPATH": str(ROOT)},
        cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sleeper() -> Iterator[int]:
    """A Python process that trains nothing."""
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    yield child.pid
    child.kill()
    child.communicate()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("nonsense",), 2, "is no process id, no folder and not 'all'"),
        (("4194305",), 4, "there is no process 4194305"),
        ((".",), 4, "there are no training ranks that belong to ."),
        (("PID",), 4, "was not prepared for attaching"),
        (("PID", "--via", "kineto"), 4, "without KINETO_USE_DAEMON=1"),
        (("PID", "--via", "agent"), 4, "there is no agent"),
        (("1", "--steps", "2", "--duration", "3"), 2, "exclude each other"),
        (("1", "--steps", "0"), 2, "--steps"),
        (("1", "--duration", "0"), 2, "--duration"),
        (("1", "--via", "telepathy"), 2, "telepathy"),
        ((), 2, "TARGET"),
    ],
)
def test_a_refusal_has_its_exit_status_a_reason_and_a_hint(
    arguments: tuple[str, ...], status: int, said: str, tmp_path: Path, sleeper: int
) -> None:
    done = attach(tmp_path, *(str(sleeper) if word == "PID" else word for word in arguments))
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_injecting_into_what_is_no_training_is_refused_before_it_is_touched(tmp_path: Path, sleeper: int) -> None:
    done = attach(tmp_path, str(sleeper), "--via", "inject", "--yes")
    assert done.returncode == 4
    assert "has not loaded torch" in done.stderr


def test_help_has_an_example(tmp_path: Path) -> None:
    done = attach(tmp_path, "--help")
    assert done.returncode == 0
    assert "bubblescope attach all --steps 20" in done.stdout
