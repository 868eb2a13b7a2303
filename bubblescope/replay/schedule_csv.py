"""torch's schedule CSV, in and out: one row per pipeline position, one action per cell (`_load_csv`, `_dump_csv`).

"compute_only" holds F, B, I, W and overlapped pairs; "compute_comms" holds the messages and FSDP steps as well.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from bubblescope.errors import InputError, ScheduleError, UsageError
from bubblescope.ingest import handwritten
from bubblescope.model import Action, Kind
from bubblescope.replay.dag import build_dag
from bubblescope.replay.schedules import Schedule, recognise, stage_ranks

FORMATS = ("compute_only", "compute_comms")
_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*\Z")
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)\Z")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B\Z")
_UNSHARDED = 3
"""Stages that torch keeps unsharded at once under FSDP."""
Group = tuple[Action, ...]


def load_csv(path: str | Path) -> Schedule:
    """Read a schedule CSV of either format; messages (checked to come in pairs) and FSDP steps are dropped, empty cells
    are waiting slots.

    The schedule is named when its order is exactly a known one, else "custom". Raises InputError when the file
    cannot be read; ScheduleError, with row and cell, for an entry that is no action, a message without its other
    end, or an order that cannot run.
    """
    try:
        text = handwritten.text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"the schedule cannot be read: {reason}", where=str(path)) from error
    return parse_csv(text, where=str(path))


def parse_csv(text: str, where: str = "") -> Schedule:
    """As `load_csv`, from the text itself.

    >>> parse_csv("0F0,0SEND_F0,0F1,,0RECV_B0,0B0,0B1\\n1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1").name
    '1F1B'
    """
    orders: dict[int, list[Action]] = {}
    overlapped: dict[int, list[int]] = {}
    messages: list[tuple[re.Match[str], int, str]] = []
    rows = list(csv.reader(io.StringIO(text, newline="")))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    for rank, row in enumerate(rows):
        orders[rank] = []
        for column, cell in enumerate(row):
            here = f"{where}, row {rank + 1}, cell {column + 1}".lstrip(", ")
            if message := _MESSAGE.match(cell.strip()):
                messages.append((message, rank, here))
                continue
            group = _parse_cell(cell, here)
            if len(group) == 2:
                overlapped.setdefault(rank, []).append(len(orders[rank]))
            orders[rank] += group
    if not any(orders.values()):
        raise ScheduleError(
            "the schedule has no actions", where=where, hint="one row per GPU, cells such as 0F0,0F1,0B0"
        )
    try:
        build_dag(orders, overlapped)
    except ScheduleError as error:
        raise ScheduleError(error.what, hint=error.hint, where=where) from error
    _check_messages(messages, orders)
    _check_numbering({action.microbatch for order in orders.values() for action in order}, where)
    found = recognise(orders)
    return Schedule(found.name if found.exact else "custom", orders, overlapped)


def _check_messages(messages: Sequence[tuple[re.Match[str], int, str]], orders: dict[int, list[Action]]) -> None:
    """messages: (cell, position, where). Each belongs to an operation of its row, and has its other end."""
    texts = Counter(message[0] for message, _, _ in messages)
    carried = {
        (rank, f"{a.stage}_{'F' if a.kind == Kind.FORWARD else 'B'}{a.microbatch}")
        for rank, order in orders.items()
        for a in order
        if a.kind != Kind.BACKWARD_WEIGHT
    }
    for message, rank, where in messages:
        text, (stage, way, letter, microbatch) = message[0], message.groups()
        neighbour = int(stage) + (1 if (way == "SEND") == (letter == "F") else -1)
        other = f"{neighbour}{'RECV' if way == 'SEND' else 'SEND'}_{letter}{microbatch}"
        if (rank, f"{stage}_{letter}{microbatch}") not in carried:
            what = f"'{text}' belongs to no operation of its row"
        elif texts[text] > 1:
            what = f"'{text}' is there {texts[text]} times"
        elif other not in texts:
            what = f"'{text}' has no '{other}' to match it"
        else:
            continue
        raise ScheduleError(
            what, hint="a result that another row needs is sent once by its stage and received once there", where=where
        )


def _check_numbering(microbatches: set[int], where: str) -> None:
    highest = max(microbatches)
    if highest + 1 != len(microbatches):
        missing = next(number for number in range(highest) if number not in microbatches)
        raise ScheduleError(
            f"micro-batch {highest} is there, but micro-batch {missing} is not",
            hint="micro-batches are counted from 0, without holes",
            where=where,
        )


def _parse_cell(cell: str, where: str) -> Group:
    """The actions of one cell: none, one, or the two of an overlapped pair."""
    text = cell.strip()
    if not text or _FSDP.match(text):
        return ()
    pair = _OVERLAPPED.match(text)
    parts = pair[1].split(";") if pair else [text]
    if pair and len(parts) != 2:
        raise ScheduleError(f"'{text}' overlaps {len(parts)} actions, not 2", where=where)
    try:
        return tuple(Action.parse(part) for part in parts)
    except ScheduleError as error:
        raise ScheduleError(error.what, hint=error.hint, where=where) from error


def to_csv(schedule: Schedule, format: str = "compute_only") -> str:
    """The schedule as torch's CSV text, `format` one of `FORMATS`. Torch's `_load_csv` of that format reads it.

    compute_comms, as torch lowers it: sends follow the operation that made the data, each receive is posted when
    its sender sends, and FSDP's unshard, reshard and gradient reduction stand between.

    >>> from bubblescope.replay.schedules import make
    >>> to_csv(make("1F1B", 2, 1)).split()
    ['0F0,0B0', '1F0,1B0']
    """
    if format not in FORMATS:
        raise UsageError(f"'{format}' is not a schedule CSV format", hint=f"there are: {', '.join(FORMATS)}")
    if format == "compute_only":
        cells = {rank: [_cell(g) for g in _groups(schedule, rank)] for rank in sorted(schedule.orders)}
    else:
        cells = with_comms(schedule)
    out = io.StringIO()
    csv.writer(out).writerows(cells[rank] for rank in sorted(cells))
    return out.getvalue()


def dump_csv(schedule: Schedule, path: str | Path, format: str = "compute_only") -> None:
    """Write `to_csv` to a file."""
    Path(path).write_text(to_csv(schedule, format), encoding="utf-8", newline="")


def _groups(schedule: Schedule, rank: int) -> Iterator[Group]:
    """One position's actions, overlapped ones together."""
    order, pairs = schedule.orders[rank], set(schedule.overlapped.get(rank, ()))
    i = 0
    while i < len(order):
        size = 2 if i in pairs else 1
        yield tuple(order[i : i + size])
        i += size


def _cell(group: Sequence[Action]) -> str:
    texts = ";".join(str(action) for action in group)
    return f"({texts})OVERLAP_F_B" if len(group) > 1 else texts


def with_comms(schedule: Schedule) -> dict[int, list[str]]:
    """{position: cells} of the "compute_comms" format. Raises ScheduleError for an order that deadlocks."""
    build_dag(schedule.orders, schedule.overlapped)
    rank_of = stage_ranks(schedule.orders)
    waiting = {rank: deque(_entries(list(_groups(schedule, rank)))) for rank in sorted(schedule.orders)}
    cells: dict[int, list[str]] = {rank: [] for rank in waiting}
    here: set[tuple[str, int, int]] = set()
    while any(waiting.values()):
        for rank, queue in waiting.items():
            if not queue or not all(_ready(a, here, schedule.virtual_stages - 1) for a in queue[0][1]):
                continue
            cell, group = queue.popleft()
            cells[rank].append(cell)
            for action in group:
                _send(action, rank_of, here, cells)
    return cells


def _entries(groups: Sequence[Group]) -> Iterator[tuple[str, Group]]:
    """One position's cells before messages are added: (text, its compute actions), with FSDP's steps between."""
    left = Counter(a.stage for group in groups for a in group if _makes_weight_gradient(a))
    active: list[int] = []
    for turn, group in enumerate(groups):
        soon = _next_stages(groups[turn:])
        yield from ((f"{stage}RESHARD", ()) for stage in sorted(active) if stage not in soon)
        yield from ((f"{stage}UNSHARD", ()) for stage in soon if stage not in active)
        active = soon
        yield _cell(group), group
        for action in group:
            left[action.stage] -= _makes_weight_gradient(action)
            if _makes_weight_gradient(action) and not left[action.stage]:
                yield f"{action.stage}REDUCE_GRAD", ()
    yield from ((f"{stage}RESHARD", ()) for stage in sorted(active))


def _next_stages(groups: Sequence[Group]) -> list[int]:
    """The stages that compute next, at most `_UNSHARDED` (an overlapped pair may add one more)."""
    found: list[int] = []
    for group in groups:
        found += [a.stage for a in group if a.stage not in found]
        if len(found) >= _UNSHARDED:
            break
    return found


def _makes_weight_gradient(action: Action) -> bool:
    return action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _ready(action: Action, here: set[tuple[str, int, int]], last: int) -> bool:
    """Whether the message that `action` needs has been sent."""
    if action.kind == Kind.FORWARD:
        return action.stage == 0 or ("F", action.stage, action.microbatch) in here
    if action.kind == Kind.BACKWARD_WEIGHT:
        return True
    return action.stage == last or ("B", action.stage, action.microbatch) in here


def _send(
    action: Action, rank_of: dict[int, int], here: set[tuple[str, int, int]], cells: dict[int, list[str]]
) -> None:
    """Hand the result of `action` to its neighbour stage: by a message when it lives on another position."""
    if action.kind == Kind.BACKWARD_WEIGHT:
        return
    letter, target = ("F", action.stage + 1) if action.kind == Kind.FORWARD else ("B", action.stage - 1)
    if target not in rank_of:
        return
    here.add((letter, target, action.microbatch))
    sender, receiver = rank_of[action.stage], rank_of[target]
    if sender != receiver:
        cells[sender].append(f"{action.stage}SEND_{letter}{action.microbatch}")
        cells[receiver].append(f"{target}RECV_{letter}{action.microbatch}")
