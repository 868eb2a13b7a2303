"""Talks to the agent of one process: one connection for one request."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bubblescope.attach import protocol
from bubblescope.attach.protocol import ProtocolError
from bubblescope.errors import AttachError

TIMEOUT_SECONDS = 5.0


class NoAgent(AttachError):
    """That process has no agent, or none that we may trust."""


class WindowState(msgspec.Struct, frozen=True):
    """A window as its agent describes it. steps: recorded so far. pipeline: whether a schedule call, or pipeline work
    that the script marks, was seen. optimizer_steps: seen since the hooks went in."""

    state: str
    error: str
    steps: int
    pipeline: bool
    optimizer_steps: int
    stall_ms: float
    warnings: list[str]


def ask(path: Path, command: str, timeout_s: float = TIMEOUT_SECONDS, **fields: object) -> dict[str, Any]:
    """Send one command and give its answer.

    Raises NoAgent when nobody answers there in time or it is not who it should be, AttachError when it refuses.
    """
    ends = time.monotonic() + timeout_s
    try:
        with contextlib.closing(_connect(path, timeout_s)) as connection:
            connection.sendall(protocol.encode({"command": command, **fields}))
            answer = _message(_line(connection, ends))
    except (OSError, ProtocolError) as error:
        raise NoAgent(f"no agent answers: {error}", where=str(path)) from error
    if answer.get("ok") is not True:
        raise AttachError(f"the agent refuses: {printable(answer.get('error'))}", where=str(path))
    if answer.get("version") != protocol.PROTOCOL_VERSION:
        raise AttachError(
            f"the agent speaks version {printable(answer.get('version'))} of the protocol, we speak "
            f"{protocol.PROTOCOL_VERSION}",
            hint="attach with the bubblescope that the job has",
            where=str(path),
        )
    return answer


def ask_window(path: Path, command: str, **fields: Any) -> WindowState:
    """The same, for what becomes of the window there. Raises AttachError, too, for an answer that does not tell."""
    answer = ask(path, command, **fields)
    try:
        return msgspec.convert(answer.get("window"), WindowState)
    except msgspec.ValidationError as error:
        raise AttachError(
            f"the agent's answer makes no sense: {error}; it said {printable(answer)[:200]}", where=str(path)
        ) from error


def _connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to the owner of that socket, checked on both sides of it."""
    owner = path.parent.lstat().st_uid
    if owner != os.geteuid() and os.geteuid() != 0:
        raise ProtocolError(f"{path.parent} belongs to user {owner}")
    protocol.check_directory(path.parent, owner)
    protocol.check_socket(path, owner)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        peer = protocol.peer_of(connection)
        if peer.uid != owner or str(peer.pid) != path.stem:
            raise ProtocolError(f"process {peer.pid} of user {peer.uid} answers there, which is not the rank's own")
    except BaseException:
        connection.close()
        raise
    return connection


def _line(connection: socket.socket, ends: float) -> bytes:
    received = b""
    while b"\n" not in received:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        data = connection.recv(65536)
        if not data:
            raise ProtocolError("the answer was cut short")
        received += data
        if len(received) > protocol.MAX_ANSWER_BYTES:
            raise ProtocolError("the answer is too long")
    return received.partition(b"\n")[0]


def _message(line: bytes) -> dict[str, Any]:
    try:
        return protocol.decode(line)
    except ProtocolError as error:
        said = printable(line[:80].decode(errors="replace"))
        raise ProtocolError(f"what came back is {error}: {said}") from None


def printable(value: object) -> str:
    """What another process said, as text that cannot move a terminal's cursor."""
    return "".join(c for c in str(value)[:500] if c.isprintable())


def sockets(directory: Path) -> Iterator[tuple[int, Path]]:
    """(pid, socket) of every agent that may live in `directory`; those of processes that are gone are left out."""
    try:
        protocol.check_directory(directory, directory.lstat().st_uid)
        found = sorted(directory.iterdir())
    except (OSError, ProtocolError):
        return
    for path in found:
        if path.suffix == ".sock" and path.stem.isdecimal() and Path(f"/proc/{path.stem}").exists():
            yield int(path.stem), path
