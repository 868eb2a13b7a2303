"""`scripts/bench` measures something, or says what is wrong with the request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "0"), "invalid positive value: '0'"),
        (("--rounds", "0"), "invalid positive value: '0'"),
        (("--megabytes", "20", "-5"), "invalid positive value: '-5'"),
        (("--only", "nonsense"), "--only names none of: bubblescope, native scanner; "),
    ],
)
def test_a_request_for_nothing_is_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCH, "--no-write", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
