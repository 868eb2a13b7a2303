"""`bubblescope run`: the command's own words, exit status and signals pass through."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "bubblescope", "run"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_output_and_exit_status_are_the_commands(tmp_path: Path) -> None:
    done = run("--out", "x", "--", sys.executable, "-c", "print('theirs'); raise SystemExit(7)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "theirs\n")
    assert "nothing was recorded: the command ended with exit status 7, and" in done.stderr
    assert not (tmp_path / "x").exists()


def test_options_of_the_command_are_not_ours(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:])"
    done = run("--steps", "3", sys.executable, "-c", code, "--steps", "9", "--help", cwd=tmp_path)
    assert done.stdout == "['--steps', '9', '--help']\n"


def test_the_job_gets_the_settings(tmp_path: Path) -> None:
    code = "import os; print(sorted((k, v) for k, v in os.environ.items() if k.startswith('BUBBLESCOPE')))"
    done = run(
        "--out", "x", "--every", "4", "--ranks", "0-1", "--framework", "torch", "--", sys.executable, "-c", code,
        cwd=tmp_path,
    )  # fmt: skip
    said = dict(ast.literal_eval(done.stdout))
    assert said["BUBBLESCOPE"] == "record" and said["BUBBLESCOPE_OUT"] == str(tmp_path / "x")
    assert (said["BUBBLESCOPE_EVERY"], said["BUBBLESCOPE_RANKS"]) == ("4", "0,1")
    assert said["BUBBLESCOPE_FRAMEWORK"] == "torch"


def test_standby_does_not_record(tmp_path: Path) -> None:
    done = run("--standby", "--", sys.executable, "-c", "import os; print(os.environ['BUBBLESCOPE'])", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "standby\n", "")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--", "no-such-launcher-anywhere"], ["--ranks", "x", "true"], ["--standby", "--steps", "3", "true"]],
)
def test_what_cannot_be_started_is_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "hint: " in done.stderr


def test_the_death_of_the_command_by_a_signal_is_ours_too(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = run("--", sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL


WAITS = """
import signal, sys, time
def ended(number, frame):
    print("got", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, ended)
print("ready", flush=True)
time.sleep(60)
"""


def test_signals_reach_the_command(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--", sys.executable, "-c", WAITS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=20)
    assert (said, process.returncode) == (f"got {int(signal.SIGTERM)}\n", 5)


def test_json_alone_is_on_stdout_and_what_the_command_prints_goes_to_stderr(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bubblescope", "run", "--json", "-", "--out", str(tmp_path / "job"), "--", "echo", "hi"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert found == {"out": str(tmp_path / "job"), "ranks_recorded": 0, "exit_status": 0}
    assert "hi" in done.stderr.splitlines()


def test_only_the_ranks_of_this_run_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for rank in range(3):
        (tmp_path / "x" / f"rank-0000{rank}.jsonl").write_text("{}\n")
    code = (
        "import pathlib; x = pathlib.Path('x')\n"
        "for name in ('rank-00000.71.jsonl', 'rank-00000.72.jsonl', 'rank-00004.jsonl'): (x / name).write_text('{}')"
    )
    done = run("--out", "x", "--json", "made.json", "--", sys.executable, "-c", code, cwd=tmp_path)
    assert json.loads((tmp_path / "made.json").read_text())["ranks_recorded"] == 2
    assert "bubblescope: 2 ranks recorded; see:" in done.stderr


def test_a_folder_with_an_earlier_recording_and_nothing_new_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "rank-00000.jsonl").write_text("{}\n")
    assert "nothing was recorded" in run("--out", "x", "--", "true", cwd=tmp_path).stderr


def after_notes(cwd: Path, *arguments: str, **left: str) -> str:
    """What `run` says at the end when the job's processes left these notes, and no recording."""
    code = "import os, pathlib; notes = pathlib.Path(os.environ['BUBBLESCOPE_NOTES'])"
    code += "".join(f"; (notes / {name!r}).write_text({text!r})" for name, text in left.items())
    said = run(*arguments, "--out", "x", "--", sys.executable, "-c", code, cwd=cwd).stderr
    assert said.startswith("bubblescope: nothing was recorded: ")
    return said


def test_it_is_said_why_nothing_was_recorded(tmp_path: Path) -> None:
    assert "had the recorder in it (PYTHONPATH and BUBBLESCOPE must reach every rank" in after_notes(tmp_path)
    assert "no process here imported a pipeline of torch, Megatron-Core or DeepSpeed (mark" in after_notes(
        tmp_path, loaded=""
    )
    other = after_notes(tmp_path, "--framework", "deepspeed", loaded="")
    assert "imported a pipeline of DeepSpeed; --framework deepspeed leaves out others'" in other
    ran = after_notes(tmp_path, loaded="", imported="")
    assert "no process here ran a pipeline" in ran and "bubblescope.span" in ran and "PYTHONPATH" not in ran
    marked = after_notes(tmp_path, loaded="", imported="", marked="")
    assert "no step ended of what bubblescope.span marks (bubblescope.step() says" in marked
    left = after_notes(tmp_path, "--ranks", "5-7", loaded="", unchosen="2")
    assert "--ranks names none of the 2 ranks of this job" in left
    chosen = after_notes(tmp_path, "--ranks", "1", loaded="", imported="", unchosen="2")
    assert "no process among the ranks that --ranks names ran a pipeline" in chosen
    full = after_notes(tmp_path, loaded="", imported="", lost="cannot write the recording in x: full")
    assert full == "bubblescope: nothing was recorded: cannot write the recording in x: full\n"


def test_a_run_inside_the_command_is_named(tmp_path: Path) -> None:
    said = run("--out", "x", "--", *COMMAND, *writing("in side", "rank-00000.jsonl"), cwd=tmp_path).stderr
    assert said.splitlines()[-1].endswith("by `bubblescope run` or bubblescope.record, into in side")
    said = run("--out", "x", "--", *COMMAND, "--out", "y", "--", "true", cwd=tmp_path).stderr
    assert "did so itself" not in said


def test_a_process_that_imports_torch_leaves_that_it_was_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = "import torch, os, pathlib; print(os.listdir(os.environ['BUBBLESCOPE_NOTES']))"
    done = run("--out", "x", "--", sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout == "['loaded']\n"
    ignoring = run("--out", "x", "--", sys.executable, "-E", "-c", code, cwd=tmp_path)
    assert ignoring.stdout == "[]\n" and "python -E" in ignoring.stderr


WRITES = "import pathlib, sys; x = pathlib.Path({!r}); x.mkdir(exist_ok=True); [(x / n).write_text('{{}}') for n in {}]"


def writing(folder: str, *names: str) -> list[str]:
    return ["--out", folder, "--", sys.executable, "-c", WRITES.format(folder, names)]


def test_the_printed_command_reaches_this_runs_recording(tmp_path: Path) -> None:
    first = run(*writing("an ö", "rank-00000.jsonl", "rank-00001.jsonl"), cwd=tmp_path)
    assert first.stderr == "bubblescope: 2 ranks recorded; see: bubblescope analyze 'an ö'\n"
    again = run(*writing("an ö", "rank-00000.71.jsonl"), cwd=tmp_path)
    assert again.stderr.endswith("1 rank recorded; see: bubblescope analyze 'an ö/rank-00000.71.jsonl'\n")


def test_behind_a_launcher_each_rank_counts_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    note = "import os; pathlib.Path(os.environ['BUBBLESCOPE_NOTES'], 'rank-00001').touch()"
    *before, code = writing("x", "rank-00000.jsonl", "rank-00001.jsonl")
    done = run(*before, f"{code}; {note}", cwd=tmp_path)
    assert done.stderr == "bubblescope: 1 rank recorded; see: bubblescope analyze x\n"


def test_a_recording_that_is_not_whole_is_called_that(tmp_path: Path) -> None:
    note = "import os; pathlib.Path(os.environ['BUBBLESCOPE_NOTES'], 'lost').write_text('the disk is full')"
    *before, code = writing("x", "rank-00000.jsonl")
    done = run(*before, f"{code}; {note}", cwd=tmp_path)
    assert "1 rank recorded, not whole (the disk is full); see: bubblescope analyze x" in done.stderr


def test_the_exit_status_is_the_commands_although_our_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("--json", "file/below.json", "--", sys.executable, "-c", "raise SystemExit(7)", cwd=tmp_path)
    assert done.returncode == 7
    assert "warning: cannot write: " in done.stderr
