"""`bubblescope attach` as a user meets it where nothing can be attached to."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bubblescope.attach.session import Attached
from bubblescope.cli.attach import closing
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
        (("PID", "--via", "inject", "--yes"), 4, "has not loaded torch"),
        (("PID", "--via", "inject", "--yes", "--out", "/proc/x"), 2, "nothing can be written there: No such file"),
        (("PID", "--via", "inject", "--yes", "--out", "/dev/null/x"), 2, "nothing can be written there: Not a dir"),
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


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (
            {"detached": 4},
            "detached: hooks are out of 4 ranks, no training thread waited more than 2.5 ms for them",
        ),
        ({"detached": 1, "via": "inject"}, "hooks are out of 1 rank, "),
        ({"detached": 1, "via": "inject"}, "the sleeping agents stay"),
        ({"detached": 1, "ended": 2}, "for them; 2 ranks ended while being recorded"),
        ({"detached": 0, "ended": 1}, "1 rank ended while being recorded"),
        ({"detached": 0, "hooked": 2}, "hooks are still in 2 ranks, and come out at the next step there"),
        ({"detached": 0, "failed": 1}, "1 rank gave up (see the warnings)"),
        ({"detached": 1, "via": "kineto"}, "Kineto traced 1 rank; nothing was placed into the job"),
    ],
)
def test_the_last_word_is_what_became_of_each_rank(done: dict[str, Any], said: str) -> None:
    made = Attached(**{"folder": Path("x"), "via": "agent", "stall_ms": 2.5, **done})
    assert said in closing(made)
    assert ("hooks are out" in closing(made)) is (made.detached > 0 and made.via != "kineto")


CLOSED = """
import sys, time
from pathlib import Path
from bubblescope.attach import session
from bubblescope.attach.early import ends_early
from bubblescope.cli.main import run

def attach(plan, confirm, tell):
    with ends_early() as early:
        tell("recording")
        while not early:
            time.sleep(0.01)
    tell("hooks come out at the next step")
    return session.Attached(Path("docs/examples/before"), "agent", 4, early=early)

session.attach = attach
sys.exit(run(["attach", "all", "--out", sys.argv[1]]))
"""


def test_closing_the_terminal_ends_it_with_a_report(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", CLOSED, str(tmp_path / "out")])
    while b"recording" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert (tmp_path / "out" / "report.html").exists()


def test_help_has_an_example(tmp_path: Path) -> None:
    done = attach(tmp_path, "--help")
    assert done.returncode == 0
    assert "bubblescope attach all --steps 20" in done.stdout
