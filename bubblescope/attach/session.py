"""One attach from start to end: choose ranks, choose a way, record, detach, leave files that can be analysed."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from bubblescope.attach import client, discover, inject, kineto, numbering, process, protocol, together
from bubblescope.attach.discover import Rank
from bubblescope.attach.early import Early, EndedEarly, ends_early
from bubblescope.errors import AttachError, InputError, UsageError
from bubblescope.model.notice import counted, some

WAYS = ("auto", "agent", "kineto", "inject", "gdb")
DEFAULT_SECONDS = 5.0
AGENT_SECONDS = 20.0
"""How long an agent may take to appear after it was injected."""

WHEN_AGENTS_START = (
    "it starts when the process imports torch.distributed.pipelining, Megatron-Core or DeepSpeed: try again when the "
    "job trains. One without a pipeline has nothing to record, but for a marked loop of its own (--via inject --yes)"
)

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
    training thread waited for us. warnings: what the user should know. early: whether the user ended it.

    Numbers of ranks: detached, whose hooks are out again, or that gave a trace; ended meanwhile; hooked, until their
    next step; failed, for what the warnings say."""

    folder: Path
    via: str
    detached: int
    ended: int = 0
    hooked: int = 0
    failed: int = 0
    stall_ms: float = 0.0
    warnings: tuple[str, ...] = ()
    early: Early = field(default_factory=Early)


def attach(plan: Plan, confirm: Confirm, tell: Tell) -> Attached:
    """Record a live job. confirm: asked, with the risk, before anything is injected. tell: progress.

    SIGINT, SIGTERM and SIGHUP end the recording early. Raises AttachError when there is nothing to attach to or it is
    refused, InputError when nothing was recorded, UsageError when the folder cannot be used.
    """
    ranks = targets(plan.target)
    via = choose(ranks, plan.via)
    folder = plan.out.absolute() / ("traces" if via == "kineto" else "recording")
    _check_unused(folder)
    with _prepared(folder, ranks[0].uid):
        if via == "kineto":
            return _by_kineto(ranks, plan, folder, tell)
        if via in ("inject", "gdb"):
            ranks = _inject(ranks, confirm, tell, with_gdb=via == "gdb")
        return _by_agent(ranks, plan, folder, via, tell)


def _check_unused(folder: Path) -> None:
    if any(folder.glob("*.pt.trace.json")):
        raise UsageError("there are traces already", hint="choose another --out", where=str(folder))
    if any(discover.writer_of(path)[0] == socket.gethostname() for path in folder.glob("rank-*.jsonl")):
        raise UsageError("there is a recording of this host already", hint="choose another --out", where=str(folder))


@contextmanager
def _prepared(folder: Path, owner: int) -> Iterator[None]:
    """Around what fills the folder: it is there, and the job's user can write to it. When nothing came of it, what was
    made here is removed again."""
    made: list[Path] = []
    try:
        made += [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if folder in made and os.geteuid() == 0:
            os.chown(folder, owner, -1)
    except OSError as error:
        _remove_empty(made)
        raise UsageError(
            f"nothing can be written there: {error.strerror or error}", hint="choose another --out", where=str(folder)
        ) from error
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, EndedEarly) and error.pending):
            _remove_empty(made)
        raise


def _discard(folder: Path, ranks: Sequence[Rank]) -> None:
    """Remove what these ranks wrote: a recording that came to nothing shall not be in the way of the next."""
    here, pids = socket.gethostname(), {rank.pid for rank in ranks}
    with suppress(OSError):
        for path in folder.glob("rank-*.jsonl"):
            host, pid = discover.writer_of(path)
            if host == here and pid in pids:
                path.unlink()
        if not any(folder.glob("rank-*.jsonl")):
            (folder / "job.json").unlink(missing_ok=True)


def _remove_empty(folders: Sequence[Path]) -> None:
    """folders: from the innermost out."""
    with suppress(OSError):
        for one in folders:
            one.rmdir()


# ---- which ranks, which way


def targets(text: str) -> list[Rank]:
    """The ranks that the user named. Raises AttachError when there are none, or of more than one job."""
    if not text.strip():
        raise UsageError("TARGET is an empty text", hint="is the variable set? bubblescope doctor lists ranks")
    if text == "all":
        found, where = discover.ranks(), "of yours on this host"
    elif text.isdecimal():
        found, where = discover.of_process(int(text)), ""
    else:
        found, where = discover.of_folder(Path(text)), f"that belong to {text}"
        if not found and not Path(text).is_dir():
            what = f"'{text}' is no process id, no folder and not 'all'"
            raise UsageError(what, hint="bubblescope doctor lists ranks")
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
    return some([rank.pid for rank in ranks])


def choose(ranks: Sequence[Rank], via: str) -> str:
    """The way in: what was asked for if it is open for all ranks, else the gentlest that is.

    Raises AttachError that names the ways that are open.
    """
    if inside := [rank for rank in ranks if rank.agent is None and process.in_container(rank.pid)]:
        raise AttachError(
            f"{_some(inside)} cannot be reached from outside of the container",
            hint="run bubblescope inside it (docker exec, kubectl exec, nsenter --pid --mount --target PID)",
        )
    has_agent = all(rank.agent is not None for rank in ranks)
    has_kineto = all(rank.kineto for rank in ranks)
    troubled = [rank for rank in ranks if rank.trouble]
    if troubled and via != "kineto" and not (via == "auto" and has_kineto):
        raise AttachError(
            f"{troubled[0].label} has an agent that cannot be used: {troubled[0].trouble}",
            hint="open: --via kineto" if has_kineto else "",
        )
    if via != "kineto" and (recording := [rank for rank in ranks if rank.recording]):
        folder = recording[0].recording
        raise AttachError(
            f"{_some(recording)} {'records' if len(recording) == 1 else 'record'} already, into {folder}",
            hint=f"bubblescope watch {folder} shows it live",
        )
    if via == "auto":
        if has_agent or has_kineto:
            return "agent" if has_agent else "kineto"
        unprepared = [rank for rank in ranks if rank.prepared == "no"] or list(ranks)
        if all(rank.stands_by for rank in unprepared):
            raise AttachError(f"the agent of {_some(unprepared)} has not started", hint=WHEN_AGENTS_START)
        raise AttachError(f"{_some(unprepared)} {_was(unprepared)} not prepared for attaching", hint=_open_ways(ranks))
    if via == "agent" and not has_agent:
        without = [rank for rank in ranks if rank.agent is None]
        hint = WHEN_AGENTS_START if all(rank.stands_by for rank in without) else _open_ways(ranks)
        raise AttachError(f"there is no agent in {_some(without)}", hint=hint)
    if via == "kineto" and not has_kineto:
        without = [rank for rank in ranks if not rank.kineto]
        what = f"{_some(without)} {_was(without)} started without KINETO_USE_DAEMON=1"
        raise AttachError(what, hint=_open_ways(ranks))
    return "agent" if via in ("inject", "gdb") and has_agent else via


def _open_ways(ranks: Sequence[Rank]) -> str:
    ways = []
    if all(rank.agent is not None for rank in ranks):
        ways.append("--via agent")
    if all(rank.kineto for rank in ranks):
        ways.append("--via kineto")
    if ways:
        return "open: " + " or ".join(ways)
    closed = next((why for rank in ranks if rank.agent is None and (why := inject.why_not(rank.pid))), "")
    standby = "start the job under `bubblescope run --standby`"
    if closed:
        return f"open: {standby} (--via inject is closed: {closed})"
    return f"open: --via inject --yes, which stops each process for some milliseconds; or {standby}"


def _was(ranks: Sequence[Rank]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _some(ranks: Sequence[Rank]) -> str:
    return some([rank.label for rank in ranks], 3, count_rest=True)


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


def _by_agent(ranks: Sequence[Rank], plan: Plan, folder: Path, via: str, tell: Tell) -> Attached:
    tell(f"recording {counted(len(ranks), 'rank')} into {folder}")
    with ends_early() as early:
        try:
            watches = together.record(ranks, folder, plan.seconds or DEFAULT_SECONDS, plan.steps, early, tell)
        except together.Refused:
            _discard(folder, ranks)
            raise
        except KeyboardInterrupt:
            tell(
                f"not waited for: hooks come out at the next step of each rank; what was recorded stays in {folder}, "
                "of no use to analyze, as each rank numbers its steps for itself"
            )
            raise
    unseen = [f"{w.rank.label}: {w.unseen}" for w in watches if w.unseen]
    warnings = [f"{w.rank.label}: {w.ended}" for w in watches if w.ended] + unseen
    warnings += sorted({text for w in watches for text in w.warnings})
    try:
        if unseen and not any(w.pipeline for w in watches):
            _discard(folder, ranks)
            raise InputError(f"nothing was recorded: {'; '.join(unseen)}", hint=together.PIPELINES)
        made = _numbered(folder, plan.steps, ranks, warnings)
    except InputError as error:
        if early:
            raise EndedEarly(early, error.what) from error
        raise
    if made.silent:
        warnings.append(f"no whole step was recorded of ranks {', '.join(map(str, made.silent))}")
    if made.recording:
        there = some(made.recording, count_rest=True)
        warnings.append(f"other hosts still record (ranks {there}); the last one to finish writes the report of all")
    if early:
        warnings.insert(0, f"{early.says}: the report is of what was recorded until then")
    return Attached(
        folder,
        via,
        detached=sum(w.state == "done" and not w.gone for w in watches),
        ended=sum(w.gone for w in watches),
        hooked=sum(w.state not in ("done", "failed") and not w.gone for w in watches),
        failed=sum(w.state == "failed" and not w.gone for w in watches),
        stall_ms=max(w.stall_ms for w in watches),
        warnings=tuple(warnings),
        early=early,
    )


def _numbered(folder: Path, steps: int | None, ranks: Sequence[Rank], reasons: Sequence[str]) -> numbering.Numbered:
    if not any(folder.glob("rank-*.jsonl")):
        raise InputError(
            "nothing was recorded: " + ("; ".join(reasons) or "no rank came to a step"),
            hint="record longer with --duration, if a step of the job takes that long",
            where=str(folder),
        )
    try:
        return numbering.make_common(folder, steps, [(socket.gethostname(), rank.pid) for rank in ranks])
    except OSError as error:
        raise UsageError(
            f"the recording cannot be finished: {error.strerror or error}",
            hint="make room and check the permissions there; the job has been detached from",
            where=str(error.filename or folder),
        ) from error


# ---- recording through Kineto


def _by_kineto(ranks: Sequence[Rank], plan: Plan, folder: Path, tell: Tell) -> Attached:
    if profiling := [rank for rank in ranks if rank.profiler]:
        raise AttachError(
            f"the job's own torch.profiler runs in {_some(profiling)}",
            hint="wait until it has ended, and analyse its traces",
        )
    seconds = None if plan.steps is not None else plan.seconds or DEFAULT_SECONDS
    asked = kineto.Plan(folder, seconds, plan.steps)
    tell(
        f"warning: Kineto crashes a process that exits while it is being traced: the job must not end "
        f"{asked.lasts(ranks)}"
    )
    with ends_early() as early:
        made = kineto.collect(ranks, asked, early, tell)
    warnings = tuple(f"{who}: {why}" for who, why in made.lost.items())
    return Attached(folder, "kineto", detached=len(made.files), warnings=warnings, early=early)
