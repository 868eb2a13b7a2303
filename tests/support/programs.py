"""Programs that tests need beside Python."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    """Its path. Without it tests fail, so that nobody takes them for passed."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed, and is needed here: scripts/test installs it, or apt-get install {name}")
    return found
