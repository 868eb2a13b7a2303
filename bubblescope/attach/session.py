"""One attach from start to end: choose ranks, choose a way, record, detach, leave files that can be analysed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bubblescope.attach import client, discover, inject, kineto, numbering, process, protocol, together
from bubblescope.attach.discover import Rank
from bubblescope.errors import AttachError, InputError, UsageError

WAYS = ("auto", "agent", "kineto", "inject", "gdb")
DEFAULT_SECONDS = 5.0
AGENT_SECONDS = 20.0
"""How long an agent may take to appear after it was injected."""

Tell = Callable[[str], None]
Confirm = Callable[[str], bool]


@dataclass(frozen=True)
class Plan:
    """What the user asked for. target: a pid, a folder or "all". seconds or steps; neither = `DEFAULT_SECONDS`."""

    target: str
    out: Path
    via: str = "auto"
    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and self.steps is not None:
            raise UsageError("--duration and --steps exclude each other", hint="give one of them")


@dataclass(frozen=True)
class Attached:
    """folder: of what was recorded, ready for `ingest.read`. via: the way taken. stall_ms: the longest time that a
    training thread waited for us. warnings: what the user should know."""

    folder: Path
    via: str
    ranks: tuple[Rank, ...]
    stall_ms: float
    warnings: tuple[str, ...] = ()


def attach(plan: Plan, confirm: Confirm, tell: Tell) -> Attached:
    """Record a live job. confirm: asked, with the risk, before anything is injected. tell: progress.

    Raises AttachError when there is nothing to attach to or it is refused, InputError when nothing was recorded.
    """
    ranks = targets(plan.target)
    via = choose(ranks, plan.via)
    if via == "kineto":
        return _by_kineto(ranks, plan, tell)
    if via in ("inject", "gdb"):
        ranks = _inject(ranks, confirm, tell, with_gdb=via == "gdb")
    return _by_agent(ranks, plan, via, tell)


# ---- which ranks, which way


def targets(text: str) -> list[Rank]:
    """The ranks that the user named. Raises AttachError when there are none, or of more than one job."""
    if text == "all":
        found, where = discover.ranks(), "of yours on this host"
    elif text.isdecimal():
        found, where = discover.of_process(int(text)), ""
    elif Path(text).is_dir():
        found, where = discover.of_folder(Path(text)), f"that belong to {text}"
    else:
        raise UsageError(f"'{text}' is no process id, no folder and not 'all'", hint="bubblescope doctor lists ranks")
    if not found:
        raise AttachError(
            f"there are no training ranks {where}",
            hint="bubblescope doctor lists what runs here; a single process is attached to by its pid",
        )
    jobs = {rank.job for rank in found}
    if len(jobs) > 1:
        listed = "; ".join(f"processes {_pids([r for r in found if r.job == job])}" for job in sorted(jobs))
        raise AttachError(f"these are {len(jobs)} jobs: {listed}", hint="name one by its folder or its launcher's pid")
    return found


def _pids(ranks: Sequence[Rank]) -> str:
    return ", ".join(str(rank.pid) for rank in ranks[:8]) + (" …" if len(ranks) > 8 else "")


def choose(ranks: Sequence[Rank], via: str) -> str:
    """The way in: what was asked for if it is open for all ranks, else the gentlest that is.

    Raises AttachError that names the ways that are open.
    """
    has_agent = all(rank.agent is not None for rank in ranks)
    has_kineto = all(rank.kineto for rank in ranks)
    if via == "auto":
        if has_agent or has_kineto:
            return "agent" if has_agent else "kineto"
        unprepared = [rank for rank in ranks if rank.prepared == "no"] or list(ranks)
        raise AttachError(f"{_some(unprepared)} was not prepared for attaching", hint=_open_ways(ranks))
    if via == "agent" and not has_agent:
        without = [rank for rank in ranks if rank.agent is None]
        raise AttachError(f"there is no agent in {_some(without)}", hint=_open_ways(ranks))
    if via == "kineto" and not has_kineto:
        without = [rank for rank in ranks if not rank.kineto]
        raise AttachError(f"{_some(without)} was started without KINETO_USE_DAEMON=1", hint=_open_ways(ranks))
    return "agent" if via in ("inject", "gdb") and has_agent else via


def _open_ways(ranks: Sequence[Rank]) -> str:
    ways = []
    if all(rank.agent is not None for rank in ranks):
        ways.append("--via agent")
    if all(rank.kineto for rank in ranks):
        ways.append("--via kineto")
    closed = next((why for rank in ranks if rank.agent is None and (why := inject.why_not(rank.pid))), "")
    if closed:
        ways.append(f"start the job under `bubblescope run --standby` (--via inject is closed: {closed})")
    else:
        ways.append("--via inject --yes, which stops each process for some milliseconds")
        ways.append("or start the job under `bubblescope run --standby`")
    return "open: " + "; ".join(ways)


def _some(ranks: Sequence[Rank]) -> str:
    return ", ".join(rank.label for rank in ranks[:3]) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


# ---- injecting the agent


def _inject(ranks: Sequence[Rank], confirm: Confirm, tell: Tell, *, with_gdb: bool) -> list[Rank]:
    """Every rank is looked at before the first one is touched. Raises AttachError."""
    needing = [rank for rank in ranks if rank.agent is None]
    for rank in needing:
        if why := inject.why_not(rank.pid):
            raise AttachError(f"{rank.label} cannot be entered: {why}", hint=_otherwise(ranks))
    if not confirm(inject.RISK):
        raise AttachError("nothing was injected: it was not confirmed", hint="--yes confirms it")
    return [rank if rank.agent is not None else _enter(rank, tell, with_gdb=with_gdb) for rank in ranks]


def _otherwise(ranks: Sequence[Rank]) -> str:
    if all(rank.kineto for rank in ranks):
        return "open: --via kineto"
    return "start the job under `bubblescope run --standby` to be able to attach"


def _enter(rank: Rank, tell: Tell, *, with_gdb: bool) -> Rank:
    stall = inject.start_agent(rank.pid, with_gdb=with_gdb)
    tell(f"{rank.label}: stopped for {stall * 1e3:.1f} ms")
    path = protocol.socket_path(protocol.directory_for(rank.uid, rank.environ), rank.pid)
    ends = time.monotonic() + AGENT_SECONDS
    while time.monotonic() < ends:
        if not process.exists(rank.pid):
            raise AttachError(f"{rank.label} has ended", hint="its log may say why")
        try:
            said = client.ask(path, "status")
        except AttachError:
            time.sleep(0.05)
            continue
        return replace(rank, agent=path, framework=client.printable(said.get("framework") or rank.framework)[:40])
    raise AttachError(
        f"{rank.label} lives, but its agent did not start in {AGENT_SECONDS:.0f} s",
        hint="the interpreter starts it when the main thread comes back from what it waits in; try again then",
    )


# ---- recording through agents


def _by_agent(ranks: Sequence[Rank], plan: Plan, via: str, tell: Tell) -> Attached:
    folder = plan.out.absolute() / "recording"
    _prepare_folder(folder, ranks)
    tell(f"recording {len(ranks)} ranks into {folder}")
    watches = together.record(ranks, folder, plan.seconds or DEFAULT_SECONDS, plan.steps, tell)
    warnings = [f"{w.rank.label}: {w.ended}" for w in watches if w.ended]
    warnings += sorted({text for w in watches for text in w.warnings})
    if not any(folder.glob("rank-*.jsonl")):
        raise InputError(
            "nothing was recorded: " + ("; ".join(warnings) or "no rank came to a step"),
            hint="record longer with --duration, if a step of the job takes that long",
            where=str(folder),
        )
    made = numbering.make_common(folder, plan.steps)
    if made.silent:
        warnings.append(f"no whole step was recorded of ranks {', '.join(map(str, made.silent))}")
    return Attached(folder, via, tuple(ranks), max(w.stall_ms for w in watches), tuple(warnings))


def _prepare_folder(folder: Path, ranks: Sequence[Rank]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mine = [path for path in folder.glob("rank-*.jsonl") if discover.host_of(path) == socket.gethostname()]
    if mine:
        raise UsageError("there is a recording of this host already", hint="choose another --out", where=str(folder))
    owner = ranks[0].uid
    if os.geteuid() == 0 and owner != 0 and folder.stat().st_uid == 0:
        os.chown(folder, owner, -1)


# ---- recording through Kineto


def _by_kineto(ranks: Sequence[Rank], plan: Plan, tell: Tell) -> Attached:
    if profiling := [rank for rank in ranks if rank.profiler]:
        raise AttachError(
            f"the job's own torch.profiler runs in {_some(profiling)}",
            hint="wait until it has ended, and analyse its traces",
        )
    folder = plan.out.absolute() / "traces"
    if any(folder.glob("*.pt.trace.json")):
        raise UsageError("there are traces already", hint="choose another --out", where=str(folder))
    seconds = None if plan.steps is not None else plan.seconds or DEFAULT_SECONDS
    asked = kineto.Plan(folder, seconds, plan.steps)
    tell(
        f"warning: Kineto crashes a process that exits while it is being traced: the job must not end "
        f"{asked.lasts(ranks)}"
    )
    made = kineto.collect(ranks, asked, tell)
    warnings = tuple(f"{who}: {why}" for who, why in made.lost.items())
    return Attached(folder, "kineto", tuple(ranks), 0.0, warnings)
