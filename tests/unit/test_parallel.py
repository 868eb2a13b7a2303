"""Many files over processes: the same results in the same order, told as they come, and nothing left behind."""

from __future__ import annotations

import functools
import gzip
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bubblescope.errors import InputError
from bubblescope.ingest import read
from bubblescope.ingest.kineto import read_part
from bubblescope.ingest.parallel import over_files, watched
from bubblescope.ingest.pool import LocalPool
from bubblescope.model import Run
from tests.support.kineto_bulk import Bulk, pieces
from tests.support.kineto_gen import Shape, Style, simulate, traces, write
from tests.support.small_recording import write_recording
from tests.support.synthetic import Job, constant

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("job")
    write(out, traces(simulate(Shape(steps=2)), Style(launches=True)))
    return out


def same(a: Run, b: Run) -> None:
    for column in ("start_ns", "end_ns", "name", "rank", "kind", "seq", "corr", "step"):
        assert np.array_equal(getattr(a.spans, column), getattr(b.spans, column)), column
    assert np.array_equal(a.links.launch, b.links.launch)
    assert a.names.texts == b.names.texts
    assert a.notices == b.notices
    assert a.source == b.source


def test_processes_read_what_one_process_reads(folder: Path) -> None:
    alone = read(folder)
    with LocalPool(2) as pool:
        same(alone, read(folder, executor=pool))


def test_processes_read_the_recording_that_one_process_reads(tmp_path: Path) -> None:
    """One rank's file is cut, one is empty: what is said of them is the same, too."""
    folder = write_recording(tmp_path, Job(stages=4, microbatches=6, steps=3), constant(1000, 2000))
    cut = folder / "rank-00002.jsonl"
    cut.write_bytes(cut.read_bytes()[:-400])
    (folder / "rank-00003.jsonl").write_bytes(b"")
    alone = read(folder)
    with LocalPool(2) as pool:
        same(alone, read(folder, executor=pool))
    assert {"tail-cut", "file-empty"} <= {n.code for n in alone.notices}


def test_any_executor_will_do(folder: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        same(read(folder), read(folder, executor=pool))


def test_a_bad_file_costs_only_itself(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    paths = [str(bad), *(str(p) for p in sorted(folder.iterdir()))]
    with LocalPool(2) as pool:
        results = [result for _, result in over_files(read_part, paths, pool)]
    assert isinstance(results[0], InputError)
    assert results[0].where == str(bad)
    assert [r.rank for r in results[1:] if not isinstance(r, InputError)] == [0, 1, 2, 3]


def test_little_to_read_starts_no_process(folder: Path) -> None:
    with LocalPool(2, at_least=1 << 30) as pool:
        read(folder, executor=pool)
        assert not pool._processes


class Watcher:
    """Notes what is told of the progress."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def begin(self, files: int, size: int) -> None:
        self.told += [("files", files), ("size", size)]

    def done(self, size: int) -> None:
        self.told.append(("done", size))


def test_progress_is_told_of_every_file_and_byte(folder: Path) -> None:
    watcher = Watcher()
    with watched(watcher):
        read(folder)
    sizes = [p.stat().st_size for p in sorted(folder.iterdir())]
    assert watcher.told == [("files", 4), ("size", sum(sizes)), *(("done", s) for s in sizes)]


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz", "damaged.json.gz"])
def test_progress_is_told_while_a_file_is_read(tmp_path: Path, name: str) -> None:
    text = "".join(pieces(Bulk(3_000_000))).encode()
    packed = bytearray(gzip.compress(text, 0) if name.endswith("gz") else text)
    if name.startswith("damaged"):
        packed[-8] ^= 1
    (tmp_path / name).write_bytes(packed)
    watcher = Watcher()
    with watched(watcher):
        read(tmp_path / name)
    done = [size for what, size in watcher.told if what == "done"]
    assert len(done) > 2
    assert sum(done) == len(packed)


def test_the_folder_of_results_goes_with_the_pool(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with LocalPool(2) as pool:
        list(over_files(read_part, [str(p) for p in folder.iterdir()], pool))
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def die(path: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_an_error_with_a_hint(folder: Path) -> None:
    with pytest.raises(InputError, match="killed") as caught, LocalPool(2) as pool:
        list(over_files(die, [str(p) for p in folder.iterdir()], pool))
    assert "--jobs" in caught.value.hint


SLEEPER = """
import sys, time, pathlib
from bubblescope.ingest.parallel import over_files
from bubblescope.cli.output import ended_by_sigterm
from bubblescope.ingest.pool import LocalPool

def sleep(path):
    pathlib.Path(path + ".began").touch()
    time.sleep(300)

if __name__ == "__main__":
    with ended_by_sigterm(), LocalPool(2) as pool:
        list(over_files(sleep, sys.argv[1:], pool))
"""


def _children(pid: int) -> list[int]:
    return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(what: object, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to see children")
def blocked(path: str) -> list[signal.Signals]:
    return [signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]


def test_ctrl_c_does_not_reach_a_process_that_has_just_begun() -> None:
    """It would print its traceback beside our message."""
    with LocalPool(1) as pool:
        [masks] = pool.over(blocked, ["x"])
    assert isinstance(masks, list) and signal.SIGINT in masks
    assert signal.SIGINT not in blocked("x")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_no_process_stays_and_after_a_request_to_end_no_file(
    tmp_path: Path, number: signal.Signals
) -> None:
    script, temporary = tmp_path / "sleeper.py", tmp_path / "tmp"
    script.write_text(SLEEPER)
    temporary.mkdir()
    paths = [str(tmp_path / f"{i}") for i in range(4)]
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(
        [sys.executable, script, *paths], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert _until(lambda: len(list(tmp_path.glob("*.began"))) == 2)
    children = _children(process.pid)
    assert len(children) >= 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.wait(60)
    assert _until(lambda: not any(map(_alive, children)))
    if number != signal.SIGKILL:
        assert not list(temporary.iterdir())


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LocalPool(1) as living:
        (old,) = tmp_path.iterdir()
        (old / "0.part").touch()
        with LocalPool(1):
            assert len(list(tmp_path.iterdir())) == 2
        os.utime(old, (1000, 1000))
        with LocalPool(1):
            assert old not in tmp_path.iterdir()
        assert living.worth_it([1, 1])


def test_reading_is_bound_to_nothing_but_the_path() -> None:
    """What is sent to other machines pickles by name."""
    import pickle

    job = functools.partial(read_part)
    assert pickle.loads(pickle.dumps(job)).func is read_part  # noqa: S301
