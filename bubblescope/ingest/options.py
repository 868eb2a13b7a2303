"""What a reader may be told: limits against hostile files, and the user's own names of kernels and ranges."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bubblescope.errors import InputError
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
class _Rule:
    pattern: str

    def search(self, text: str) -> Any:
        r"""The first match in `text`, as of `re.Pattern.search`; None without one.

        >>> NameRule(r"mb(?P<microbatch>\d+)", Kind.FORWARD).search("fwd_mb12")["microbatch"]
        '12'
        """
        return linear_pattern(self.pattern).search(text.encode("utf-8", "replace").decode())


@dataclass(frozen=True)
class NameRule(_Rule):
    """Ranges whose name `pattern` (RE2's syntax) finds are operations of `kind`; None: a range is a training step.
    stage, microbatch, chunk: for what the pattern has no group of that name."""

    kind: Kind | None
    stage: int = -1
    microbatch: int = -1
    chunk: int = -1


@dataclass(frozen=True)
class KernelRule(_Rule):
    """Kernels whose name `pattern` finds are communication, or are work, whatever else says what they are."""

    communication: bool


@dataclass(frozen=True)
class ReadOptions:
    """Limits and names of one load.

    max_bytes: inflated size of one file. max_events: events kept of one file. names: the user's rules for ranges and
    kernels (`ingest.usernames` reads them from a file). keep_cpu_ops: keep the operators of the host that nothing
    reads, too. cache: keep what was read in the user's cache folder, and use it.
    """

    max_bytes: int = 16 << 30
    max_events: int = 50_000_000
    names: tuple[NameRule | KernelRule, ...] = ()
    keep_cpu_ops: bool = False
    cache: bool = False

    def range_rules(self) -> Iterator[NameRule]:
        return (rule for rule in self.names if isinstance(rule, NameRule))

    def kernel_rules(self) -> Iterator[KernelRule]:
        return (rule for rule in self.names if isinstance(rule, KernelRule))

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


def beyond_limit(found: str, unit: str, where: str) -> InputError:
    """The error of a file with more than the limit; unit: "events" or "bytes"."""
    hint = f"raise the limit (--max-{unit}, max_{unit} in Python) if you trust the file, or record less"
    return InputError(found, hint=hint, where=where)
