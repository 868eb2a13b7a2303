"""The metrics: names and labels that dashboards rely on, what they add up to, and the text file."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bubblescope import analyze, load
from bubblescope.errors import UsageError
from bubblescope.live import exporter
from bubblescope.live.watcher import Snapshot, Watcher, WatchOptions
from tests.live import jobs
from tests.live.jobs import Recorded

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]

LABELS = {
    "bubblescope_build_info": {"version", "python"},
    "bubblescope_run_info": {"path", "schedule", "stages", "microbatches", "data_parallel", "framework"},
    "bubblescope_bubble_ratio": set(),
    "bubblescope_idle_ratio": set(),
    "bubblescope_lost_gpus": set(),
    "bubblescope_idle_seconds_total": {"rank", "stage", "cause"},
    "bubblescope_busy_seconds_total": {"rank", "stage"},
    "bubblescope_window_seconds_total": {"rank", "stage"},
    "bubblescope_cause_seconds": {"rank", "stage", "cause"},
    "bubblescope_rank_busy_seconds": {"rank", "stage"},
    "bubblescope_step_duration_seconds_bucket": {"le"},
    "bubblescope_step_duration_seconds_sum": set(),
    "bubblescope_step_duration_seconds_count": set(),
    "bubblescope_steps_total": set(),
    "bubblescope_wasted_gpu_hours_total": set(),
    "bubblescope_price_per_gpu_hour": {"currency"},
    "bubblescope_rank_info": {"rank", "stage", "host", "gpu"},
    "bubblescope_rank_silent": {"rank", "stage"},
    "bubblescope_rank_heard_timestamp_seconds": {"rank", "stage"},
    "bubblescope_rank_last_step": {"rank", "stage"},
    "bubblescope_ranks": {"state"},
    "bubblescope_attribution_trusted": set(),
    "bubblescope_watch_errors_total": set(),
    "bubblescope_watch_behind_bytes": set(),
    "bubblescope_watch_pass_seconds": set(),
}


@pytest.fixture(scope="module")
def job() -> Recorded:
    return jobs.steady()


def _watched(folder: Path) -> Watcher:
    made = Watcher(folder, WatchOptions(price_per_gpu_hour=2.5))
    while made.refresh():
        pass
    return made


def _samples(snapshot: Snapshot, **labels: str) -> Samples:
    text = exporter.render(exporter.registry(lambda: snapshot, labels), "")[0].decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_names_and_labels_are_these(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(6))
    found = _samples(_watched(tmp_path).snapshot)
    assert {name: {key for row in rows for key, _ in row} for name, rows in found.items()} == LABELS


def test_the_labels_that_a_user_cannot_take_are_those_that_metrics_have() -> None:
    assert set().union(*LABELS.values()) == exporter.OWN_LABELS


def test_the_reference_names_the_labels_of_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    told = {name.strip("| `"): set(labels.split(", ")) - {"–"} for name, _, labels, *_ in rows}
    histogram = "bubblescope_step_duration_seconds"
    assert told.pop(histogram) == LABELS[f"{histogram}_bucket"]
    assert told == {name: labels for name, labels in LABELS.items() if not name.startswith(histogram)}


def test_causes_of_a_rank_sum_to_its_idle_time_and_with_busy_to_its_window(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(12))
    job.end(tmp_path)
    found = _samples(_watched(tmp_path).snapshot)
    for gpu in analyze(load(tmp_path)).data["gpus"]:
        mine = (("rank", str(gpu["rank"])), ("stage", str(gpu["stage"])))
        idle = sum(v for row, v in found["bubblescope_idle_seconds_total"].items() if set(mine) <= set(row))
        assert idle == pytest.approx(gpu["idle"] * gpu["steps"], abs=1e-6)
        window = found["bubblescope_window_seconds_total"][mine]
        assert idle + found["bubblescope_busy_seconds_total"][mine] == pytest.approx(window, abs=1e-9)
    ratio = sum(found["bubblescope_idle_seconds_total"].values()) / sum(
        found["bubblescope_window_seconds_total"].values()
    )
    assert ratio == pytest.approx(analyze(load(tmp_path)).data["bubble"]["gpu_idle_fraction"], abs=1e-9)


def test_the_histogram_counts_every_step_once_and_is_cumulated(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(12))
    job.end(tmp_path)
    found = _samples(_watched(tmp_path).snapshot)
    rows = sorted(
        (float(dict(row)["le"]), count) for row, count in found["bubblescope_step_duration_seconds_bucket"].items()
    )
    counts = [count for _, count in rows]
    assert counts == sorted(counts) and counts[-1] == 11
    assert found["bubblescope_step_duration_seconds_count"][()] == found["bubblescope_steps_total"][()] == 11
    mean = found["bubblescope_step_duration_seconds_sum"][()] / 11
    assert mean == pytest.approx(analyze(load(tmp_path)).data["steps"]["seconds_median"], rel=0.02)


def test_what_is_not_known_is_absent_not_zero(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(6), [0, 1])
    made = Watcher(tmp_path, WatchOptions(patience_s=0.0))
    while made.refresh():
        pass
    found = _samples(made.snapshot)
    assert "bubblescope_bubble_ratio" not in found
    assert found["bubblescope_idle_ratio"][()] > 0
    assert "bubblescope_price_per_gpu_hour" not in found
    assert found["bubblescope_ranks"][(("state", "not seen"),)] == 2
    assert not any(dict(row)["cause"] == "warmup" for row in found["bubblescope_cause_seconds"])


def test_before_the_first_step_there_are_metrics_about_the_watcher_only(tmp_path: Path) -> None:
    found = _samples(_watched(tmp_path).snapshot)
    assert found["bubblescope_steps_total"][()] == 0
    assert "bubblescope_idle_seconds_total" not in found


def test_labels_of_the_user_are_on_every_sample(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(6))
    found = _samples(_watched(tmp_path).snapshot, run="large")
    assert all(("run", "large") in row for rows in found.values() for row in rows)


def test_series_do_not_grow_with_steps_or_restarts(tmp_path: Path, job: Recorded) -> None:
    made = Watcher(tmp_path, WatchOptions(steps=3))
    sizes = []
    for step in range(12):
        job.write(tmp_path, [step])
        while made.refresh():
            pass
        sizes.append(sum(len(rows) for rows in _samples(made.snapshot).values()))
    again = jobs.steady(job="job-2", clock=[0, 2_000_000_000_000])
    again.write(tmp_path, range(4), suffix=".2")
    while made.refresh():
        pass
    assert sizes[4] == sizes[-1] == sum(len(rows) for rows in _samples(made.snapshot).values())


def test_gpu_ranks_carry_their_index_so_that_dcgm_can_be_joined(tmp_path: Path) -> None:
    jobs.steady(device="cuda").write(tmp_path, range(4))
    found = _samples(_watched(tmp_path).snapshot)
    rows = [dict(row) for row in found["bubblescope_rank_info"]]
    assert {(row["rank"], row["stage"], row["host"], row["gpu"]) for row in rows} == {
        (str(i), str(i), "node-a", str(i)) for i in range(4)
    }


def test_the_text_file_is_replaced_whole(tmp_path: Path, job: Recorded) -> None:
    folder, target = tmp_path / "run", tmp_path / "out" / "bubblescope.prom"
    target.parent.mkdir()
    job.write(folder, range(6))
    snapshot = _watched(folder).snapshot
    metrics = exporter.registry(lambda: snapshot)
    exporter.write_textfile(metrics, target)
    before = target.stat().st_ino
    exporter.write_textfile(metrics, target)
    assert target.stat().st_ino != before
    assert [path.name for path in target.parent.iterdir()] == ["bubblescope.prom"]
    assert target.read_text().endswith("\n")
    assert target.stat().st_mode & 0o044, "node_exporter runs as another user"


def test_a_text_file_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        exporter.write_textfile(exporter.registry(Snapshot), tmp_path / "missing" / "x.prom")


def test_openmetrics_is_spoken_to_who_asks_for_it(tmp_path: Path, job: Recorded) -> None:
    job.write(tmp_path, range(6))
    snapshot = _watched(tmp_path).snapshot
    metrics = exporter.registry(lambda: snapshot)
    body, content_type = exporter.render(metrics, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
