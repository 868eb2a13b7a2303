"""Who and where this process is: rank, host, job, versions, clock; and what `bubblescope run` asks of it.

The variables that `bubblescope run` sets for every process it starts (`Settings` reads and writes them):

| variable | value |
|---|---|
| `BUBBLESCOPE` | `record`, `standby` (only the attach agent waits), `off` (also when unset) |
| `BUBBLESCOPE_OUT` | the recording's folder, absolute |
| `BUBBLESCOPE_FRAMEWORK` | `auto`, `torch`, `megatron`, `deepspeed`: whose hooks go in |
| `BUBBLESCOPE_STEPS` | stop recording after so many steps |
| `BUBBLESCOPE_EVERY` | record one step in so many; unset = all, or fewer where that is safer |
| `BUBBLESCOPE_WARMUP` | first steps to flag |
| `BUBBLESCOPE_RANKS` | `0,4-7`: global ranks to record; unset = all |
| `BUBBLESCOPE_NOTES` | folder of this host where processes say why nothing was recorded (see `notes`) |
| `BUBBLESCOPE_OWNER` | `RANK:PID` of the process that is that rank; set by that process for its children |

A launcher's children inherit `RANK`, and so do what they start: DataLoader workers, resource trackers, checkpoint
helpers. Only the process named by the owner mark is the rank; any other one with that rank stays inert.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bubblescope._ranks import numbers_of_launcher
from bubblescope._version import __version__
from bubblescope.capture import notes
from bubblescope.errors import UsageError

_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "BUBBLESCOPE_JOB",
)

MODES = ("record", "standby", "off")
FRAMEWORKS = ("auto", "torch", "megatron", "deepspeed")
_OWNER = "BUBBLESCOPE_OWNER"
VARIABLES = frozenset(
    {"BUBBLESCOPE", _OWNER, "BUBBLESCOPE_AGENT_OWNER"}
    | {f"BUBBLESCOPE_{name}" for name in ("OUT", "FRAMEWORK", "STEPS", "EVERY", "WARMUP", "RANKS", "NOTES")}
)
"""Set anew for each job; those of a job that this one runs inside of are not its own."""


@dataclass(frozen=True)
class Settings:
    """What `bubblescope run` was asked for; the module's docstring says what each field does."""

    mode: str = "off"
    out: str = ""
    framework: str = "auto"
    steps: int | None = None
    every: int | None = None
    warmup: int = 1
    ranks: frozenset[int] | None = None
    notes: str = ""

    def variables(self) -> dict[str, str]:
        """As environment variables.

        >>> Settings("record", "/r", steps=5, ranks=frozenset({0, 2})).variables()["BUBBLESCOPE_RANKS"]
        '0,2'
        """
        made = {
            "BUBBLESCOPE": self.mode,
            "BUBBLESCOPE_OUT": self.out,
            "BUBBLESCOPE_FRAMEWORK": self.framework,
            "BUBBLESCOPE_WARMUP": str(self.warmup),
        }
        if self.every is not None:
            made["BUBBLESCOPE_EVERY"] = str(self.every)
        if self.steps is not None:
            made["BUBBLESCOPE_STEPS"] = str(self.steps)
        if self.ranks is not None:
            made["BUBBLESCOPE_RANKS"] = ",".join(map(str, sorted(self.ranks)))
        if self.notes:
            made[notes.VARIABLE] = self.notes
        return made

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """From the environment; mode "off" when nothing is asked for. Raises UsageError on values without sense."""
        mode = environ.get("BUBBLESCOPE", "off") or "off"
        if mode not in MODES:
            raise UsageError(f"BUBBLESCOPE is '{mode}'", hint=f"it is one of {', '.join(MODES)}")
        steps, every = environ.get("BUBBLESCOPE_STEPS", ""), environ.get("BUBBLESCOPE_EVERY", "")
        ranks = environ.get("BUBBLESCOPE_RANKS", "")
        return cls(
            mode,
            environ.get("BUBBLESCOPE_OUT", ""),
            environ.get("BUBBLESCOPE_FRAMEWORK", "auto") or "auto",
            _number("BUBBLESCOPE_STEPS", steps) if steps else None,
            _number("BUBBLESCOPE_EVERY", every) if every else None,
            _number("BUBBLESCOPE_WARMUP", environ.get("BUBBLESCOPE_WARMUP", "1")),
            parse_ranks(ranks) if ranks else None,
            environ.get(notes.VARIABLE, ""),
        )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name} is '{text}', not a number")
    return int(text)


def parse_ranks(text: str) -> frozenset[int]:
    """Ranks of a list. Raises UsageError on anything else.

    >>> sorted(parse_ranks("0,4-6"))
    [0, 4, 5, 6]
    """
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < 1 << 24):
            raise UsageError(f"'{text}' is not a list of ranks", hint="write it like 0,4-7")
        found.update(range(int(low), int(high) + 1))
    return frozenset(found)


def world_of_launcher() -> int | None:
    """How many ranks the launcher says that there are; None when it does not."""
    return numbers_of_launcher()[1]


def rank_of_launcher(environ: Mapping[str, str] = os.environ) -> int | None:
    """The global rank that the launcher gave this process; None when it gave none."""
    return numbers_of_launcher(environ)[0]


def rank_and_world() -> tuple[int, int | None]:
    """Global rank and world size: torch.distributed once initialised, else the launcher's variables, else 0."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    rank, world = numbers_of_launcher()
    return (0, None) if rank is None else (rank, world)


def owned_by_another(rank: int | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether another process is already marked as that rank: this one is only its helper.

    >>> owned_by_another(3, {"BUBBLESCOPE_OWNER": "3:1"}), owned_by_another(2, {"BUBBLESCOPE_OWNER": "3:1"})
    (True, False)
    """
    owner, _, pid = environ.get(_OWNER, "").partition(":")
    if not (owner.isdecimal() and pid.isdecimal()) or rank is None:
        return False
    return int(owner) == rank and int(pid) != os.getpid()


def mark_owner(rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell the children of this process that it is that rank."""
    environ[_OWNER] = f"{rank}:{os.getpid()}"


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


def host_key() -> str:
    """The same text in all processes that share one monotonic clock."""
    if known := boot_id():
        return known
    import socket

    return socket.gethostname()


def describe_process() -> dict[str, Any]:
    """The part of the header line that does not depend on the framework."""
    import platform
    import socket

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
