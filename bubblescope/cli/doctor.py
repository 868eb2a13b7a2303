"""`bubblescope doctor`: what can be recorded and attached on this machine, and what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from bubblescope._version import __version__
from bubblescope.cli.output import json_option, results, write_json

HOOK_RANGE = ((2, 4), (2, 14))
"""The torch releases, first and last, on which the hooks' targets were read."""

ESSENTIAL_HOOKS = frozenset({"forward", "backward", "p2p_post", "schedule.step", "optimizer.step"})
"""Without one of these a recording says little; the others come and go with the releases of torch."""

FRAMEWORKS = ("megatron-core", "deepspeed", "torchtitan")
LIBRARIES = ("pyarrow", "isal", "backports.zstd", "distributed", "nvidia-ml-py", "scipy")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
YAMA_SAYS = {
    "0": "any process of yours",
    "1": "only children, or as root",
    "2": "only as root",
    "3": "nothing, until the next boot",
}


@dataclass
class Finding:
    """One line of the report. state: "ok", "missing" (optional) or "problem"."""

    area: str
    name: str
    state: str
    value: Any = None
    note: str = ""


@dataclass
class Findings:
    """What was looked at, in the order in which it was."""

    items: list[Finding] = field(default_factory=list)

    def add(self, area: str, name: str, state: str, value: Any = None, note: str = "") -> None:
        self.items.append(Finding(area, name, state, value, note))


@click.command(epilog="\b\nExample:\n  bubblescope doctor\n  bubblescope doctor --dir /scratch/runs --json -")
@click.option(
    "--dir", "directory", default=".", show_default=True, metavar="DIR", help="Where recordings are to be written."
)
@json_option
def doctor(directory: str, json_to: str | None) -> None:
    """What can be recorded on this machine, and what is missing.

    Changes nothing outside the cache folder (a small scanner in C is built there); frameworks are looked up, not
    imported.
    """
    found = examine(Path(directory))
    if json_to:
        write_json(as_data(found), json_to)
    _print(found, json_to)


def examine(directory: Path) -> Findings:
    """Look at everything."""
    found = Findings()
    found.add("python", "python", "ok", platform.python_version(), sys.executable)
    found.add("python", "bubblescope", "ok", __version__)
    _torch(found)
    for name in FRAMEWORKS:
        _package(found, "frameworks", name, "needed only to record its jobs")
    for name in LIBRARIES:
        _package(found, "libraries", name, "optional")
    _native(found)
    _attach(found)
    _disk(found, directory)
    return found


def as_data(found: Findings) -> dict[str, Any]:
    """For --json: every finding, by area and name; `can_record` is the verdict, `problems` its reasons."""
    areas: dict[str, dict[str, Any]] = {}
    for item in found.items:
        entry = {k: v for k, v in asdict(item).items() if k not in ("area", "name")}
        areas.setdefault(item.area, {})[item.name] = entry
    return {"schema_version": 1, **areas, "can_record": can_record(found), "problems": problems(found)}


def can_record(found: Findings) -> bool:
    """Whether a training process of this Python can be recorded here."""
    has_torch = any(i.name == "torch" and i.value for i in found.items)
    return has_torch and not problems(found)


def problems(found: Findings) -> list[str]:
    return [f"{i.name}: {i.note or i.value}" for i in found.items if i.state == "problem"]


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(found: Findings, area: str, name: str, note: str) -> None:
    version = _version_of(name)
    found.add(area, name, "ok" if version else "missing", version, "" if version else note)


def _native(found: Findings) -> None:
    """The scanner in C that reads traces: built here and now where it can be, as the first analysis would."""
    from bubblescope.ingest import native

    state = native.status()
    if state.library is not None:
        found.add("libraries", "native scanner", "ok", "in use", state.why)
    else:
        found.add("libraries", "native scanner", "missing", None, f"optional, Python reads traces: {state.why}")


def _torch(found: Findings) -> None:
    version = _version_of("torch")
    if version is None:
        found.add("torch", "torch", "missing", None, "recording needs it; analysing works without")
        return
    first, last = HOOK_RANGE
    inside = first <= release(version) <= last
    span = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    note = f"the hooks are known on {span}" + ("" if inside else ": outside, check the hooks below")
    found.add("torch", "torch", "ok" if inside else "problem", version, note)
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library of another build
        found.add("torch", "import torch", "problem", None, f"installed, but fails to import: {error}")
        return
    _cuda(found, torch)
    _distributed(found, torch)
    _hooks(found)


def release(version: str) -> tuple[int, int]:
    """Major and minor of a version; (0, 0) when it has none.

    >>> release("2.13.0+cpu"), release("2.14.0a0+git1f2e")
    ((2, 13), (2, 14))
    """
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def _hooks(found: Findings) -> None:
    """Install the recorder's hooks, as a recording would, and take them out again; no file is written."""
    from bubblescope.capture import hooks
    from bubblescope.capture.recorder import Recorder

    trial = Recorder("unused")
    try:
        importlib.import_module("torch.distributed.pipelining")
        hooks.install(trial)
    finally:
        trial.patches.restore()
    for label in sorted(trial.patches.hooks):
        found.add("hooks", label, "ok", True)
    for label, why in sorted(trial.patches.refused.items()):
        found.add("hooks", label, "problem" if label in ESSENTIAL_HOOKS else "missing", False, why)


def _cuda(found: Findings, torch: Any) -> None:
    if not torch.cuda.is_available():
        found.add("torch", "cuda", "missing", None, "no usable GPU: runs here are CPU runs over gloo")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found.add("torch", "cuda", "ok", torch.version.cuda, f"{len(names)} GPU: {', '.join(sorted(set(names)))}")


def _distributed(found: Findings, torch: Any) -> None:
    if not torch.distributed.is_available():
        found.add("torch", "torch.distributed", "problem", None, "this build of torch has none, so no pipelines")
        return
    backends = [b for b in ("gloo", "nccl") if getattr(torch.distributed, f"is_{b}_available")()]
    found.add("torch", "torch.distributed", "ok", ", ".join(backends))
    if "nccl" in backends and torch.cuda.is_available():
        found.add("torch", "nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def _attach(found: Findings) -> None:
    scope = YAMA.read_text().strip() if YAMA.exists() else None
    if scope is None:
        note = "no yama here: the usual permissions decide" if sys.platform == "linux" else "not Linux"
        found.add("attach", "ptrace_scope", "ok" if sys.platform == "linux" else "missing", None, note)
    else:
        root = os.geteuid() == 0
        usable = scope == "0" or (root and scope in ("1", "2"))
        note = f"ptrace may reach {YAMA_SAYS.get(scope, 'an unknown set')}" + (" (you are root)" if root else "")
        found.add("attach", "ptrace_scope", "ok" if usable else "missing", int(scope), note)
    daemon = os.environ.get("KINETO_USE_DAEMON")
    note = "set: jobs of this shell poll for a profiler daemon, and exit up to 10 s later without one"
    found.add("attach", "KINETO_USE_DAEMON", "ok" if daemon else "missing", daemon, note if daemon else "not set")
    _standby(found)
    _ranks(found)


def _standby(found: Findings) -> None:
    from bubblescope.attach import launcher

    mode = os.environ.get("BUBBLESCOPE")
    if launcher.stands_by():
        found.add("attach", "BUBBLESCOPE", "ok", mode, "jobs of this shell can be attached to")
        return
    only = "only jobs that import bubblescope can be attached to" if mode == "standby" else "not set"
    found.add("attach", "BUBBLESCOPE", "missing", mode, f"{only}; for all jobs of a shell: {launcher.standby_line()}")


def _ranks(found: Findings) -> None:
    """The training ranks of this user on this host, and how each can be attached to."""
    if sys.platform != "linux":
        return
    from bubblescope.attach import discover

    ways = {"agent": "an agent is there", "kineto": "polls for Kineto requests", "no": "not prepared: --via inject"}
    for rank in discover.ranks():
        name = f"process {rank.pid}"
        value = f"rank {'?' if rank.rank is None else rank.rank} of {rank.world or '?'}"
        records = f"records already: bubblescope watch {rank.recording}" if rank.recording else ""
        waits = "stands by, and has imported no pipeline yet" if rank.stands_by and rank.prepared == "no" else ""
        way = rank.trouble or records or waits or ways[rank.prepared]
        state = "ok" if records or waits or rank.prepared != "no" else "missing"
        found.add("attach", name, state, value, f"{rank.framework}; {way}; {rank.job or 'no job name'}")


def _disk(found: Findings, directory: Path) -> None:
    # A folder that does not exist yet would be made in its nearest existing parent.
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        found.add("disk", "writable", "problem", str(parent), f"cannot write there: {error.strerror or error}")
        return
    free = shutil.disk_usage(parent).free
    found.add("disk", "writable", "ok", str(parent), f"{free / 2**30:,.1f} GiB free")


def _print(found: Findings, json_to: str | None) -> None:
    console = results(json_to)
    marks = {
        "ok": "[green]ok[/green]     ",
        "missing": "[yellow]none[/yellow]   ",
        "problem": "[red]PROBLEM[/red]",
    }
    area = ""
    fitting = sum(item.area == "hooks" and item.state == "ok" for item in found.items)
    for item in found.items:
        if item.area != area:
            area = item.area
            console.print(f"[bold]{area}[/bold]")
            if area == "hooks":
                console.print(f"  {marks['ok']} {fitting} hooks fit this torch")
        if area == "hooks" and item.state == "ok":
            continue
        value = "" if item.value in (None, True, False) else str(item.value)
        text = "  ".join(part for part in (value, item.note) if part)
        console.print(f"  {marks[item.state]} {item.name:<32} ", end="")
        console.print(text, markup=False, soft_wrap=True)
    if can_record(found):
        console.print("everything that recording needs is here")
    elif reasons := problems(found):
        console.print(f"{len(reasons)} to look at, see PROBLEM above")
    else:
        console.print("recording needs torch in this Python; analysing works")
