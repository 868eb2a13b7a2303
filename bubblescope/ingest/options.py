"""What a reader may be told: limits against hostile files, and the user's own names of kernels and ranges."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from bubblescope.model import Kind


@functools.cache
def linear_pattern(pattern: str) -> Any:
    """`pattern`, compiled by RE2: it searches in time linear in the text, whatever the pattern says, so that no rule
    can stop a load. Raises ValueError with RE2's reason for what it does not take (look-around, back-references)."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode("utf-8", "replace")) from error


@dataclass(frozen=True)
class NameRule:
    """Ranges whose name `pattern` (RE2's syntax) finds are operations of `kind`; None: a range is a training step.
    stage, microbatch, chunk: for what the pattern has no group of that name."""

    pattern: str
    kind: Kind | None
    stage: int = -1
    microbatch: int = -1
    chunk: int = -1

    def search(self, text: str) -> Any:
        r"""The first match in `text`, as of `re.Pattern.search`; None without one.

        >>> NameRule(r"mb(?P<microbatch>\d+)", Kind.FORWARD).search("fwd_mb12")["microbatch"]
        '12'
        """
        return linear_pattern(self.pattern).search(text.encode("utf-8", "replace").decode())


@dataclass(frozen=True)
class ReadOptions:
    """Limits and names of one load.

    max_bytes: inflated size of one file. max_events: events kept of one file. comm_names: a regular expression;
    kernels that match are communication although no built-in name says so. compute_names: the opposite, and
    it wins. names: the user's rules for ranges (`ingest.usernames` reads them from a file). keep_cpu_ops: keep the
    operators of the host that nothing reads, too. cache: keep what was read in the user's cache folder, and use it.
    """

    max_bytes: int = 16 << 30
    max_events: int = 50_000_000
    comm_names: str = ""
    compute_names: str = ""
    names: tuple[NameRule, ...] = ()
    keep_cpu_ops: bool = False
    cache: bool = False

    def limited(self, max_events: int | None, max_bytes: int | None) -> ReadOptions:
        """With these limits in place of its own, where they are given.

        >>> ReadOptions().limited(10, None).max_events
        10
        """
        return replace(
            self,
            max_events=self.max_events if max_events is None else max_events,
            max_bytes=self.max_bytes if max_bytes is None else max_bytes,
        )


DEFAULT = ReadOptions()
