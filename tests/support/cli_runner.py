"""The type of the `bubblescope` fixture of tests/cli."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

Runner = Callable[..., CompletedProcess[str]]
