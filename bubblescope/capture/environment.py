"""Who and where this process is: rank, host, job, versions, clock."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from bubblescope._version import __version__

_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "BUBBLESCOPE_JOB",
)


def rank_and_world() -> tuple[int, int | None]:
    """Global rank and world size: torch.distributed once initialised, else the launcher's variables, else 0."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        text = os.environ.get(rank, "")
        if text.isdecimal():
            size = os.environ.get(world, "")
            return int(text), int(size) if size.isdecimal() else None
    return 0, None


def job_identity() -> str:
    """The same text in all ranks of one job, another one after a restart, as far as the launcher tells."""
    return " ".join(f"{name}={os.environ[name]}" for name in _JOB_VARIABLES if name in os.environ)


def clock_anchor() -> tuple[int, int]:
    """(perf_counter_ns, time_ns) of one instant: the tightest of five readings (about 100 ns apart)."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, wall)
    assert best is not None
    return best[1], best[2]


def boot_id() -> str:
    """Processes with the same boot id share CLOCK_MONOTONIC; "" where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def describe_process() -> dict[str, Any]:
    """The part of the header line that does not depend on the framework."""
    torch = sys.modules.get("torch")
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": os.getpid(),
        "job": job_identity(),
        "versions": {
            "bubblescope": __version__,
            "python": platform.python_version(),
            "torch": str(getattr(torch, "__version__", "")),
        },
    }
