"""A bounded run of what scripts/fuzz_readers does at length, and the memory that a large file takes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import fuzzing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("hundred", range(3))
def test_mutated_files_of_every_format_give_a_result_or_a_reason(tmp_path: Path, hundred: int) -> None:
    """Other numbers than the long run's, so that both together see more."""
    ends = Counter(fuzzing.attempt(n, 20_000, tmp_path) for n in range(hundred * 60, hundred * 60 + 60))
    assert ends["result"] > 10
    assert set(ends) <= {"result", "InputError", "UsageError", "ScheduleError"}


def test_sound_files_of_every_format_give_results(tmp_path: Path) -> None:
    """Else a mutated one that is refused would show nothing."""
    for i, seed in enumerate(fuzzing.seeds(tmp_path)):
        work = tmp_path / f"sound{i}"
        work.mkdir()
        for name, data in ((seed.name, seed.data), *seed.beside):
            (work / name).write_bytes(data)
        assert fuzzing._outcome(seed, work) == "result", seed.name


def test_the_script_finds_what_fails_and_says_so(tmp_path: Path) -> None:
    script, options = ROOT / "scripts" / "fuzz_readers", ("--files", "24", "--large", "0", "--write")
    done = subprocess.run(
        [sys.executable, script, *options, tmp_path / "x.md"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| every format, some KB | 24 | 0 |" in (tmp_path / "x.md").read_text()


def test_a_file_of_20_mb_takes_less_than_a_gib(tmp_path: Path) -> None:
    """In a process of its own, from reading to report, and in seconds."""
    (tmp_path / "rank0.json").write_bytes(fuzzing.large_trace(20 << 20))
    code = (
        "import resource, sys, time, bubblescope as bs\n"
        "began = time.process_time()\n"
        "bs.analyze(bs.load(sys.argv[1]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, time.process_time() - began)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "rank0.json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    gib, seconds = map(float, done.stdout.split())
    assert gib < 1.0
    assert seconds < 10.0
