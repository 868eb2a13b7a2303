"""One window for all ranks, against processes that poll as libkineto does."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bubblescope.attach import kineto
from bubblescope.attach.discover import Rank
from bubblescope.attach.early import Early
from bubblescope.attach.kineto import Plan
from bubblescope.errors import AttachError
from tests.support.sleeping import ROOT

CLIENT = """
import os, re, socket, struct, sys, time
from bubblescope.attach.kineto_daemon import message
folder, number, drops = sys.argv[1], sys.argv[2], int(sys.argv[3])
one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
one.bind(f"{folder}/client{number}")
one.settimeout(0.5)
while True:
    try:
        one.sendto(message("req", struct.pack("=iiqi", 3, 1, 7, os.getpid())), f"{folder}/dynolog")
        config = one.recv(65536)[40:].decode()
    except OSError:
        config = ""
    if config:
        drops -= 1
        if drops < 0:
            path = re.search("ACTIVITIES_LOG_FILE=(.*)", config)[1]
            with open(path.replace(".json", f"_{os.getpid()}.json"), "w") as file:
                file.write('{"traceEvents": []}')
    time.sleep(0.05)
"""
"""A process that drops its first requests, as Kineto does with those whose start has passed."""

Clients = Callable[..., list[Rank]]


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    monkeypatch.setattr(kineto, "MARGIN_SECONDS", 0.1)
    monkeypatch.setattr(kineto, "WARMUP_SECONDS", 0)
    monkeypatch.setattr(kineto, "EXPORT_SECONDS", 1.0)
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="bsk-") as short:
        conf = Path(short, "kineto.conf")
        conf.write_text("ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n")

        def start(*drops: int) -> list[Rank]:
            for number, count in enumerate(drops):
                command = [sys.executable, "-c", CLIENT, short, str(number), str(count)]
                running.append(subprocess.Popen(command, cwd=ROOT))
            environ = {"KINETO_IPC_SOCKET_DIR": short, "KINETO_CONFIG": str(conf)}
            uid = Path(short).stat().st_uid
            return [Rank(p.pid, r, len(drops), uid, "torch", "j", environ=environ) for r, p in enumerate(running)]

        yield start
        for one in running:
            one.kill()
            one.wait()


def test_a_rank_that_was_too_late_for_the_window_gets_another_with_all_the_others(
    clients: Clients, tmp_path: Path
) -> None:
    said: list[str] = []
    made = kineto.collect(clients(0, 1), Plan(tmp_path, seconds=0.1), Early(), said.append)
    assert [path.name for path in made.files] == ["rank-0.pt.trace.json", "rank-1.pt.trace.json"]
    assert not made.lost
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.pt.trace.json", "rank-1.pt.trace.json"]
    assert [text for text in said if "Kineto dropped the request" in text and "must not end within" in text]


def test_a_rank_that_drops_every_request_is_named_and_the_others_have_their_traces(
    clients: Clients, tmp_path: Path
) -> None:
    ranks = clients(0, 99)
    made = kineto.collect(ranks, Plan(tmp_path, seconds=0.1), Early(), lambda _: None)
    assert [path.name for path in made.files] == ["rank-0.pt.trace.json"]
    assert list(made.lost) == [ranks[1].label]


def test_when_no_rank_traces_the_reasons_are_said(clients: Clients, tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="Kineto dropped the request"):
        kineto.collect(clients(99), Plan(tmp_path, seconds=0.1), Early(), lambda _: None)
