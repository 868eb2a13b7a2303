"""The one tree of errors. The command line turns them into exit codes; nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class BubblescopeError(Exception):
    """Base of every error a user can cause or meet.

    Attributes
    ----------
    what: what was found, and the rule it breaks.
    hint: what to do about it ("" when there is nothing to suggest).
    where: file, with byte or event index where known ("" when not about a file).
    """

    exit_code = 1

    def __init__(self, what: str, *, hint: str = "", where: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        return f"{self.what}, in {self.where}" if self.where else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process pools; the keyword arguments must survive pickling.
        return (_rebuild, (type(self), self.what, self.hint, self.where))


def _rebuild(cls: type[BubblescopeError], what: str, hint: str, where: str) -> BubblescopeError:
    return cls(what, hint=hint, where=where)


class UsageError(BubblescopeError, ValueError):
    """The caller asked for something that makes no sense (exit 2). In Python it is a ValueError, too."""

    exit_code = 2


class InputError(BubblescopeError):
    """The input cannot be analysed (exit 3)."""

    exit_code = 3


class AttachError(BubblescopeError):
    """There is nothing to attach to, or attaching was refused (exit 4)."""

    exit_code = 4


class ThresholdExceeded(BubblescopeError):
    """`--fail-above` was exceeded (exit 5)."""

    exit_code = 5


class ScheduleError(InputError):
    """An order of operations that cannot be executed: a cycle, a missing producer, a bad action."""


@contextmanager
def writing(path: str | PathLike[str]) -> Iterator[None]:
    """Around code that writes `path`: a full disk or a forbidden folder is the user's to mend, not our bug."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot write: {error.strerror or error}",
            where=str(error.filename or path),
            hint="choose another place, or make room and check the permissions there",
        ) from error
