"""Sleeps inside a training process until somebody attaches.

`start` opens one UNIX socket and leaves one thread waiting on it: no hook is installed, nothing of torch or of the
recorder is imported, nothing runs. Only `start` from a client, that is the same user or root, wakes it.

>>> from bubblescope.attach import agent
>>> agent.start()  # doctest: +SKIP
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bubblescope._ranks import numbers_of_launcher
from bubblescope._version import __version__
from bubblescope.attach import protocol
from bubblescope.attach.protocol import ProtocolError

if TYPE_CHECKING:
    from bubblescope.attach.window import Window

log = logging.getLogger("bubblescope")

MAX_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
"""How long a client may take for its request."""

OWNER_VARIABLE = "BUBBLESCOPE_AGENT_OWNER"
"""``pid:rank`` of the rank that has an agent: its helper processes inherit rank variables, and must not have one."""

MOST_FRAMES = 60


def start() -> Path | None:
    """Have an agent in this process; its socket, or None when this process gets none (the reason is logged).

    Never raises, never waits. Calling it again gives the same socket, and logs the same reason no second time.
    """
    global _agent, _told
    with _starting:
        if _agent is not None and _agent.alive():
            return _agent.path
        if _inherited():
            return None
        try:
            _agent = Agent(protocol.directory_for(os.geteuid()))
        except (OSError, ProtocolError) as error:
            if str(error) != _told:
                _told = str(error)
                log.warning("bubblescope: nobody can attach to this process: %s", error)
            return None
        rank, _ = numbers_of_launcher()
        if rank is not None:
            os.environ[OWNER_VARIABLE] = f"{os.getpid()}:{rank}"
        return _agent.path


def stop() -> None:
    """Close the socket of this process's agent, if it has one; a recording that runs is ended first."""
    global _agent
    with _starting:
        if _agent is not None:
            _agent.close()
            _agent = None


def _inherited() -> bool:
    """Whether this is a helper (DataLoader worker, resource tracker) of a rank that has its own agent."""
    pid, _, rank = os.environ.get(OWNER_VARIABLE, "").partition(":")
    return bool(pid) and pid != str(os.getpid()) and rank == str(numbers_of_launcher()[0])


class Agent:
    """The socket and its thread. Raises OSError or ProtocolError when the socket cannot be made safely."""

    def __init__(self, directory: Path) -> None:
        protocol.make_directory(directory)
        _sweep(directory)
        self.path = protocol.socket_path(directory, os.getpid())
        self.window: Window | None = None
        self._pid = os.getpid()
        self._born = time.time()
        self._listener = _listen(self.path)
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._connections: dict[int, _Connection] = {}
        self._thread = threading.Thread(target=self._work, name="bubblescope-agent", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._remove)

    def alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    def close(self) -> None:
        """End the thread and remove the socket."""
        if self.window is not None:
            self.window.request_stop()
            self.window.join(10.0)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(5.0)
        self._remove()

    def _remove(self) -> None:
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _forget(self) -> None:
        """In a forked child the parent's sockets are closed, so that they end when the parent does."""
        for connection in list(self._connections.values()):
            connection.socket.close()
        for one in (self._listener, self._wake, self._waker):
            one.close()
        self._selector.close()

    # ---- the thread

    def _work(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._wake:
                    self._shut()
                    return
                try:
                    self._serve(key)
                except Exception as error:  # ours; one bad connection must not end the agent, nor reach the job
                    log.warning("bubblescope: the agent stumbled: %s: %s", type(error).__name__, error)
            self._expire()

    def _shut(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _patience(self) -> float | None:
        """Until when nothing needs doing: for ever, as long as nobody is connected."""
        if not self._connections:
            return None
        return max(0.0, min(c.deadline for c in self._connections.values()) - time.monotonic())

    def _serve(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept()
            return
        connection: _Connection = key.data
        request = connection.receive()
        if request is None:
            if connection.ended:
                self._drop(connection)
            return
        connection.answer(self._answer(connection, request))
        self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # gone again, or out of file descriptors: not ours to complain about in a training job
            time.sleep(0.01)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            accepted.close()
            return
        connection = _Connection(accepted)
        self._connections[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.deadline < now:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    # ---- commands

    def _answer(self, connection: _Connection, line: bytes) -> dict[str, Any]:
        try:
            peer = protocol.peer_of(connection.socket)
            if peer.uid not in (0, os.geteuid()):
                raise ProtocolError(f"user {peer.uid} may not attach to a process of user {os.geteuid()}")
            if len(line) > protocol.MAX_REQUEST_BYTES:
                raise ProtocolError(f"a request has at most {protocol.MAX_REQUEST_BYTES} bytes")
            request = protocol.decode(line)
            return {"ok": True, "version": protocol.PROTOCOL_VERSION, **self._do(request)}
        except ProtocolError as error:
            return {"ok": False, "code": "refused", "error": str(error)}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        command = protocol.command_of(request)
        if command == "status":
            return self._status()
        if command == "start":
            return self._begin(request)
        if command == "stop":
            return self._end()
        return {**self._status(), "threads": snapshot()}

    def _status(self) -> dict[str, Any]:
        if self.window is not None:
            self.window.keep_alive()
        return {
            **identity(),
            "since": self._born,
            "refuses": self._refusal(),
            "window": None if self.window is None else self.window.describe(),
        }

    def _begin(self, request: dict[str, Any]) -> dict[str, Any]:
        from bubblescope.attach.window import Window, limits_of

        limits = limits_of(request)
        if why := self._refusal():
            raise ProtocolError(why)
        self.window = Window(limits)
        return self._status()

    def _refusal(self) -> str:
        """Why a `start` would be refused now; "" when it would not."""
        if self.window is not None and not self.window.over:
            return "somebody is attached already: wait until that has ended"
        return cannot_record()

    def _end(self) -> dict[str, Any]:
        if self.window is not None:
            self.window.request_stop()
        return self._status()


class _Connection:
    """One client. Reads at most one request, and of that never more than is allowed."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.deadline = time.monotonic() + REQUEST_SECONDS
        self.ended = False
        self._received = b""

    def receive(self) -> bytes | None:
        """The request, or the start of one that is too long; None while it is incomplete or when it ended."""
        try:
            data = self.socket.recv(protocol.MAX_REQUEST_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return None
        self._received += data
        line, newline, _ = self._received.partition(b"\n")
        return line if newline or len(self._received) > protocol.MAX_REQUEST_BYTES else None

    def answer(self, message: dict[str, Any]) -> None:
        """Send it; a client that does not take it at once has lost it."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(1.0)
            self.socket.sendall(protocol.encode(message))


def _sweep(directory: Path) -> None:
    """Remove the sockets of processes that were killed. A number that is not in our /proc may live in a container that
    shares the folder: then its socket still answers."""
    for path in directory.glob("*.sock"):
        if Path(f"/proc/{path.stem}").exists():
            continue
        with contextlib.suppress(OSError, ProtocolError), socket.socket(socket.AF_UNIX) as probe:
            protocol.check_socket(path, os.geteuid())
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _listen(path: Path) -> socket.socket:
    """Under its name only once it listens: who sees the socket can connect to it."""
    beside = path.with_suffix(".new")
    for name in (path, beside):
        with contextlib.suppress(FileNotFoundError):
            # What an earlier process of the same number left behind; anything else than our own socket is refused.
            protocol.check_socket(name, os.geteuid())
            name.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(beside))
        beside.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        beside.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


# ---- what is said about this process


def identity() -> dict[str, Any]:
    """Rank, world, process, versions. Asks torch only if the job itself has imported it."""
    rank, world = _rank_and_world()
    torch = sys.modules.get("torch")
    return {
        "pid": os.getpid(),
        "rank": rank,
        "world": world,
        "framework": _framework(),
        "torch": str(getattr(torch, "__version__", "")) or None,
        "bubblescope": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "profiler": own_profiler_runs(),
        "recording": recording_into(),
    }


def _rank_and_world() -> tuple[int | None, int | None]:
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    return numbers_of_launcher()


def _framework() -> str | None:
    for module, name in (("megatron.core", "megatron"), ("deepspeed", "deepspeed"), ("torchtitan", "torchtitan")):
        if module in sys.modules:
            return name
    return "torch" if "torch" in sys.modules else None


def own_profiler_runs() -> bool:
    """Whether the job runs torch's profiler at the moment (a second one would segfault it)."""
    return bool(getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False))


def recording_into() -> str | None:
    """Folder that this process records into by itself, if it does."""
    recorder = sys.modules.get("bubblescope.capture.recorder")
    active = recorder.active() if recorder is not None else None
    return str(active.folder) if active is not None and active.running else None


def cannot_record() -> str:
    """Why this process cannot be recorded now; "" when it can."""
    if "torch" not in sys.modules:
        return "this process has not imported torch"
    if own_profiler_runs():
        return "the job's own torch.profiler is running: times taken now would be the profiler's"
    if folder := recording_into():
        return f"this process records already, into {folder}"
    return ""


def snapshot() -> list[dict[str, Any]]:
    """Where every Python thread is now: names of files and functions, and line numbers; no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = []
    for ident, frame in list(sys._current_frames().items())[:64]:
        if ident == threading.get_ident():
            continue
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MOST_FRAMES, lookup_lines=False)
        lines = [f"{one.name} ({one.filename[-120:]}:{one.lineno})" for one in stack]
        threads.append({"name": names.get(ident, "?"), "stack": lines})
    return threads


_starting = threading.Lock()
_agent: Agent | None = None
_told = ""
