"""Follows the files of a recording while they are written: by offset, new lines only, in bounded memory.

A file may be cut, replaced or removed, its last line may be unfinished, and ranks may appear at any time. Lines are
kept as the bytes they came as: decoded, a step takes several times that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from bubblescope.ingest import recording
from bubblescope.model import Notice
from bubblescope.model.notice import counted

MIB = 2**20
MOST_HELD = 64 * MIB
"""Bytes of lines in memory, all files together."""
MOST_HISTORY = 512 * MIB
"""Bytes of history that are read when following begins; of more, only the end."""
LEAST_CHUNK = 256 * 1024
LEAST_STEPS = 3
HEAD = 200
"""First bytes of a file by which it is known again."""


class Header(msgspec.Struct, tag="header", tag_field="kind"):
    rank: int
    clock: tuple[int, int]
    world: int | None = None
    host: str = ""
    job: str = ""
    options: dict[str, Any] = {}


class _Device(msgspec.Struct):
    type: str = ""
    index: int = 0


class Layout(msgspec.Struct, tag="layout", tag_field="kind"):
    pp_ranks: list[int] = []
    device: _Device = msgspec.field(default_factory=_Device)


class _Step(msgspec.Struct, tag="step", tag_field="kind"):
    step: int
    partial: bool = False
    eval: bool = False


class End(msgspec.Struct, tag="end", tag_field="kind"):
    error: str = ""


# Fields that are not named here are skipped without being made into objects.
_decoder = msgspec.json.Decoder(Header | Layout | _Step | End)


@dataclass
class RankFile:
    """One file so far. head: the header line. layouts: (first step after it, line). steps: (step, line) of whole
    training steps. Both ascending.

    heard: when it last grew, Unix seconds. first_step: of all that were read, None before any. offset: where the next
    line begins. searched: up to where its end was looked for. skipped_bytes: of history that was not read.
    bad_lines: lines that are no line of a recording.
    """

    path: Path
    heard: float
    modified: float
    header: Header | None = None
    layout: Layout | None = None
    end: End | None = None
    head: bytes = b""
    layouts: deque[tuple[int, bytes]] = field(default_factory=deque)
    steps: deque[tuple[int, bytes]] = field(default_factory=deque)
    first_step: int | None = None
    last_step: int = -1
    held: int = 0
    offset: int = 0
    searched: int = 0
    size: int = 0
    chunk: int = field(default_factory=lambda: LEAST_CHUNK)
    start: bytes = b""
    skipped_bytes: int = 0
    bad_lines: int = 0

    @property
    def behind(self) -> int:
        """Bytes that are in the file and were not read yet; none of a last line that is not finished."""
        return self.size - self.offset if self.searched < self.size else 0

    @property
    def unfinished(self) -> int:
        """Bytes of a last line without its end: cut off, or being written just now."""
        return 0 if self.behind else self.size - self.offset

    def forget(self, before_step: int) -> None:
        """Drop the lines of steps before this one."""
        while self.steps and self.steps[0][0] < before_step:
            self.held -= len(self.steps.popleft()[1])
        while len(self.layouts) > 1 and self.layouts[1][0] <= before_step:
            self.layouts.popleft()

    def text(self, first: int, last: int) -> bytes:
        """Header, layout and the steps first..last, as the recorder would have written them."""
        steps = [(step, line) for step, line in self.steps if first <= step <= last]
        lines = sorted([*self.layouts, *steps], key=itemgetter(0))  # stable: a layout before its first step
        return b"".join(line + b"\n" for line in (self.head, *(line for _, line in lines)))

    def take(self, line: bytes) -> None:
        """Add one whole line."""
        try:
            found = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.bad_lines += 1
            return
        if isinstance(found, _Step):
            self._take_step(found, line)
        elif isinstance(found, End):
            self.end = found
        elif isinstance(found, Layout):
            self.layout = found
            if self.layouts and self.layouts[-1][0] > self.last_step:
                self.layouts.pop()  # of an evaluation
            self.layouts.append((self.last_step + 1, line))
        elif self.header is None:
            self.header = found
            self.head = line
        else:
            self.bad_lines += 1

    def _take_step(self, found: _Step, line: bytes) -> None:
        if self.header is None or found.step <= self.last_step:
            self.bad_lines += 1
            return
        if found.partial or found.eval:
            return
        self.steps.append((found.step, line))
        self.held += len(line)
        self.last_step = found.step
        if self.first_step is None:
            self.first_step = found.step


class Follower:
    """All rank files of `path`: a file, a folder, or a folder whose ``recording`` folder holds them.

    `files` has every file that is there; `notices` says what was lost, with numbers.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        most_held: int = MOST_HELD,
        most_history: int = MOST_HISTORY,
    ) -> None:
        self.path = path
        self.files: dict[Path, RankFile] = {}
        self.replaced = 0
        self._now = now
        self._most_held = most_held
        self._most_history = most_history
        self._begun = False

    def begin_anew(self) -> None:
        """Forget what was read: the next poll reads every file from its beginning, as the first one did."""
        self.files.clear()
        self._begun = False

    def poll(self) -> bool:
        """Read what is new, as far as memory allows; whether anything changed."""
        found = self._paths()
        gone = self.files.keys() - set(found)
        for path in gone:
            del self.files[path]
        changed = bool(gone)
        skip_over = None if self._begun else self._most_history // max(1, len(found))
        for path in found:
            changed |= self._poll_file(path, skip_over)
        self._begun = self._begun or bool(self.files)
        return changed

    @property
    def behind(self) -> int:
        return sum(file.behind for file in self.files.values())

    @property
    def room(self) -> int:
        """Bytes that each file may hold."""
        return max(LEAST_CHUNK, self._most_held // max(1, len(self.files)))

    def full(self, file: RankFile) -> bool:
        """Whether reading of this file waits until its lines have been used. A step needs the two beside it, so three
        lines are held however long they are."""
        return file.held >= self.room and len(file.steps) >= LEAST_STEPS

    @property
    def notices(self) -> list[Notice]:
        made = []
        for path, file in sorted(self.files.items()):
            if file.skipped_bytes:
                text = f"{file.skipped_bytes / MIB:,.0f} MiB of history were not read; counting starts at step "
                made.append(Notice("history-skipped", f"{text}{file.first_step}", str(path)))
            if file.bad_lines:
                text = f"{counted(file.bad_lines, 'unreadable line')} left out"
                made.append(Notice("line-skipped", text, str(path)))
        if self.replaced:
            text = f"{counted(self.replaced, 'file')} cut or replaced while being followed, and read anew"
            made.append(Notice("file-replaced", text, str(self.path)))
        return made

    def _paths(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        for folder in (self.path, self.path / "recording"):
            try:
                # A pipe of that name would be waited for.
                found = sorted(p for p in folder.iterdir() if recording.is_rank_file(p) and p.is_file())
            except OSError:
                continue  # not there yet, or gone for a moment on a network file system
            if found:
                return found
        return []

    def _poll_file(self, path: Path, skip_over: int | None) -> bool:
        try:
            stat = path.stat()
            with path.open("rb") as stream:
                start = stream.read(HEAD)
                file = self._known(path, stat.st_size, stat.st_mtime, start)
                grew = stat.st_size > file.size
                if grew:
                    file.heard = min(self._now(), stat.st_mtime) if file.size == 0 else self._now()
                    file.size, file.modified, file.start = stat.st_size, stat.st_mtime, start
                if file.behind and not self.full(file):
                    if skip_over is not None and file.size > skip_over:
                        _skip_history(stream, file, skip_over)
                    _read_on(stream, file, self.room - file.held)
                return grew
        except OSError:
            return False  # removed between listing and opening, or a file system that hiccups: the next poll tells

    def _known(self, path: Path, size: int, modified: float, start: bytes) -> RankFile:
        """The state of this file; a new one when its beginning changed or it was cut.

        Not when its inode changed: a copy that is kept in step with rsync is a new file each time.
        """
        old = self.files.get(path)
        if old is not None:
            if size >= old.size and start.startswith(old.start):
                return old
            self.replaced += 1
        made = RankFile(path, heard=modified, modified=modified)
        self.files[path] = made
        return made


def _skip_history(stream: Any, file: RankFile, keep: int) -> None:
    """Take the header and the layout, then go to `keep` bytes before the end."""
    stream.seek(0)
    while file.layout is None and stream.tell() < MIB:
        line = stream.readline(MIB)
        if not line.endswith(b"\n"):
            break
        if b'"kind":"step"' in line[:100]:
            break
        file.take(line[:-1])
    stream.seek(file.size - keep)
    stream.readline()
    file.offset = stream.tell()
    file.skipped_bytes = file.offset


def _read_on(stream: Any, file: RankFile, room: int) -> None:
    """Take the next whole lines, at most about `room` bytes, at least one line however long."""
    stream.seek(file.offset)
    data = stream.read(min(file.behind, max(room, file.chunk)))
    file.searched = file.offset + len(data)
    cut = data.rfind(b"\n")
    if cut < 0:
        if len(data) >= file.chunk:
            file.chunk *= 2  # a line longer than a chunk
        return
    file.chunk = LEAST_CHUNK
    file.offset += cut + 1
    for line in data[:cut].split(b"\n"):
        if line.strip():
            file.take(line)


def newest_job(files: Iterable[RankFile]) -> tuple[dict[int, RankFile], list[RankFile]]:
    """({rank: its file}, the files left out) of the job that started last among files with a header.

    Where a rank has written several files (a restart under the same name), files that have not changed since the
    newest of these began belong to the run before.
    """
    known = [file for file in files if file.header is not None]
    if not known:
        return {}, []
    newest = max(known, key=_began)
    job = newest.header.job if newest.header is not None else ""
    ranks: dict[int, list[RankFile]] = {}
    for file in sorted(known, key=_began):
        if file.header is not None and file.header.job == job:
            ranks.setdefault(file.header.rank, []).append(file)
    restarted = max((_began(group[-1]) for group in ranks.values() if len(group) > 1), default=0)
    chosen = {rank: group[-1] for rank, group in sorted(ranks.items()) if group[-1].modified * 1e9 >= restarted}
    kept = {id(file) for file in chosen.values()}
    return chosen, [file for file in known if id(file) not in kept]


def _began(file: RankFile) -> int:
    return 0 if file.header is None else file.header.clock[1]
