"""`BUBBLESCOPE=standby` alone gives an agent to what imports bubblescope, and with one line of shell to every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bubblescope.attach import launcher
from tests.support.sleeping import ROOT

TRAIN = "import torch.distributed.pipelining"
SAY = (
    "import os, pathlib, sys; d = pathlib.Path(os.environ['BUBBLESCOPE_SOCKET_DIR'])\n"
    "print('agent' if (d / f'{os.getpid()}.sock').exists() else 'none')\n"
    "sys.exit('pandas' in sys.modules or 'numpy' in sys.modules)"
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a torch that is quick to import."""
    package = tmp_path / "lib" / "torch" / "distributed" / "pipelining"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    return tmp_path


def started(folder: Path, *lines: str, command: str = "python3", **env: str) -> str:
    """What a process with these lines says of itself."""
    (folder / "train").write_text("\n".join((*lines, SAY)))
    base = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "BUBBLESCOPE_SOCKET_DIR": str(folder / "s")}
    run = [*command.split(), str(folder / "train")]
    done = subprocess.run(
        [sys.executable if word == "python3" else word for word in run],
        env={**base, "PYTHONPATH": f"{folder / 'lib'}:{ROOT}", **env}, cwd=folder,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout.strip() + done.stderr


@pytest.mark.parametrize(
    "lines", [("import bubblescope", TRAIN), (TRAIN, "import bubblescope")], ids=["before", "after"]
)
def test_the_variable_is_enough_where_the_job_imports_bubblescope(lines: tuple[str, str], elsewhere: Path) -> None:
    assert started(elsewhere, *lines, BUBBLESCOPE="standby") == "agent"
    assert started(elsewhere, *lines) == "none"
    assert started(elsewhere, *lines, BUBBLESCOPE="off") == "none"


def test_variables_without_sense_do_not_end_the_job(elsewhere: Path) -> None:
    said = started(elsewhere, "import bubblescope", TRAIN, BUBBLESCOPE="standby", BUBBLESCOPE_EVERY="often")
    assert said == "nonebubblescope: nothing is recorded: UsageError: BUBBLESCOPE_EVERY is 'often', not a number\n"


def test_what_imports_no_pipeline_gets_none(elsewhere: Path) -> None:
    assert started(elsewhere, "import bubblescope, torch", BUBBLESCOPE="standby") == "none"


def test_bubblescopes_own_commands_get_none(elsewhere: Path) -> None:
    lines = ("import sys; sys.argv[0] = '/venv/bin/bubblescope'", "import bubblescope", TRAIN)
    assert started(elsewhere, *lines, BUBBLESCOPE="standby") == "none"


def test_the_line_that_doctor_prints_prepares_jobs_that_know_nothing_of_bubblescope(elsewhere: Path) -> None:
    train = elsewhere / "job.sh"
    train.write_text(f'{launcher.standby_line()}\n"$PYTHON" "$1"\n')
    assert started(elsewhere, TRAIN) == "none"
    assert started(elsewhere, TRAIN, command=f"sh {train}") == "agent"
    assert started(elsewhere, TRAIN, command=f"sh {train}", PYTHONPATH=str(elsewhere / "lib")) == "agent"


def test_a_job_that_can_have_no_agent_is_told_so_once(elsewhere: Path) -> None:
    (elsewhere / "s").symlink_to(elsewhere)
    train = elsewhere / "job.sh"
    train.write_text(f'{launcher.standby_line()}\n"$PYTHON" "$1"\n')
    lines = (TRAIN, "import bubblescope", "from bubblescope.attach import agent; agent.start()")
    said = started(elsewhere, *lines, command=f"sh {train}")
    assert said.startswith("none")
    assert said.count("nobody can attach to this process") == 1


def test_a_shell_that_stands_by_is_told_from_one_that_only_says_so() -> None:
    line = f'{launcher.standby_line()}\nprintf %s "$BUBBLESCOPE $PYTHONPATH"'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, env={"PYTHONPATH": "/mine"})
    mode, _, path = done.stdout.partition(" ")
    assert (mode, path) == ("standby", f"{launcher.SITE}:/mine")
    assert launcher.stands_by({"BUBBLESCOPE": mode, "PYTHONPATH": path})
    assert not launcher.stands_by({"BUBBLESCOPE": mode})
    assert not launcher.stands_by({"PYTHONPATH": path})
