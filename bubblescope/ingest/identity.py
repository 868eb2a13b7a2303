"""Which rank a file is of. Never a guess in silence: how it was found is kept, and doubt is an answer too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from bubblescope.ingest.events import CommArgs, Scan

_NAMES = (
    re.compile(r"rank[-_ ]?(\d{1,7})", re.IGNORECASE),
    re.compile(r"worker[-_ ]?(\d{1,7})", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])(?:r|gpu|device)[-_]?(\d{1,7})(?=[-_.]|$)", re.IGNORECASE),
    re.compile(r"^(\d{1,7})(?=\.|$)"),
)


_WHOLE_JOB = ("0", "default_pg")
"""Names of the communicator of all ranks."""
MOST_RANKS = 1 << 20
"""A rank or a world size beyond it is damage: no job has that many, and the ranks that lack a file are listed."""


@dataclass(frozen=True)
class Identity:
    """rank None: not known; how it was found. other_rank, other_how: what else than ``distributedInfo`` tells. doubt:
    why ``distributedInfo`` cannot be right. world_size None: not known. groups: name -> (description, global ranks)."""

    rank: int | None
    how: str
    other_rank: int | None
    other_how: str
    doubt: str
    world_size: int | None
    backend: str
    host: str
    groups: dict[str, tuple[str, tuple[int, ...]]]


def identify(scan: Scan) -> Identity:
    """From ``distributedInfo``, else the process-group arguments, else the file name."""
    info = scan.head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    groups = _groups(info, scan.comms)
    world = _whole(info.get("world_size"))
    if not world:
        world = max((len(ranks) for _, ranks in groups.values()), default=0) or None
    rank, how = _whole(info.get("rank")), "distributedInfo"
    other, other_how = _other_rank(scan)
    doubt = ""
    if rank is not None and (stated := _whole(info.get("world_size"))) and rank >= stated:
        doubt = f"distributedInfo says rank {rank} of {stated}, which cannot be"
    if rank is None or (doubt and other is not None):
        rank, how = other, other_how
        doubt = doubt and f"{doubt}; rank {other} is what the {other_how} says"
    backend = str(info.get("backend") or "").lower()
    host = str(scan.head.get("host_name") or "")
    return Identity(rank, how, other, other_how, doubt, world, backend, host, groups)


def _other_rank(scan: Scan) -> tuple[int | None, str]:
    """The process-group arguments' rank, else the file name's."""
    for reading in (global_rank, _rank_as_global, own_end):
        found = {r for r in map(reading, scan.comms) if r is not None}
        if len(found) == 1 and (rank := _whole(found.pop())) is not None:
            return rank, "process-group arguments"
    rank = rank_in_name(scan.path)
    return rank, "file name" if rank is not None else ""


def rank_in_name(path: str) -> int | None:
    """The rank that a file name states.

    >>> rank_in_name("t/iteration_10/rank3_trace.json.gz"), rank_in_name("worker0_step_12.pt.trace.json")
    (3, 0)
    >>> rank_in_name("trace.json") is None
    True
    """
    name = PurePosixPath(path.replace("\\", "/")).name
    for pattern in _NAMES:
        found = pattern.search(name)
        if found and int(found[1]) < MOST_RANKS:
            return int(found[1])
    return None


def global_rank(comm: CommArgs) -> int | None:
    """Global rank of the process that wrote `comm`: ``Rank`` is local to the group."""
    if comm.rank < 0:
        return None
    if comm.members:
        return comm.members[comm.rank] if comm.rank < len(comm.members) else None
    return comm.rank if comm.group in _WHOLE_JOB else None


def _rank_as_global(comm: CommArgs) -> int | None:
    return comm.rank if comm.rank >= 0 and (not comm.members or comm.rank in comm.members) else None


def own_end(comm: CommArgs) -> int | None:
    """Global rank of the process that sends or receives `comm`; None where it may be read as another rank, too: some
    versions number the ends of a message within the group.

    >>> own_end(CommArgs("send", members=(4, 5), src=5, dst=4)), own_end(CommArgs("recv", members=(4, 5), src=0, dst=1))
    (5, 5)
    >>> own_end(CommArgs("send", members=(0, 2, 4), src=2, dst=4)) is None
    True
    """
    own = {"send": comm.src, "recv": comm.dst}.get(comm.collective, -1)
    if own < 0:
        return None
    if not comm.members:
        return own if comm.group in _WHOLE_JOB else None
    readings = {own} & set(comm.members) | set(comm.members[own : own + 1])
    return readings.pop() if len(readings) == 1 else None


def ranks_in_one_group(comms: list[CommArgs]) -> set[int]:
    """The ranks that claim to be "this rank" of one and the same group: more than one only when two processes
    wrote the file. Empty when there is at most one in every group."""
    claims: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for comm in comms:
        if comm.rank >= 0:
            claims.setdefault((comm.group, comm.members), set()).add(comm.rank)
    for (_, members), ranks in sorted(claims.items()):
        if len(ranks) > 1:
            return {members[r] if r < len(members) else r for r in ranks}
    return set()


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < MOST_RANKS else None


def _groups(info: dict[str, Any], comms: list[CommArgs]) -> dict[str, tuple[str, tuple[int, ...]]]:
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    config = info.get("pg_config")
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict):
            continue
        members = entry.get("ranks")
        ranks = tuple(r for r in members if isinstance(r, int)) if isinstance(members, list) else ()
        out[str(entry.get("pg_name", ""))] = (str(entry.get("pg_desc") or ""), ranks)
    for comm in comms:
        description, ranks = out.get(comm.group, ("", ()))
        if comm.members and not (description and ranks):
            out[comm.group] = (description or comm.description, ranks or comm.members)
    return out
