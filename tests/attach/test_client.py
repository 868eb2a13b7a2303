"""Whatever answers in an agent's place, the client says what it was, in time, and takes none of it for an answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from bubblescope.attach import client, discover, process, protocol, session
from bubblescope.errors import AttachError
from tests.attach.conftest import Host
from tests.support.attach_jobs import wait_until

OK = b'{"ok":true,"version":%d,"window":%%s}\n' % protocol.PROTOCOL_VERSION


@contextmanager
def answering(folder: Path, serve: Callable[[socket.socket], object]) -> Iterator[Path]:
    """The socket of something that this process passes off as its agent."""
    directory = folder / "s"
    directory.mkdir(mode=0o700)
    path = directory / f"{os.getpid()}.sock"
    with ExitStack() as stack:
        mine = stack.enter_context(socket.socket(socket.AF_UNIX))
        mine.bind(str(path))
        mine.listen()

        def loop() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    accepted, _ = mine.accept()
                    with accepted, suppress(OSError):
                        accepted.recv(1000)
                        serve(accepted)

        threading.Thread(target=loop, daemon=True).start()
        stack.callback(mine.shutdown, socket.SHUT_RDWR)
        yield path


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"a")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 1000)


def test_an_answer_in_drops_is_not_waited_for_longer_than_any_other(tmp_path: Path) -> None:
    with answering(tmp_path, drip) as path, pytest.raises(client.NoAgent, match="timed out"):
        client.ask(path, "status", timeout_s=0.5)


def test_an_answer_without_end_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_ANSWER_BYTES", 1000)
    with answering(tmp_path, flood) as path, pytest.raises(client.NoAgent, match="too long"):
        client.ask(path, "status")


def test_what_is_no_answer_is_shown_without_what_would_move_the_cursor(tmp_path: Path) -> None:
    with (
        answering(tmp_path, lambda one: one.sendall(b"\x1b[31mjunk\xff\n")) as path,
        pytest.raises(client.NoAgent, match=r"what came back is not JSON: \[31mjunk"),
    ):
        client.ask(path, "status")


@pytest.mark.parametrize(
    ("window", "why"),
    [
        (b"null", "Expected `object`, got `null`"),
        (b'{"state":"done","out":7}', "missing required field `error`"),
        (
            b'{"state":"done","error":"","steps":"7","pipeline":true,"optimizer_steps":1,"stall_ms":0,"warnings":[]}',
            r"Expected `int`, got `str` - at `\$\.steps`",
        ),
    ],
)
def test_a_window_that_makes_no_sense_is_refused_with_what_was_said(window: bytes, why: str, tmp_path: Path) -> None:
    with (
        answering(tmp_path, lambda one: one.sendall(OK % window)) as path,
        pytest.raises(AttachError, match=f"the agent's answer makes no sense: .*{why}.*; it said {{'ok': True"),
    ):
        client.ask_window(path, "status")


def trouble(pid: int) -> str:
    """What attaching to it says."""
    ranks = [discover.one(pid)]
    for via in ("auto", "agent", "inject"):
        with pytest.raises(AttachError) as caught:
            session.choose(ranks, via)
        assert caught.value.what == f"process {pid} has an agent that cannot be used: {ranks[0].trouble}"
    return ranks[0].trouble


def test_a_stopped_process_with_an_agent_is_called_stopped(agent_process: Host) -> None:
    one = agent_process()
    one.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.stopped(one.pid), "stopped")
    try:
        assert trouble(one.pid).startswith("the process is stopped")
    finally:
        one.process.send_signal(signal.SIGCONT)
    assert discover.one(one.pid).agent == one.socket


def test_what_the_agent_answered_is_the_reason(agent_process: Host) -> None:
    other = agent_process("import bubblescope.attach.protocol as p; p.PROTOCOL_VERSION = 99")
    assert other.echo()
    assert trouble(other.pid).startswith("the agent speaks version 99")
    assert trouble(other.pid).endswith("(attach with the bubblescope that the job has)")
    mute = agent_process("from bubblescope.attach.agent import Agent; Agent._status = lambda self: 1 / 0")
    assert mute.echo()
    assert trouble(mute.pid) == "no agent answers: timed out"
    refusing = agent_process(
        "from bubblescope.attach.agent import Agent, ProtocolError\n"
        "def no(self): raise ProtocolError('not today')\n"
        "Agent._status = no"
    )
    assert refusing.echo()
    assert trouble(refusing.pid) == "the agent refuses: not today"


def test_where_only_a_dead_socket_is_left_the_process_was_not_prepared(agent_process: Host) -> None:
    one = agent_process(
        "from bubblescope.attach.agent import _agent; _agent._remove = lambda: None; _agent.close(); print()"
    )
    assert one.echo("") or one.socket.exists()
    found = discover.one(one.pid)
    assert (found.agent, found.trouble) == (None, "")
