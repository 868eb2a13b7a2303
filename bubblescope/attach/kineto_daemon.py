"""The daemon's end of the channel that libkineto polls in jobs started with ``KINETO_USE_DAEMON=1``.

Layout as in pytorch/kineto ``libkineto/src/IpcFabricConfigClient.cpp`` and dynolog's IPCMonitor: one datagram is
``u64 size; char type[32]``, then the payload, in native byte order.

A job is hurt by two things, and neither can happen here: an answer from any socket but the bound endpoint ends it,
and a second daemon on a path takes the jobs of the first away in silence.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bubblescope.attach import process
from bubblescope.errors import AttachError

NAME = "dynolog"
DIRECTORY_VARIABLE = "KINETO_IPC_SOCKET_DIR"
MOST_BYTES = 4096
"""Requests have some 60 bytes and 8 for each ancestor of the process; longer ones are not Kineto's."""

READY = 2
"""Bit of a request's type: ready for an activity trace. Without it one is running, ours or the job's own."""

_HEADER = struct.Struct("=Q32s")
_CONTEXT = struct.Struct("=iiq")
_REQUEST = struct.Struct("=iiq")
_COUNT = struct.Struct("=i")
_CREDENTIALS = struct.Struct("=3i")
_MOST_PIDS = 64


@dataclass(frozen=True)
class Request:
    """One poll. kind: "ctxt" (registration) or "req". ready: may be given a trace. pids: it and its ancestors."""

    kind: str
    pids: tuple[int, ...]
    ready: bool = False
    job: int = 0


def parse(datagram: bytes) -> Request | None:
    """None for anything that is not exactly such a message.

    >>> parse(b"garbage") is None
    True
    >>> body = struct.pack("=iiq2i", 3, 2, 7, 100, 50)
    >>> parse(struct.pack("=Q32s", len(body), b"req") + body)
    Request(kind='req', pids=(100, 50), ready=True, job=7)
    """
    if not _HEADER.size <= len(datagram) <= MOST_BYTES:
        return None
    size, name = _HEADER.unpack_from(datagram)
    body = datagram[_HEADER.size :]
    if size != len(body):
        return None
    kind = name.rstrip(b"\0")
    if kind == b"ctxt" and len(body) == _CONTEXT.size:
        _gpu, pid, job = _CONTEXT.unpack(body)
        return Request("ctxt", (pid,), job=job) if pid > 0 else None
    if kind == b"req" and len(body) >= _REQUEST.size:
        wanted, count, job = _REQUEST.unpack_from(body)
        if not 1 <= count <= _MOST_PIDS or len(body) != _REQUEST.size + 4 * count:
            return None
        pids = struct.unpack_from(f"={count}i", body, _REQUEST.size)
        return Request("req", pids, bool(wanted & READY), job) if pids[0] > 0 else None
    return None


def message(kind: str, payload: bytes) -> bytes:
    """A datagram of ours."""
    return _HEADER.pack(len(payload), kind.encode()) + payload


@dataclass
class Poll:
    """What a process last said, and how often it polled. at: monotonic seconds. ready: it can take a trace."""

    at: float
    ready: bool
    polls: int = 1


@dataclass
class State:
    """Shared between the endpoint's thread and who asks. pending: {pid: config}; taken: {pid: when}."""

    seen: dict[int, Poll] = field(default_factory=dict)
    pending: dict[int, str] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)
    ignored: int = 0


class Endpoint:
    """One bound endpoint and the thread that answers on it. Use as a context manager.

    directory: `KINETO_IPC_SOCKET_DIR` of the jobs, None for the abstract name. uids: whose processes are heard.
    Raises AttachError when another daemon has it.
    """

    def __init__(self, directory: str | None, uids: frozenset[int]) -> None:
        self.directory = directory
        self._uids = uids
        self._lock = threading.Lock()
        self._state = State()
        self._socket = _bind(directory)
        self._inode = _inode(directory)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._work, name="bubblescope-kineto", daemon=True)
        self._thread.start()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering. Jobs go on polling, as they did before."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(5.0)
        for one in (self._socket, self._wake, self._waker):
            one.close()
        # Only our own file: another daemon may have put its own in place.
        if self.directory is not None and self._inode is not None and _inode(self.directory) == self._inode:
            with contextlib.suppress(OSError):
                _path(self.directory).unlink()

    def offer(self, configs: Mapping[int, str]) -> None:
        """Give each of these processes its config at its next poll, once."""
        with self._lock:
            self._state.pending.update(configs)
            for pid in configs:
                self._state.taken.pop(pid, None)

    def withdraw(self) -> None:
        """Take back what nobody has fetched."""
        with self._lock:
            self._state.pending.clear()

    def seen(self) -> dict[int, Poll]:
        """Processes that polled, so far."""
        with self._lock:
            return dict(self._state.seen)

    def taken(self) -> dict[int, float]:
        """Processes that have fetched their newest config, and when (monotonic seconds)."""
        with self._lock:
            return dict(self._state.taken)

    @property
    def ignored(self) -> int:
        """Datagrams that were not a Kineto client's, or not of a process that we may hear."""
        return self._state.ignored

    # ---- the thread

    def _work(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake in ready:
                    return
                self._one()

    def _one(self) -> None:
        try:
            data, extra, flags, sender = self._socket.recvmsg(MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            return
        request = None if flags & socket.MSG_TRUNC else parse(data)
        pid, uid = _sender(extra)
        # The kernel says who sent it: nobody speaks for another process, and only this job's user is heard.
        if request is None or not sender or uid not in self._uids or pid != request.pids[0]:
            self._state.ignored += 1
            return
        text = "" if request.kind == "ctxt" else self._config(request)
        answer = message("ctxt", _COUNT.pack(1)) if request.kind == "ctxt" else message("req", text.encode())
        try:
            self._socket.sendto(answer, socket.MSG_DONTWAIT, sender)
        except OSError:  # gone, or its buffer is full: it asks again
            return
        if text:
            with self._lock:
                self._state.pending.pop(request.pids[0], None)
                self._state.taken[request.pids[0]] = time.monotonic()

    def _config(self, request: Request) -> str:
        """What waits for that process, "" for nothing; it stays until it has been sent."""
        pid, now = request.pids[0], time.monotonic()
        with self._lock:
            before = self._state.seen.get(pid)
            self._state.seen[pid] = Poll(now, request.ready, 1 if before is None else before.polls + 1)
            return self._state.pending.get(pid, "") if request.ready else ""


def _sender(extra: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            pid, uid, _gid = _CREDENTIALS.unpack_from(data)
            return pid, uid
    return -1, -1


def _path(directory: str) -> Path:
    return Path(directory) / NAME


def _inode(directory: str | None) -> int | None:
    try:
        return None if directory is None else _path(directory).lstat().st_ino
    except OSError:
        return None


def _bind(directory: str | None) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        bound.setblocking(False)
        if directory is None:
            bound.bind(f"\0{NAME}\0")
        else:
            _clear(directory)
            bound.bind(str(_path(directory)))
            _path(directory).chmod(0o600)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise _owned(directory) from error
        raise AttachError(
            f"the profiler daemon's endpoint cannot be opened: {error.strerror or error}", where=directory or ""
        ) from error
    except BaseException:
        bound.close()
        raise
    return bound


def _owned(directory: str | None) -> AttachError:
    where = f"{_path(directory)}" if directory else "the abstract name 'dynolog'"
    pid, name = _owner(directory)
    if name == "bubblescope":
        return AttachError(
            f"another bubblescope (process {pid}) owns the endpoint that the jobs poll, {where}",
            hint="one Kineto window at a time: wait until that one has ended, or end it with Ctrl-C or SIGTERM",
        )
    who = f"process {pid} ({name})" if pid else "a profiler daemon (dynolog?)"
    return AttachError(
        f"{who} owns the endpoint that the jobs poll, {where}",
        hint="ask that daemon for the traces: dyno gputrace --log-file FILE, then bubblescope analyze FILE…; "
        "or attach by the agent",
    )


def _owner(directory: str | None) -> tuple[int, str]:
    """The process that has the endpoint open, and its program; (0, "") when it may not be looked at."""
    wanted = f"@{NAME}@" if directory is None else str(_path(directory))
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
    links = {f"socket:[{row[6]}]" for row in rows if len(row) == 8 and row[7] == wanted}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if any(str(fd.readlink()) in links for fd in (entry / "fd").iterdir()):
                command = process.look(int(entry.name)).command
                return int(entry.name), Path(process.program(command)).name
        except OSError:  # gone meanwhile, or another user's
            continue
    return 0, ""


def _clear(directory: str) -> None:
    """Remove what a dead daemon left. Raises AttachError when a daemon lives there or it is not a safe place."""
    path = _path(directory)
    try:
        folder = Path(directory).stat()
        if folder.st_mode & 0o022:
            raise AttachError(
                f"{DIRECTORY_VARIABLE} is open to others (mode {stat.S_IMODE(folder.st_mode):04o}): anybody who can "
                "write there can end the job with a wrong answer",
                hint="start jobs with a folder of mode 0700 of their own",
                where=directory,
            )
        found = path.lstat()
    except FileNotFoundError as error:
        if Path(directory).is_dir():
            return
        raise AttachError(f"the job's {DIRECTORY_VARIABLE} does not exist", where=directory) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise AttachError("something that is not a socket stands in the daemon's place", where=str(path))
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            if found.st_uid not in (os.geteuid(), folder.st_uid):
                raise AttachError("another user's socket stands in the daemon's place", where=str(path)) from None
            path.unlink()
            return
    raise _owned(directory)
