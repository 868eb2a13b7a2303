"""Freed memory that the C library keeps for later, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # only glibc has it
        return lambda _: None
    function.argtypes = [ctypes.c_size_t]
    return function


def give_back() -> None:
    """After reading, most of the heap is free pieces between what was kept: more than is kept in a large recording.

    Costs milliseconds. Nothing happens where the C library has no such call.
    """
    _trim()(0)
