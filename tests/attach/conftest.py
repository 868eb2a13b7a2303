"""A process with an agent and without torch: quick to start, and its own to break."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.attach_jobs import job, losses
from tests.support.sleeping import ROOT

LIVE = """
import sys, time
from bubblescope.attach import agent
print(agent.start(), flush=True)
{lines}
for line in sys.stdin:
    print(line.strip(), flush=True)
"""

Host = Callable[..., "AgentProcess"]


class AgentProcess:
    """A live process with an agent. echo() proves that its main thread still answers."""

    def __init__(self, directory: Path, lines: str = "", env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVE.format(lines=lines)],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "BUBBLESCOPE_SOCKET_DIR": str(directory), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        self.path = Path(said) if said != "None" else None
        self.pid = self.process.pid

    @property
    def socket(self) -> Path:
        assert self.path is not None
        return self.path

    def echo(self, word: str = "ping") -> bool:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip() == word

    def end(self) -> str:
        """End it in good order; gives what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=20)
        return errors


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a training of four ranks that nobody prepared and nobody touched."""
    with job(tmp_path_factory.mktemp("undisturbed"), sleep_s=0.0) as one:
        one.wait_steps(150)
    return losses(one)


@pytest.fixture
def agent_process(tmp_path: Path) -> Iterator[Host]:
    """Start processes with an agent in ``tmp_path / "sockets"``."""
    started: list[AgentProcess] = []

    def start(lines: str = "", env: dict[str, str] | None = None, directory: Path | None = None) -> AgentProcess:
        started.append(AgentProcess(directory or tmp_path / "sockets", lines, env))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
