"""Nsight Systems exports (``nsys export --type sqlite``) -> Run. Several files are one job."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from bubblescope.errors import InputError
from bubblescope.ingest.decompress import open_binary
from bubblescope.ingest.events import CommArgs
from bubblescope.ingest.identity import rank_in_name
from bubblescope.ingest.kineto_assemble import assemble
from bubblescope.ingest.nccl_payload import Call
from bubblescope.ingest.nsys_tables import OURS, SQL_ERRORS, Process, processes
from bubblescope.ingest.options import DEFAULT, ReadOptions, beyond_limit
from bubblescope.ingest.parallel import Executor, over_files
from bubblescope.ingest.part import Part, merge
from bubblescope.model import Notice, Run

_MAGIC = b"SQLite format 3\0"
_SUFFIX = re.compile(r"\.(sqlite3?|db|nsys-rep|qdrep)$", re.IGNORECASE)
_REPORT = re.compile(r"\.(nsys-rep|qdrep)$", re.IGNORECASE)


def looks_like(name: str) -> bool:
    """Whether a file in a folder is worth opening, by its name."""
    return _SUFFIX.search(PurePosixPath(name).name) is not None


def can_read(path: Path) -> bool:
    """Whether the file at `path` is an export, or the report that one must be made of (`read` says how)."""
    return path.is_file() and sniff(str(path))


def sniff(path: str) -> bool:
    """As `can_read`, for any address."""
    if _REPORT.search(path):
        return True
    try:
        with open_binary(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        with _opened(path, DEFAULT) as connection:
            found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except InputError:
        return bool(looks_like(path))
    except SQL_ERRORS:
        return True
    return any(table in found for table in OURS)


def read(paths: Sequence[str | Path], options: ReadOptions = DEFAULT, executor: Executor | None = None) -> Run:
    """One Run of all processes that used a GPU, in all files. Raises InputError when nothing can be used."""
    notices: list[Notice] = []
    found: list[_File] = []
    errors: list[InputError] = []
    files = [str(p) for p in paths]
    for path, result in over_files(functools.partial(read_file, options=options), files, executor):
        if isinstance(result, InputError):
            errors.append(result)
            notices.append(Notice("file-unreadable", f"{result.what}; it is left out", result.where or path))
        else:
            found.append(result)
    if not found:
        raise errors[0] if errors else InputError("no exports were given")
    found, copies = _without_copies(found)
    notices.extend(copies)
    ranked, said = _with_ranks(found)
    _resolve_peers(ranked)
    parts = []
    for one in ranked:
        try:
            parts.append(_part(one, options))
        except InputError as error:
            errors.append(error)
            what = f"rank {one.rank} (process {one.process.pid}): {error.what}; it is left out"
            notices.append(Notice("process-unreadable", what, error.where))
    if not parts:
        raise errors[0]
    notices = [*notices, *said, *(n for f in found for n in f.notices)]
    return merge(parts, notices, "nsys")


@dataclass(frozen=True, eq=False)
class _File:
    path: str
    processes: tuple[Process, ...]
    notices: tuple[Notice, ...]


@dataclass(frozen=True, eq=False)
class _Ranked:
    rank: int
    how: str
    process: Process
    world: int | None


def read_file(path: str, options: ReadOptions = DEFAULT) -> _File:
    """One export. Raises InputError when it is none, or has no GPU events."""
    if _REPORT.search(path):
        raise InputError(
            "an .nsys-rep report is nsys's own binary format",
            hint=f"export it: nsys export --type sqlite --include-blobs=true {PurePosixPath(path).name}",
            where=path,
        )
    try:
        with _opened(path, options) as connection:
            found, notices = processes(connection, path, options)
    except SQL_ERRORS as error:
        raise InputError(
            f"the SQLite file cannot be read ({error})",
            hint="export it once more: nsys export --type sqlite",
            where=path,
        ) from error
    if not found:
        raise InputError(
            "no GPU events in the export: how long the devices were idle cannot be known",
            hint="record with nsys profile --trace=cuda,nvtx",
            where=path,
        )
    return _File(path, tuple(found), tuple(notices))


def _without_copies(files: list[_File]) -> tuple[list[_File], list[Notice]]:
    """Every process once: where two files hold the same events of one process, that of the first is used."""
    seen: list[tuple[str, Process]] = []
    out, notices = [], []
    for file in files:
        own = []
        for process in file.processes:
            path = next((path for path, other in seen if process.is_copy_of(other)), None)
            if path is None:
                own.append(process)
                continue
            message = f"process {process.pid} is in {path} too, with the same events; it is used once"
            notices.append(Notice("rank-duplicate", message, file.path))
        seen.extend((file.path, process) for process in own)
        if own:
            out.append(replace(file, processes=tuple(own)))
    return out, notices


@contextlib.contextmanager
def _opened(path: str, options: ReadOptions) -> Iterator[sqlite3.Connection]:
    """The database, read only; an address is copied first, because SQLite reads files."""
    with contextlib.ExitStack() as stack:
        local = path
        if "://" in path:
            target = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".sqlite"))
            with open_binary(path) as source:
                shutil.copyfileobj(source, target)
            target.flush()
            local = target.name
        if Path(local).stat().st_size > options.max_bytes:
            raise beyond_limit(f"the file is larger than {options.max_bytes:,} bytes", "bytes", path)
        connection = sqlite3.connect(f"file:{quote(str(Path(local).absolute()))}?mode=ro&immutable=1", uri=True)
        stack.callback(connection.close)
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        yield connection


# --- ranks ---------------------------------------------------------------------------------------------------


def _with_ranks(files: list[_File]) -> tuple[list[_Ranked], list[Notice]]:
    """The rank of every process: from zero-bubble's ranges, from the largest communicator it joined, from the file's
    name, else from the order of the files and their GPUs, which is said. Raises InputError when none of it tells."""
    world = max((size for f in files for p in f.processes for _, size, _ in p.comms_joined), default=0) or None
    for how, rank_of in (("iter_ ranges", _by_range), ("NCCL communicator", functools.partial(_by_world, world))):
        ranks = [rank_of(p) for f in files for p in f.processes]
        if min(ranks) >= 0 and len(set(ranks)) == len(ranks):
            return _ranked(files, ranks, how, world), []
    if all(len(f.processes) == 1 for f in files):
        named = [rank_in_name(f.path) for f in files]
        ranks = [r for r in named if r is not None]
        if len(set(ranks)) == len(files):
            return _ranked(files, ranks, "file name", world), []
    return _by_order(files, world)


def _by_range(process: Process) -> int:
    return process.iter_rank


def _by_world(world: int | None, process: Process) -> int:
    return next((rank for _, size, rank in process.comms_joined if size == world), -1)


def _by_order(files: list[_File], world: int | None) -> tuple[list[_Ranked], list[Notice]]:
    numbers = [re.findall(r"\d+", PurePosixPath(f.path).name) for f in files]
    if len(files) > 1 and len({tuple(n) for n in numbers if n}) < len(files):
        listed = ", ".join(PurePosixPath(f.path).name for f in files[:5])
        raise InputError(
            f"the ranks of {len(files)} exports cannot be told ({listed}): no communicator was recorded being made, "
            "no number in the names",
            hint="name the files rank0.sqlite, … or node0.sqlite, … (nsys profile -o 'rank%q{RANK}')",
            where=str(PurePosixPath(files[0].path).parent),
        )
    order = sorted(range(len(files)), key=lambda i: [int(n[:18]) for n in numbers[i]])
    files = [replace(f, processes=tuple(sorted(f.processes, key=lambda p: (p.gpu, p.key)))) for f in files]
    files = [files[i] for i in order]
    count = sum(len(f.processes) for f in files)
    message = f"the ranks of {count} processes are taken from the order of the files and their GPUs"
    ranked = _ranked(files, list(range(count)), "order of files and GPUs", world)
    return ranked, [Notice("rank-assumed", message, files[0].path)]


def _ranked(files: list[_File], ranks: list[int], how: str, world: int | None) -> list[_Ranked]:
    every = [p for f in files for p in f.processes]
    return [_Ranked(rank, how, process, world) for rank, process in zip(ranks, every, strict=True)]


# --- peers ---------------------------------------------------------------------------------------------------


def _resolve_peers(ranked: list[_Ranked]) -> None:
    """Fill the calls' arguments in global ranks. NCCL numbers peers within the communicator: its members are known
    from where it was made, else they are its users in ascending order, when as many as the peers need."""
    members: dict[str, dict[int, int]] = {}
    users: dict[str, set[int]] = {}
    for one in ranked:
        for communicator, _, local in one.process.comms_joined:
            members.setdefault(communicator, {})[local] = one.rank
        for call in one.process.calls:
            users.setdefault(call.communicator, set()).add(one.rank)
    for one in ranked:
        for i, call in enumerate(one.process.calls):
            known = members.get(call.communicator) or dict(enumerate(sorted(users[call.communicator])))
            one.process.scan.comms[i] = _arguments(call, one.rank, known if call.communicator else {})


def _arguments(call: Call, me: int, members: dict[int, int]) -> CommArgs:
    peer = members.get(call.peer, -1)
    if peer == me:
        peer = -1
    src, dst = (me, peer) if call.what == "send" else (peer, me)
    p2p = call.what in ("send", "recv") and peer >= 0
    return CommArgs(
        collective=call.what,
        group=call.communicator,
        members=tuple(members[k] for k in sorted(members)),
        src=src if p2p else -1,
        dst=dst if p2p else -1,
        bytes=call.bytes,
    )


def _part(one: _Ranked, options: ReadOptions) -> Part:
    scan = one.process.scan
    scan.head["distributedInfo"] = {"rank": one.rank, "backend": "nccl"}
    if one.world is not None and one.rank < one.world:
        scan.head["distributedInfo"]["world_size"] = one.world
    return replace(assemble(scan, options), rank_how=one.how)
