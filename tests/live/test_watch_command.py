"""`bubblescope watch` as people start it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bubblescope import analyze, load
from bubblescope.cli.watch import _until_ended
from tests.live import jobs
from tests.live.processes import BUBBLESCOPE, watching


def _run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BUBBLESCOPE, "watch", *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )  # fmt: skip


def test_help_has_an_example() -> None:
    done = _run("--help")
    assert done.returncode == 0
    assert "bubblescope watch runs/x --prometheus-port 9410" in done.stdout
    assert "BUBBLESCOPE_TOKEN" in done.stdout


def test_once_writes_the_metrics_and_the_state_and_ends(tmp_path: Path) -> None:
    job = jobs.steady()
    job.write(tmp_path / "run", range(6))
    job.end(tmp_path / "run")
    target = tmp_path / "x.prom"
    done = _run(str(tmp_path / "run"), "--once", "--textfile", str(target), "--label", "run=large", "--json", "-")
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    expected = analyze(load(tmp_path / "run")).data["bubble"]["fraction"]
    assert state["state"] == "ended"
    assert state["report"]["bubble"]["fraction"] == pytest.approx(expected, rel=1e-6)
    assert state["totals"]["steps"] == 5
    assert f'bubblescope_bubble_ratio{{run="large"}} {expected}'[:45] in target.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["/nowhere/at/all"], 3, "no such file or folder"),
        ([".", "--host", "0.0.0.0"], 2, "needs a token"),
        ([".", "--token", "short"], 2, "fewer than 16"),
        ([".", "--label", "rank=1"], 2, "a label rank of their own"),
        ([".", "--label", "host=a"], 2, "a label host of their own"),
        ([".", "--label", "a=1", "--label", "a=2"], 2, "--label a is given twice: 1 and 2"),
        ([".", "--host", "nosuch.invalid", "--token", "x" * 16], 2, "is no address of this machine"),
        ([".", "--host", "192.0.2.1", "--token", "x" * 16], 2, "is no address of this machine"),
        ([".", "--label", "a-b=1"], 2, "not a label"),
        ([".", "--once", "--textfile", "/nowhere/x.prom"], 2, "cannot write"),
        ([".", "--steps", "1"], 2, "1 is not in the range"),
        ([".", "--port", "8711", "--prometheus-port", "8711"], 2, "--port and --prometheus-port are both 8711"),
        ([".", "--price-per-gpu-hour", "1e300"], 2, "price_per_gpu_hour is 1e+300"),
        ([".", "--once", "--textfile", "same", "--json", "same"], 2, "both want same"),
        (["pyproject.toml", "--once", "--json", "pyproject.toml"], 2, "one of the files that were read"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], code: int, said: str) -> None:
    done = _run(*arguments)
    assert done.returncode == code
    assert said in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


def test_once_prints_the_summary(tmp_path: Path) -> None:
    job = jobs.steady()
    job.write(tmp_path / "run", range(6))
    job.end(tmp_path / "run")
    done = _run(str(tmp_path / "run"), "--once")
    assert done.returncode == 0, done.stderr
    assert "GPU" in done.stdout and "lost to pipeline bubbles" in done.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no recording of a pipeline here"),
        ("hello\n", "there is no recording of a pipeline here; 1 unreadable line left out"),
        ('{"traceEvents": []}', "there is no recording of a pipeline here"),
    ],
)
def test_once_on_nothing_or_on_something_else_says_so(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "rank-00000.jsonl").write_text(content)
    done = _run(str(tmp_path), "--once", "--json", "-")
    assert done.returncode == 3
    assert done.stderr.startswith(f"error: {said}") and str(tmp_path) in done.stderr and "\nhint: " in done.stderr
    assert json.loads(done.stdout)["state"] == "waiting"


def test_once_before_the_first_step_says_that_there_is_none(tmp_path: Path) -> None:
    jobs.steady().write(tmp_path / "run", range(1))
    done = _run(str(tmp_path / "run"), "--once")
    assert done.returncode == 3
    assert done.stderr.startswith("error: no step can be analysed yet")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = _run(str(tmp_path), "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in done.stderr


def test_without_its_libraries_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'uvicorn' else real(name, *a)\n"
    )
    done = _run(str(tmp_path), PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 2
    assert "watch needs uvicorn" in done.stderr and "pip install 'bubblescope[live]'" in done.stderr


def test_ctrl_c_ends_it_as_interrupted_and_sigterm_as_done(tmp_path: Path) -> None:
    jobs.steady().write(tmp_path / "run", range(4))
    for number, (how, code) in enumerate(((signal.SIGINT, 130), (signal.SIGTERM, 0))):
        with watching(tmp_path / "run", tmp_path / f"{number}.log") as made:
            made.process.send_signal(how)
            assert made.process.wait(timeout=30) == code
            assert "Traceback" not in made.said


def test_it_listens_on_this_host_only(tmp_path: Path) -> None:
    with watching(tmp_path, tmp_path / "log") as made:
        assert made.page.startswith("http://127.0.0.1:")
        sockets = Path(f"/proc/{made.process.pid}/net/tcp").read_text().splitlines()[1:]
        port = f"{int(made.page.rsplit(':', 1)[1].strip('/')):04X}"
        mine = [line.split()[1] for line in sockets if line.split()[1].endswith(f":{port}") and line.split()[3] == "0A"]
        assert mine == [f"0100007F:{port}"]


def test_ctrl_c_ends_a_watch_also_where_a_library_makes_something_else_of_what_is_raised() -> None:
    """As NumPy does: a comparison that is interrupted is a TypeError."""
    with pytest.raises(KeyboardInterrupt), _until_ended() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
    with pytest.raises(KeyboardInterrupt), _until_ended() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        stop.clear()  # not reached: the second one is raised where it comes
    assert stop.is_set()
