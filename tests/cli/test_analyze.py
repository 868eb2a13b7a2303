"""`bubblescope analyze` writes what was asked for, nothing else, and fails as promised."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from bubblescope.cli import analyze as command
from bubblescope.errors import InputError, ThresholdExceeded, UsageError
from bubblescope.report.build import ReportOptions
from tests.support.cli_runner import Runner
from tests.support.fake_report import build
from tests.support.kineto_gen import Shape, simulate, traces, write

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "before"


def test_a_path_that_is_not_there_is_exit_3_with_the_path_and_a_hint(bubblescope: Runner) -> None:
    done = bubblescope("analyze", "nowhere.json")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert "nowhere.json" in done.stderr
    assert "\nhint: " in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("content", ["", "{", "hello", '{"traceEvents": []}', "\x00\x01\x02", "[]", "null"])
def test_a_file_that_is_no_trace_is_exit_3_and_never_a_traceback(
    content: str, bubblescope: Runner, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(content)
    done = bubblescope("analyze", "x.json", "--json", "-")
    assert done.returncode == 3, done.stderr
    assert "x.json" in done.stderr
    assert "\nhint: " in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [(), ("--no-cache",), ("--format", "kineto"), ("--format", "nsys")])
def test_a_pipe_and_a_device_are_refused_and_not_waited_for(
    arguments: tuple[str, ...], bubblescope: Runner, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "device.json"):
        done = bubblescope("analyze", name, *arguments)
        assert done.returncode == 3
        assert name in done.stderr
        assert "empty" not in done.stderr


@pytest.mark.parametrize(("option", "above", "enough"), [("--max-events", 10, 2_000), ("--max-bytes", 9, 1 << 20)])
@pytest.mark.parametrize("name", ["analyze", "whatif", "diff"])
def test_the_limits_of_a_file_are_options_and_the_refusal_names_them(
    name: str, option: str, above: int, enough: int, bubblescope: Runner, tmp_path: Path
) -> None:
    file = write(tmp_path, traces(simulate(Shape())))[0]
    paths = [str(file)] * (2 if name == "diff" else 1)
    refused = bubblescope(name, *paths, option, str(above))
    assert refused.returncode == 3
    assert f"more than {above} " in refused.stderr
    assert option in refused.stderr
    assert f"more than {enough:,} " not in bubblescope(name, *paths, option, str(enough)).stderr


def test_the_job_file_of_a_recording_alone_is_refused_with_the_folder_to_give(bubblescope: Runner) -> None:
    done = bubblescope("analyze", str(EXAMPLE / "job.json"))
    assert done.returncode == 3
    assert "describes the job, and holds none of its steps" in done.stderr
    assert f"hint: give the folder: {EXAMPLE}" in done.stderr


@pytest.mark.parametrize(("option", "above", "enough"), [("--max-events", 3, 5_000), ("--max-bytes", 9, 1 << 20)])
def test_the_limits_of_a_file_hold_for_recordings_too(
    option: str, above: int, enough: int, bubblescope: Runner
) -> None:
    recording = str(EXAMPLE)
    refused = bubblescope("analyze", recording, option, str(above))
    assert refused.returncode == 3
    assert f"more than {above} events" in refused.stderr or f"larger than {above} bytes" in refused.stderr
    assert option in refused.stderr
    assert bubblescope("analyze", recording, option, str(enough)).returncode == 0


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        ("x", "--fail-above", "1.5"),
        ("x", "--fail-above", "nan"),
        ("x", "--fail-above", "-0.1"),
        ("x", "--fail-above", "inf"),
        ("x", "--price-per-gpu-hour", "nan"),
        ("x", "--price-per-gpu-hour", "-1"),
        ("x", "--gpus", "0"),
        ("x", "--max-events", "0"),
        ("x", "--engine", "spark"),
        ("x", "--scheduler", "tcp://127.0.0.1:1"),
        ("x", "--engine", "dask"),
    ],
)
def test_wrong_options_are_wrong_usage(wrong: tuple[str, ...], bubblescope: Runner) -> None:
    done = bubblescope("analyze", *wrong)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_out_means_the_page_and_the_json_and_each_option_adds_its_own(tmp_path: Path) -> None:
    outputs = command.Outputs(
        out=tmp_path / "o",
        html=tmp_path / "h" / "page.html",
        json=str(tmp_path / "j" / "data.json"),
        csv=tmp_path / "c",
        perfetto=tmp_path / "p" / "trace.json",
    )
    command.deliver(build(), outputs)
    made = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert {"o/report.html", "o/report.json", "h/page.html", "j/data.json", "p/trace.json", "c/gpus.csv"} <= made
    assert {m.partition("/")[0] for m in made} == set("ohjcp")
    assert (tmp_path / "o" / "report.json").read_bytes() == (tmp_path / "j" / "data.json").read_bytes()


def test_without_an_output_option_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command.deliver(build(), command.Outputs())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.strip()


def test_json_on_stdout_leaves_no_room_for_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    command.deliver(build(), command.Outputs(json="-"))
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


def test_markdown_on_stdout_stands_alone_too(capsys: pytest.CaptureFixture[str]) -> None:
    command.deliver(build(), command.Outputs(markdown="-"))
    assert capsys.readouterr().out.startswith("### Pipeline bubbles\n")


def test_two_outputs_on_stdout_are_refused_before_anything_is_read(bubblescope: Runner) -> None:
    done = bubblescope("analyze", "nowhere", "--json", "-", "--markdown", "-")
    assert done.returncode == 2
    assert "both want stdout" in done.stderr


def test_the_limit_is_exceeded_only_above_it() -> None:
    report = build()
    fraction = report.data["bubble"]["fraction"]
    command.check_threshold(report, None)
    command.check_threshold(report, fraction)
    with pytest.raises(ThresholdExceeded, match=f"{fraction:.4f}"):
        command.check_threshold(report, fraction - 0.001)


def test_a_bubble_that_could_not_be_measured_does_not_pass_the_limit() -> None:
    report = build()
    report.data["bubble"]["fraction"] = None
    with pytest.raises(InputError, match="cannot be measured"):
        command.check_threshold(report, 0.9)


def test_a_request_to_end_ends_reading_as_an_exception_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bubblescope.ingest.read", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        command.make_report(["x"], ReportOptions())
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_one_job_or_little_to_read_stays_in_this_process_and_several_jobs_are_a_pool() -> None:
    with command.reading_pool("local", None, None) as little:
        assert little is None or not little.worth_it([1 << 10, 1 << 10])
    with command.reading_pool("local", None, 1) as one:
        assert one is None
    with command.reading_pool("local", None, 2) as pool:
        assert pool is not None
        assert list(pool.map(abs, [-1, -2])) == [1, 2]


def test_a_dask_scheduler_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(UsageError, match="address"), command.reading_pool("dask", None, None):
        pass


TRACES = Path(__file__).parents[3] / "shared" / "data" / "kineto"


@pytest.mark.skipif(not TRACES.exists(), reason="the real traces of ../shared/data are not beside this checkout")
@pytest.mark.parametrize("trace", sorted(p.name for p in TRACES.glob("*.json.gz")))
def test_a_real_trace_gives_a_result_or_a_reason_and_never_a_traceback(trace: str, bubblescope: Runner) -> None:
    done = bubblescope("analyze", str(TRACES / trace), "--json", "-")
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        gpus = json.loads(done.stdout)["gpus"]
        assert gpus
        assert all(gpu["busy"] > 0 for gpu in gpus), "a rank without device activity has no share of idle time"
    else:
        assert done.returncode == 3
        assert "\nhint: " in done.stderr
        assert trace in done.stderr


@pytest.mark.parametrize("option", ["--json", "--html", "--markdown", "--perfetto"])
def test_an_output_never_overwrites_a_file_that_was_read(option: str, tmp_path: Path, bubblescope: Runner) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(Path(__file__).parents[2] / "docs" / "examples" / "before", folder)
    file = folder / "rank-00002.jsonl"
    before = file.read_bytes()
    done = bubblescope("analyze", str(folder), option, str(file))
    assert done.returncode == 2
    assert "one of the files that were read" in done.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("analyze", "x", "--json", "same", "--html", "same"),
        ("analyze", "x", "--markdown", "./same", "--perfetto", "folder/../same"),
        ("analyze", "x", "--out", "o", "--html", "o/report.json"),
        ("diff", "x", "y", "--html", "same", "--markdown", "same"),
        ("simulate", "--schedule", "1F1B", "--stages", "2", "--microbatches", "2", "--forward", "1",
         "--input-grad", "1", "--weight-grad", "1", "--json", "same", "--write-csv", "same"),
        ("demo", "--out", "o", "--json", "o/report.html"),
    ],
)  # fmt: skip
def test_two_outputs_in_one_file_are_refused_before_anything_is_done(
    arguments: tuple[str, ...], tmp_path: Path, bubblescope: Runner
) -> None:
    (tmp_path / "folder").mkdir()
    done = bubblescope(*arguments)
    assert done.returncode == 2, done.stderr
    assert "both want " in done.stderr and "\nhint: " in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_the_same_output_named_twice_and_devices_are_no_conflict(tmp_path: Path) -> None:
    command.check_outputs(command.Outputs(out=tmp_path, json=str(tmp_path / "report.json")))
    command.check_outputs(command.Outputs(html=Path("/dev/null"), json="/dev/null"))


@pytest.mark.parametrize("option", ["--json", "--html", "--markdown", "--perfetto"])
def test_a_folder_where_a_file_is_wanted_is_wrong_usage_before_anything_is_read(
    option: str, bubblescope: Runner
) -> None:
    done = bubblescope("analyze", "nowhere", option, ".")
    assert done.returncode == 2
    assert "is a directory" in done.stderr


@pytest.mark.parametrize("name", ["diff", "whatif"])
def test_no_other_command_overwrites_what_was_read_either(name: str, tmp_path: Path, bubblescope: Runner) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(Path(__file__).parents[2] / "docs" / "examples" / "before", folder)
    file = folder / "rank-00002.jsonl"
    before = file.read_bytes()
    done = bubblescope(name, *[str(folder)] * (2 if name == "diff" else 1), "--json", str(file))
    assert done.returncode == 2
    assert "one of the files that were read" in done.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("analyze", "nowhere", "--json", ""), "--json"),
        (("analyze", "nowhere", "--out", ""), "--out"),
        (("analyze", "nowhere", "--csv", ""), "--csv"),
        (("analyze", "nowhere", "--html", ""), "--html"),
        (("analyze", "nowhere", "--html", "-"), "does not go to stdout"),
        (("analyze", "nowhere", "--parquet", "-"), "does not go to stdout"),
        (("demo", "--out", ""), "--out"),
        (("run", "--out", "", "true"), "--out"),
        (("run", "--ranks", "", "true"), "not a list of ranks"),
        (("doctor", "--json", ""), "--json"),
    ],
)
def test_an_unset_variable_is_no_place_to_write_to(
    arguments: tuple[str, ...], said: str, tmp_path: Path, bubblescope: Runner
) -> None:
    done = bubblescope(*arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["analyze", "whatif", "watch"])
def test_an_empty_path_is_not_this_folder(name: str, bubblescope: Runner) -> None:
    done = bubblescope(name, "")
    assert done.returncode == 2
    assert "but must be a path" in done.stderr


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="there is no /proc here")
def test_what_the_file_system_refuses_is_an_error_about_the_input(bubblescope: Runner) -> None:
    """Reading the start of a process's memory is an input/output error without a file name."""
    done = bubblescope("analyze", "/proc/self/mem")
    assert done.returncode == 3
    assert done.stderr.startswith("error: cannot be read: Input/output error, in /proc/self/mem\nhint: ")


def test_a_folder_that_may_not_be_entered_is_an_error_about_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/secret/rank0.json")

    monkeypatch.setattr("bubblescope.ingest.discover.expand", refused)
    with pytest.raises(InputError, match=r"Permission denied, in /secret/rank0\.json"):
        command.make_report(["/secret"], ReportOptions())
