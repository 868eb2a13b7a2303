"""What a reader may be told: limits against hostile files, and the user's own kernel names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadOptions:
    """Limits and names of one load.

    max_bytes: inflated size of one file. max_events: events kept of one file. comm_names: a regular expression;
    kernels that match are communication although no built-in name says so. compute_names: the opposite, and
    it wins.
    """

    max_bytes: int = 64 << 30
    max_events: int = 200_000_000
    comm_names: str = ""
    compute_names: str = ""


DEFAULT = ReadOptions()
