"""What a reader may be told: limits against hostile files, and the user's own names of kernels and ranges."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bubblescope.model import Kind


@dataclass(frozen=True)
class NameRule:
    """Ranges whose name `pattern` finds are operations of `kind`; None: a range is a training step. stage, microbatch,
    chunk: for what the pattern has no group of that name."""

    pattern: re.Pattern[str]
    kind: Kind | None
    stage: int = -1
    microbatch: int = -1
    chunk: int = -1


@dataclass(frozen=True)
class ReadOptions:
    """Limits and names of one load.

    max_bytes: inflated size of one file. max_events: events kept of one file. comm_names: a regular expression;
    kernels that match are communication although no built-in name says so. compute_names: the opposite, and
    it wins. names: the user's rules for ranges (`ingest.usernames` reads them from a file). keep_cpu_ops: keep the
    operators of the host that nothing reads, too. cache: keep what was read in the user's cache folder, and use it.
    """

    max_bytes: int = 64 << 30
    max_events: int = 200_000_000
    comm_names: str = ""
    compute_names: str = ""
    names: tuple[NameRule, ...] = ()
    keep_cpu_ops: bool = False
    cache: bool = False


DEFAULT = ReadOptions()
