"""The daemon's end answers Kineto's datagrams, and nothing else, from the bound endpoint only."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bubblescope.attach import kineto_daemon
from bubblescope.attach.kineto_daemon import Endpoint, Request, message, parse
from bubblescope.errors import AttachError
from tests.support.sleeping import ROOT

MINE = frozenset({os.geteuid()})


def request(pid: int, kind: int = 3, *ancestors: int) -> bytes:
    pids = (pid, *ancestors)
    return message("req", struct.pack(f"=iiq{len(pids)}i", kind, len(pids), 77, *pids))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "k"
    made.mkdir(mode=0o700)
    return made


class Job:
    """A process that polls, as libkineto does: a bound datagram socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "client"))
        self.socket.settimeout(2)
        self.daemon = str(folder / "dynolog")

    def send(self, data: bytes) -> None:
        self.socket.sendto(data, self.daemon)

    def ask(self, data: bytes) -> tuple[bytes, str]:
        self.send(data)
        answer, sender = self.socket.recvfrom(65536)
        return answer, sender


def test_registration_and_an_idle_poll_are_answered_from_the_bound_address(folder: Path) -> None:
    job = Job(folder)
    with Endpoint(str(folder), MINE):
        answer, sender = job.ask(message("ctxt", struct.pack("=iiq", 0, os.getpid(), 77)))
        assert answer == message("ctxt", struct.pack("=i", 1))
        assert sender == str(folder / "dynolog")
        answer, sender = job.ask(request(os.getpid()))
        assert answer == message("req", b"")
        assert sender == str(folder / "dynolog")


def test_the_abstract_endpoint_has_the_name_that_kineto_knows_and_one_owner() -> None:
    # One test, as two that run at the same time would be each other's second daemon.
    with Endpoint(None, MINE), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as job:
        job.bind(f"\0test-{os.getpid()}")
        job.settimeout(2)
        job.sendto(request(os.getpid()), "\0dynolog\0")
        with pytest.raises(AttachError, match="owns the endpoint"):
            Endpoint(None, MINE)
        answer, sender = job.recvfrom(65536)
    assert answer == message("req", b"")
    assert sender == b"\0dynolog\0"


def test_a_config_is_handed_over_once_and_only_to_a_process_that_is_ready(folder: Path) -> None:
    job = Job(folder)
    with Endpoint(str(folder), MINE) as endpoint:
        endpoint.offer({os.getpid(): "A=1\n"})
        assert job.ask(request(os.getpid(), 1))[0] == message("req", b"")
        assert endpoint.seen()[os.getpid()].ready is False
        assert job.ask(request(os.getpid(), 3))[0] == message("req", b"A=1\n")
        assert job.ask(request(os.getpid(), 3))[0] == message("req", b"")
        assert set(endpoint.taken()) == {os.getpid()}


def test_a_withdrawn_config_is_not_handed_over(folder: Path) -> None:
    job = Job(folder)
    with Endpoint(str(folder), MINE) as endpoint:
        endpoint.offer({os.getpid(): "A=1\n"})
        endpoint.withdraw()
        assert job.ask(request(os.getpid()))[0] == message("req", b"")


def test_nobody_speaks_for_another_process(folder: Path) -> None:
    job = Job(folder)
    with Endpoint(str(folder), MINE) as endpoint:
        endpoint.offer({1: "A=1\n"})
        job.send(request(1))
        job.ask(request(os.getpid()))
        assert endpoint.ignored == 1
        assert 1 not in endpoint.seen()


def test_other_users_are_not_heard(folder: Path) -> None:
    job = Job(folder)
    with Endpoint(str(folder), frozenset({os.geteuid() + 1})) as endpoint:
        job.send(request(os.getpid()))
        time.sleep(0.2)
        assert endpoint.ignored == 1
        assert endpoint.seen() == {}


def test_100000_garbage_datagrams_are_ignored_and_the_next_poll_is_answered(folder: Path) -> None:
    job = Job(folder)
    good = request(os.getpid())
    garbage = [
        b"",
        b"x" * 39,
        os.urandom(64),
        good[:-1],
        good + b"\0",
        message("req", struct.pack("=iiq", 3, 2**31 - 1, 0)),
        message("req", struct.pack("=iiqi", 3, -1, 0, 5)),
        message("nope", b"1234"),
        b"y" * 60_000,
        struct.pack("=Q32s", 2**64 - 1, b"req"),
    ]
    with Endpoint(str(folder), MINE) as endpoint:
        for i in range(100_000):
            job.send(garbage[i % len(garbage)])
        answer, _ = job.ask(good)
        assert answer == message("req", b"")
        assert endpoint.ignored == 100_000


def test_a_client_that_is_gone_or_does_not_listen_does_not_stop_it(folder: Path) -> None:
    with Endpoint(str(folder), MINE):
        lost = Job(folder)
        lost.send(request(os.getpid()))
        lost.socket.close()
        (folder / "client").unlink()
        deaf = Job(folder)
        for _ in range(2000):
            deaf.send(request(os.getpid()))
        deaf.socket.close()
        (folder / "client").unlink()
        assert Job(folder).ask(request(os.getpid()))[0] == message("req", b"")


def test_a_daemon_that_is_there_keeps_its_endpoint(folder: Path) -> None:
    with Endpoint(str(folder), MINE):
        with pytest.raises(AttachError, match="owns the endpoint") as caught:
            Endpoint(str(folder), MINE)
        assert "dyno gputrace" in caught.value.hint
        assert Job(folder).ask(request(os.getpid()))[0] == message("req", b"")


OWNER = (
    "import os, sys; from bubblescope.attach.kineto_daemon import Endpoint\n"
    "with Endpoint(sys.argv[1] or None, frozenset({os.geteuid()})): print(flush=True); sys.stdin.read()"
)


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
@pytest.mark.parametrize(
    ("program", "said", "hint"),
    [("bubblescope", "another bubblescope (process {pid})", "wait"), ("dynologd", "process {pid} (dynologd)", "dyno")],
)
def test_who_owns_the_endpoint_is_named(
    program: str, said: str, hint: str, abstract: bool, folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / program
    script.write_text(OWNER)
    where = None if abstract else str(folder)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script), where or ""], stdin=-1, stdout=-1, env=env) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(AttachError) as caught:
            Endpoint(where, MINE)
        owner.communicate()
    assert said.format(pid=owner.pid) in caught.value.what
    assert hint in caught.value.hint


def test_what_a_dead_daemon_left_is_replaced_and_ours_is_removed(folder: Path) -> None:
    script = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(folder / "dynolog")], check=True)
    assert (folder / "dynolog").is_socket()
    with Endpoint(str(folder), MINE):
        assert Job(folder).ask(request(os.getpid()))[0] == message("req", b"")
    assert not (folder / "dynolog").exists()


def test_a_daemon_that_came_later_keeps_its_file(folder: Path) -> None:
    endpoint = Endpoint(str(folder), MINE)
    (folder / "dynolog").unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as later:
        later.bind(str(folder / "dynolog"))
        endpoint.close()
        assert (folder / "dynolog").is_socket()


def test_a_link_or_file_in_its_place_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "dynolog").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AttachError, match="not a socket"):
        Endpoint(str(folder), MINE)
    (folder / "dynolog").unlink()
    (folder / "dynolog").write_text("precious")
    with pytest.raises(AttachError, match="not a socket"):
        Endpoint(str(folder), MINE)
    assert (folder / "dynolog").read_text() == "precious"


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(AttachError, match="0777"):
        Endpoint(str(folder), MINE)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="does not exist"):
        Endpoint(str(tmp_path / "no"), MINE)


def test_requests_with_ancestors_are_read_whole() -> None:
    assert parse(request(10, 2, 9, 8)) == Request("req", (10, 9, 8), True, 77)
    assert parse(request(10, 1)) == Request("req", (10,), False, 77)
    assert parse(request(-3)) is None
    assert parse(b"z" * (kineto_daemon.MOST_BYTES + 1)) is None
