"""What `analyze` writes for other tools, opened by them: Perfetto's JSON, Parquet, TensorBoard."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bubblescope as bs
from bubblescope.errors import InputError
from bubblescope.ingest.kineto_scan import scan
from bubblescope.report.build import Report
from bubblescope.views import parquet, perfetto, raster, tensorboard
from tests.support import tensorboard as board
from tests.support.cli_runner import Runner
from tests.support.kineto_gen import Shape, Style, simulate, traces, write

TRUTH = simulate(Shape(steps=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job")
    clocks = {1: (5_000_000, 0.0), 3: (-2_000_000, 0.0)}
    write(path, traces(TRUTH, Style(host=lambda rank: f"host{rank}", clock_ns=clocks)))
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return bs.analyze(bs.load(folder))


# --- Perfetto ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events(report: Report) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(perfetto.render(report))["traceEvents"]
    return events


def test_perfetto_has_a_track_for_each_stream(events: list[dict[str, Any]]) -> None:
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    for rank in range(4):
        streams = {name for pid, name in names if pid == rank and "stream" in name}
        assert streams == {f"GPU {rank}, stream {s}" for s in (7, 20, 24)}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(kernels) == sum(4 if o.kind == "F" else 7 for o in TRUTH.ops) + 2 * len(TRUTH.messages)


def test_perfetto_bubbles_have_a_colour_and_a_cause_and_fill_the_idle_time(
    events: list[dict[str, Any]], report: Report
) -> None:
    bubbles = [e for e in events if e.get("cat") == "bubble"]
    assert bubbles
    for bubble in bubbles:
        assert bubble["cname"]
        assert bubble["args"]["causes_us"]
    total = sum(sum(b["args"]["causes_us"].values()) for b in bubbles) / 1e6
    assert total == pytest.approx(sum(g["idle"] * g["steps"] for g in report.data["gpus"]), rel=1e-4)


def test_perfetto_arrows_join_both_ends_on_one_clock(events: list[dict[str, Any]]) -> None:
    """Hosts were up to 5 ms apart: no arrow points back in time."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == len(TRUTH.messages)
    for number, start in starts.items():
        assert 0 <= ends[number]["ts"] - start["ts"] < 50_000
        assert abs(ends[number]["pid"] - start["pid"]) == 1


def test_perfetto_draws_kernels_of_one_stream_that_overlap_on_a_second_track(report: Report) -> None:
    """Perfetto drops a slice that outlasts the one in which it begins."""
    device = report.device.copy()
    kernels = device.index[(device["stream"] == 7) & (device["rank"] == 1)].tolist()
    first, second = kernels[:2]
    device.loc[first, "end_s"] = device.loc[second, "start_s"] + 5e-9
    overlapping = replace(report)
    overlapping.__dict__["device"] = device
    events = json.loads(perfetto.render(overlapping))["traceEvents"]
    assert outlasting(events) == []
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    where = [names[e["pid"], e["tid"]] for e in events if e.get("cat") == "kernel" and e["pid"] == 1]
    assert where.count("GPU 1, stream 7, overlapping") == 1
    assert where.count("GPU 1, stream 7") == len(kernels) - 1


def test_perfetto_arrows_hold_on_to_slices_of_their_own(report: Report) -> None:
    """Two messages of a rank within a microsecond: their slices of 1 µs would overlap."""
    messages = report.messages.copy()
    first, second = messages.index[messages["src"] == messages.loc[0, "src"]].tolist()[:2]
    messages.loc[second, "send_s"] = messages.loc[first, "send_s"] + 4e-7
    close = replace(report)
    close.__dict__["messages"] = messages
    events = json.loads(perfetto.render(close))["traceEvents"]
    assert outlasting(events) == []
    ends = [(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert sorted(ends) == sorted((e["pid"], e["tid"], e["ts"]) for e in events if e.get("cat") == "p2p" and "dur" in e)


def outlasting(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slices that begin within another one of their track and end after it."""
    found, open_ends = [], defaultdict(list)
    slices = [(round(e["ts"] * 1e3), round(e["dur"] * 1e3), e) for e in events if e["ph"] == "X"]
    for start, length, event in sorted(slices, key=lambda s: (s[0], -s[1])):
        ends = open_ends[event["pid"], event["tid"]]
        ends[:] = [end for end in ends if end > start]
        if any(start + length > end for end in ends):
            found.append(event)
        ends.append(start + length)
    return found


def test_our_own_reader_sees_every_kernel_of_the_perfetto_file(report: Report, tmp_path: Path) -> None:
    found = scan(str(perfetto.write(report, tmp_path / "p.json")))
    assert found.notices == []
    assert int((found.events.cat == 0).sum()) == len(report.device)
    assert int((found.events.end_ns >= found.events.start_ns).all())


# --- Parquet -------------------------------------------------------------------------------------------------


def test_parquet_tables_are_the_reports_tables(report: Report, tmp_path: Path) -> None:
    import pandas as pd

    paths = {p.stem: p for p in parquet.write(report, tmp_path / "q")}
    assert {"gpus", "causes", "gaps", "ops", "messages", "advice", "device"} <= set(paths)
    gaps = pd.read_parquet(paths["gaps"])
    assert gaps["idle_s"].tolist() == report.gaps["idle_s"].tolist()
    assert gaps["cause"].tolist() == report.gaps["cause"].tolist()
    assert len(pd.read_parquet(paths["device"])) == len(report.device)


def test_lists_and_objects_in_a_table_become_json() -> None:
    import pandas as pd

    table = parquet.columns(pd.DataFrame({"a": [["x"], {"y": 1}, None], "b": ["s", None, "t"], 3: [1, 2, 3]}))
    assert table["a"].tolist() == ['["x"]', '{"y": 1}', None]
    assert table["b"].dropna().tolist() == ["s", "t"]
    assert list(table.columns) == ["a", "b", "3"]


# --- TensorBoard ---------------------------------------------------------------------------------------------


def test_without_the_package_the_option_says_what_to_install(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorboard.compat", None)
    with pytest.raises(InputError) as caught:
        tensorboard.write(report, tmp_path / "tb")
    assert "bubblescope[tensorboard]" in caught.value.hint
    assert not (tmp_path / "tb").exists()


def test_the_traces_for_the_profiler_are_traces_that_we_read(report: Report, tmp_path: Path) -> None:
    for rank in range(4):
        path = tmp_path / f"rank{rank}.1.pt.trace.json"
        path.write_text(json.dumps(tensorboard.trace(report, rank)))
    again = bs.analyze(bs.load(tmp_path))
    for ours, theirs in zip(again.data["gpus"], report.data["gpus"], strict=True):
        assert ours["busy"] == pytest.approx(theirs["busy"], abs=1e-6)


def test_the_picture_is_a_png_with_a_row_a_gpu(report: Report) -> None:
    picture = raster.timeline(report, int(report.steps["step"].iloc[0]))
    assert picture.shape == (4 * (raster.ROW + raster.GAP) + raster.GAP, raster.WIDTH, 3)
    assert {tuple(p) for p in picture[raster.GAP + 2].tolist()} >= {raster._rgb(raster.WORK["F"])}
    assert raster.png(picture).startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.real
def test_the_real_tensorboard_lists_and_opens_what_we_write(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tb"
    done = board.python("-m", "bubblescope", "analyze", folder, "--tensorboard", out)
    assert done.returncode == 0, done.stderr
    with board.running(out) as tensorboard:
        assert tensorboard.runs() == ["bubblescope"]
        workers = tensorboard.profiler("workers", run="bubblescope", view="Overview")
        assert sorted(workers) == [f"rank{rank}" for rank in range(4)]
        overview = tensorboard.profiler("overview", run="bubblescope", worker="rank3", span="1", view="Overview")
        assert overview["gpu_metrics"], "the profiler sees kernels"
        tags = tensorboard.get("/data/plugin/scalars/tags")["bubblescope"]
        assert {"step/idle_fraction", "causes/stage_imbalance_seconds", "gpu/3_idle_fraction"} <= set(tags)
        points = tensorboard.get("/data/plugin/scalars/scalars", run="bubblescope", tag="step/idle_fraction")
        assert [p[1] for p in points] == [3, 4]
        assert [p[2] for p in points] == pytest.approx([0.41, 0.41], abs=0.01)
        assert "timeline" in tensorboard.get("/data/plugin/images/tags")["bubblescope"]
        assert "summary" in tensorboard.get("/data/plugin/text/tags")["bubblescope"]


def test_the_options_write_their_folders(folder: Path, tmp_path: Path, bubblescope: Runner) -> None:
    done = bubblescope("analyze", str(folder), "--parquet", "q", "--perfetto", "p.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "q" / "gpus.parquet").exists()
    assert (tmp_path / "p.json").exists()


# --- all of them ---------------------------------------------------------------------------------------------

EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}
EVERY = (
    "--out", "o", "--markdown", "o/m.md", "--csv", "o/csv", "--parquet", "o/q", "--perfetto", "o/p.json",
)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_with_the_time_given_the_same_input_gives_the_same_bytes(
    folder: Path, tmp_path: Path, bubblescope: Runner
) -> None:
    made = []
    for _ in range(2):
        done = bubblescope("analyze", str(folder), *EVERY, env=EPOCH)
        assert done.returncode == 0, done.stderr
        made.append(contents(tmp_path / "o"))
        time.sleep(1.0 - time.time() % 1.0)  # into another second of the clock
    assert len(made[0]) > 20
    assert made[0] == made[1]
    assert json.loads(made[0]["report.json"])["created"] == "2023-11-14T22:13:20Z"


@pytest.mark.real
def test_with_the_time_given_tensorboard_s_files_are_the_same_too(folder: Path, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        done = board.python("-m", "bubblescope", "analyze", folder, "--tensorboard", tmp_path / name, env=EPOCH)
        assert done.returncode == 0, done.stderr
        made.append(contents(tmp_path / name))
    assert made[0] == made[1]


@pytest.mark.parametrize("value", ["", "now", "1.5", "-1", "+7", "9" * 30, "1e9"])
def test_a_time_that_is_none_is_wrong_usage_before_anything_is_read(value: str, bubblescope: Runner) -> None:
    done = bubblescope("analyze", "nowhere", env={"SOURCE_DATE_EPOCH": value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: SOURCE_DATE_EPOCH is '{value}'")
    assert "\nhint: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "option", "extra"),
    [
        (["--parquet", "folder"], "--parquet", "parquet"),
        (["--tensorboard", "folder"], "--tensorboard", "tensorboard"),
        (["--engine", "dask", "--scheduler", "tcp://127.0.0.1:1"], "--engine dask", "dask"),
    ],
)
def test_a_package_that_is_missing_is_wrong_usage_before_anything_is_read(
    arguments: list[str], option: str, extra: str
) -> None:
    code = (
        "import importlib.util, sys; from bubblescope.cli import main; known = importlib.util.find_spec\n"
        "MISSING = ('pyarrow', 'tensorboard', 'distributed')\n"
        "importlib.util.find_spec = lambda name, *more: None if name in MISSING else known(name)\n"
        f"sys.exit(main.run(['analyze', 'nowhere', *{arguments!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {option} needs ")
    assert done.stderr.endswith(f"hint: pip install 'bubblescope[{extra}]'\n")
