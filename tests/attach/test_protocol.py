"""Requests are bounded JSON; the meeting place is a real folder that only its user can enter."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from bubblescope.attach import protocol
from bubblescope.attach.protocol import ProtocolError


@pytest.mark.parametrize("line", [b"", b"[]", b"3", b'"x"', b"{", b"\xff\xfe", b"[" * 20_000, b"cos\nsystem\n"])
def test_only_a_json_object_is_a_message(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode(line)


def test_a_message_comes_back_as_it_was_on_one_line() -> None:
    message = {"command": "start", "out": "/a\nb", "seconds": 1.5}
    encoded = protocol.encode(message)
    assert encoded.count(b"\n") == 1
    assert protocol.decode(encoded) == message


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    protocol.check_directory(folder, os.geteuid())
    folder.chmod(0o750)
    with pytest.raises(ProtocolError, match="0750"):
        protocol.check_directory(folder, os.geteuid())


def test_a_symbolic_link_to_a_good_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ProtocolError, match="symbolic link"):
        protocol.check_directory(tmp_path / "link", os.geteuid())
    with pytest.raises(ProtocolError, match="symbolic link"):
        protocol.make_directory(tmp_path / "link")


def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    with pytest.raises(ProtocolError, match="belongs to user"):
        protocol.check_directory(tmp_path / "s", os.geteuid() + 1)


def test_what_stands_in_the_place_of_a_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProtocolError, match="a file, not a socket"):
        protocol.check_socket(tmp_path / "file", os.geteuid())
    with socket.socket(socket.AF_UNIX) as real:
        real.bind(str(tmp_path / "real"))
    protocol.check_socket(tmp_path / "real", os.geteuid())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ProtocolError, match="symbolic link"):
        protocol.check_socket(tmp_path / "link", os.geteuid())


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert protocol.peer_of(one) == (os.getpid(), os.geteuid())
