"""What agent and client say to each other, and the folder where they meet.

One connection carries one request: a JSON object on one line, at most `MAX_REQUEST_BYTES`; the answer is one line
too. Nothing that arrives is ever executed, unpickled or used as a name of a function. The folder is the user's
alone (0700), and each end checks with the kernel (SO_PEERCRED) who the other one is.

Standard library only: this is imported in the training process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PROTOCOL_VERSION = 2
MAX_REQUEST_BYTES = 16 * 1024
MAX_ANSWER_BYTES = 256 * 1024
COMMANDS: dict[str, frozenset[str]] = {
    # name: fields that a request may have beside `command`
    "status": frozenset(),
    "start": frozenset({"out", "steps", "seconds", "lease_s"}),
    "stop": frozenset(),
    "snapshot": frozenset(),
}
DIRECTORY_VARIABLE = "BUBBLESCOPE_SOCKET_DIR"


class ProtocolError(ValueError):
    """The other side broke the rules above, or is not who it should be."""


class Peer(NamedTuple):
    """Who is at the other end of a connection, as the kernel says."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected, or listens."""
    size = struct.calcsize("3i")
    pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


def encode(message: Mapping[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The object on one line. Raises ProtocolError for anything else.

    >>> decode(b'{"command": "status"}')
    {'command': 'status'}
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ProtocolError("not JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message


def command_of(request: Mapping[str, Any]) -> str:
    """What is asked for. Raises ProtocolError for an unknown command, and for a field that it does not have.

    >>> command_of({"command": "start", "out": "/r", "steps": 5})
    'start'
    """
    command = request.get("command")
    if not isinstance(command, str) or command not in COMMANDS:
        raise ProtocolError(f"no such command; there are: {', '.join(COMMANDS)}")
    if extra := set(request) - {"command"} - COMMANDS[command]:
        fields = ", ".join(sorted(COMMANDS[command])) or "no fields"
        raise ProtocolError(f"unknown field {min(extra)[:40]!r}; a {command} request has {fields}")
    return command


# ---- where they meet


def directory_for(uid: int, environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the sockets of that user's ranks.

    Under /tmp, as tmux and ssh-agent do it: $XDG_RUNTIME_DIR is removed when its user logs out, and the training
    that this is for runs on for days after that. $BUBBLESCOPE_SOCKET_DIR overrules it.

    >>> str(directory_for(1000, {}))
    '/tmp/bubblescope-1000'
    """
    given = (os.environ if environ is None else environ).get(DIRECTORY_VARIABLE, "")
    return Path(given) if given else Path(f"/tmp/bubblescope-{uid}")


def socket_path(directory: Path, pid: int) -> Path:
    return directory / f"{pid}.sock"


def check_directory(directory: Path, uid: int) -> None:
    """Raise ProtocolError unless it is a real folder that only `uid` can enter, OSError when there is none."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ProtocolError(f"{directory} is {_kind(found.st_mode)}, not a folder")
    if found.st_uid != uid:
        raise ProtocolError(f"{directory} belongs to user {found.st_uid}, not to user {uid}")
    if found.st_mode & 0o077:
        raise ProtocolError(f"{directory} is open to others (mode {stat.S_IMODE(found.st_mode):04o}, wanted 0700)")


def make_directory(directory: Path) -> None:
    """Make it where it is missing, then check it. Raises ProtocolError or OSError."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_directory(directory, os.geteuid())


def check_socket(path: Path, uid: int) -> None:
    """Raise ProtocolError unless `path` is itself a socket of `uid`, OSError when there is none."""
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode):
        raise ProtocolError(f"{path} is {_kind(found.st_mode)}, not a socket")
    if found.st_uid != uid:
        raise ProtocolError(f"{path} belongs to user {found.st_uid}, not to user {uid}")


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a folder" if stat.S_ISDIR(mode) else "a socket" if stat.S_ISSOCK(mode) else "a file"
