"""What views write is exact, repeatable, and harmless whatever the names in a trace are."""

from __future__ import annotations

import copy
import csv
import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from bubblescope.errors import UsageError
from bubblescope.report.build import build
from bubblescope.views import console, html, markdown, notebook, perfetto
from bubblescope.views import csv as csv_view
from bubblescope.views import format as fmt
from bubblescope.views import json as json_view
from bubblescope.views.figures.causes import stairs
from bubblescope.views.html import parts, tables
from bubblescope.views.summary import first_screen, headline, lost_hours, reasons, top_actions
from bubblescope.views.words import CAUSES, NEGATIVE, RATIOS
from tests.support import cases, fake_report, synthetic
from tests.support.fake_report import FakeReport, Job

NOW = datetime(2026, 2, 1, 9, 30, tzinfo=UTC)


@pytest.fixture(scope="module")
def report() -> FakeReport:
    return fake_report.build()


@pytest.fixture(scope="module")
def hostile() -> FakeReport:
    return fake_report.hostile()


def _terminal(report: Any, width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    console.print_summary(report, Console(file=out, width=width, **options), "out/report.html")
    return out.getvalue()


def test_the_support_report_keeps_the_sums_that_views_rely_on(report: FakeReport) -> None:
    gaps = report.gaps
    length = gaps["end_s"] - gaps["start_s"]
    assert np.allclose(gaps[[c.name for c in CAUSES]].sum(axis=1), length, atol=1e-12)
    assert np.allclose(gaps[list(fake_report.RUNGS)].sum(axis=1), length, atol=1e-12)


def test_the_sentence_names_loss_cost_and_both_large_reasons(report: FakeReport) -> None:
    sentence = first_screen(report).sentence
    assert sentence.startswith("41.4 % of 4 GPUs' time is lost to pipeline bubbles: 449 GPU-hours, USD 1,121 over")
    assert "1F1B with 4 stages and 8 micro-batches" in sentence
    assert "stage 3 is 1.6× slower than the others" in sentence


def test_hours_and_money_leave_out_what_the_fraction_leaves_out(report: FakeReport) -> None:
    outside = fake_report.OUTSIDE_PIPELINE
    hours = sum(v["gpu_hours"] for c, v in report.data["cost"]["per_cause"].items() if c not in outside)
    assert lost_hours(report.data) == pytest.approx(hours)
    assert sum(share for _, share in reasons(report.data)) == pytest.approx(1.0)


def test_idle_time_that_is_no_bubble_is_told_beside_them_with_its_money_and_largest_cause() -> None:
    report = fake_report.build(Job(data=0.025, spikes={}, stage_factor={}))
    cost, ratios = report.data["cost"], report.data["bubble"]
    hours, money = cost["idle_gpu_hours"], cost["idle_money"]
    assert report.data["causes"]["data_loading"]["share_of_idle"] > 0.5 > ratios["fraction"]
    wanted = (
        f"Idle for any reason: {100 * ratios['gpu_idle_fraction']:.1f} % ({hours:,.0f} GPU-hours, USD {money:,.0f}), "
        f"{100 * report.data['causes']['data_loading']['share_of_idle']:.0f} % of it because the first stage waits for "
        "its input."
    )
    assert first_screen(report).sentence.endswith(wanted)
    assert wanted in " ".join(_terminal(report).split())
    assert wanted in markdown.render(report).splitlines()[2].replace("\\", "")
    assert wanted in notebook.render(report)


def test_idle_time_that_is_nearly_all_bubbles_is_told_once() -> None:
    report = fake_report.build(Job(data=0.0, collective=0.0))
    assert 0 < report.data["bubble"]["gpu_idle_fraction"] - report.data["bubble"]["fraction"] < 0.01
    assert first_screen(report).idle == ""


def test_two_causes_of_more_than_the_whole_loss_name_what_others_take_off(report: FakeReport) -> None:
    data = copy.deepcopy(report.data)
    causes = data["causes"]
    idle = data["bubble"]["gpu_idle_fraction"] / data["bubble"]["fraction"]
    for cause in causes.values():
        cause["share_of_idle"] = 0.0
    for name, share in (("warmup", 0.5), ("p2p_transfer", 0.6), ("transient", -0.1)):
        causes[name]["share_of_idle"] = share / idle
    sentence = first_screen(replace(report, data=data)).sentence
    assert "60 % of that because stages wait" in sentence
    assert ", 50 % because 1F1B" in sentence
    assert sentence.endswith(", less 10 % by which others shorten the waiting.")


def test_a_page_makes_its_folder_and_one_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    made = build(synthetic.make_run(synthetic.Job(), synthetic.constant(1000, 2000)))
    assert made.to_html(tmp_path / "a" / "b.html").stat().st_size > 100_000
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write: .*file"):
        made.to_html(tmp_path / "file" / "b.html")


def test_every_letter_of_the_bars_is_explained() -> None:
    """Also of causes that are little of all idle time: in a bar of their stage they may have a letter."""
    for job in (Job(), Job(data=0.01, collective=0.02), Job(worker_factor={(0, 1): 1.2}, stages=8)):
        lines = _terminal(fake_report.build(job), width=200).splitlines()
        bars = [line.split()[2] for line in lines if line.startswith("  stage ")]
        legend = next(line for line in lines if line.startswith("  w warmup"))
        explained = {part.split(" ", 1)[0] for part in legend.strip().split("  ")}
        assert explained == set("".join(bars))


def test_a_third_cause_of_a_fifth_of_the_loss_is_named_too(report: FakeReport) -> None:
    """As of the demo on a busy machine, where transfers take long: the slow stage is still named."""
    data = copy.deepcopy(report.data)
    idle = data["bubble"]["gpu_idle_fraction"] / data["bubble"]["fraction"]
    for name, cause in data["causes"].items():
        shares = {"p2p_transfer": 0.4, "warmup": 0.14, "cooldown": 0.13, "stage_imbalance": 0.24, "transient": 0.09}
        cause["share_of_idle"] = shares.get(name, 0.0) / idle
    sentence = first_screen(replace(report, data=data)).sentence
    for words in ("40 % of that because stages wait", ", 27 % because 1F1B", ", 24 % because stage 3 is 1.6× slower"):
        assert words in sentence


def test_no_cause_is_named_where_the_attribution_is_not_to_be_trusted(report: FakeReport) -> None:
    data = copy.deepcopy(report.data)
    data["replay"]["trusted"] = False
    data["source"]["warnings"].append({"code": "attribution-not-trusted", "message": "the replay differs by 32.6%"})
    sentence = first_screen(replace(report, data=data)).sentence
    assert sentence.endswith("what causes it is unavailable, because the replay differs by 32.6%.")


def test_where_bubbles_are_unknown_the_sentence_speaks_of_idle_time_and_says_why() -> None:
    report = fake_report.one_rank_missing()
    sentence = first_screen(report).sentence
    loss = headline(report.data)
    assert loss is not None and loss.what == "idle"
    assert "is idle" in sentence and "unavailable, because bubble fraction" in sentence
    assert "lost to pipeline bubbles:" not in sentence


def test_a_healthy_run_is_not_blamed_on_a_stage() -> None:
    screen = first_screen(fake_report.build(Job(stage_factor={}, spikes={})))
    assert "slower" not in screen.sentence
    assert "most of it because 1F1B" in screen.sentence


def test_a_slow_replica_is_named_by_its_rank() -> None:
    job = Job(stages=2, replicas=3, microbatches=32, stage_factor={}, spikes={}, worker_factor={(1, 1): 3.0})
    assert "GPU 3 is 3× slower" in first_screen(fake_report.build(job)).sentence


def test_the_first_screen_shows_one_action_of_a_kind(report: FakeReport) -> None:
    rows = [{"kind": "schedule", "saved_seconds": s} for s in (3.0, 2.5)] + [{"kind": "node", "saved_seconds": 1.0}]
    assert [r["saved_seconds"] for r in top_actions({"advice": rows})] == [3.0, 1.0]


def test_without_a_price_there_is_no_money() -> None:
    screen = first_screen(fake_report.build(Job(price=None)))
    assert "USD" not in screen.sentence
    assert screen.figures[2].label == "Lost every day"
    assert "--price-per-gpu-hour" in screen.figures[2].note


@pytest.mark.parametrize(
    "damage", ["bubble", "cost", "replay", "clock", "steps", "pipeline", "source", "causes", "gpus"]
)
def test_a_missing_part_is_called_unavailable_and_never_breaks_a_view(damage: str) -> None:
    report = fake_report.build(Job(steps=2))
    report.data[damage] = [] if damage == "gpus" else {}
    text = _terminal(report) + markdown.render(report) + html.render(report)[:60_000]
    assert "None" not in _terminal(report)
    assert "nan" not in text.lower().split()


def test_waterfall_starts_at_work_and_ends_at_the_measured_step(report: FakeReport) -> None:
    bars = stairs(report)
    window = np.mean([g["window"] for g in report.data["gpus"]])
    assert bars[0].label == "work"
    assert bars[-1].length == pytest.approx(window)
    steps = [b.length for b in bars if b.cause]
    assert bars[0].length + sum(steps) == pytest.approx(window)


def test_work_and_schedule_alone_are_told_from_the_ideal_schedule() -> None:
    """33 ms of schedule and 0.7 ms of optimizer; the replay without an optimizer takes 33 ms."""
    ms = 1_000_000
    run = synthetic.make_run(synthetic.Job(optimizer=7 * ms // 10), synthetic.constant(ms, 2 * ms))
    made = build(run)
    assert {b.label: round(b.length, 9) for b in stairs(made) if not b.cause} == {
        "work": 0.0247,
        "work and schedule alone": 0.0337,
        "measured step": 0.0337,
    }
    assert "Unlike work and schedule alone, the ideal schedule in the timeline (33.0 ms)" in html.render(made)


def test_the_page_is_the_same_bytes_for_the_same_report_and_clock(report: FakeReport) -> None:
    assert html.render(report, NOW) == html.render(fake_report.build(), NOW)
    assert "written 2026-02-01 09:30 UTC" in html.render(report, NOW)


def test_the_page_is_small_enough_and_names_no_other_place(report: FakeReport) -> None:
    page = html.render(report)
    assert len(page.encode()) < 7_000_000
    ours = page.replace(parts.plotly(), "")
    assert "http:" not in ours.replace("http://www.w3.org/2000/svg", "") and "https:" not in ours
    policy = page.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src &#39;none&#39;" in policy and "unsafe" not in policy


def test_a_thousand_ranks_stay_below_seven_megabytes() -> None:
    assert len(html.render(fake_report.large(replicas=64, stages=16)).encode()) < 7_000_000


def test_the_page_walks_no_table_of_events_row_by_row(monkeypatch: pytest.MonkeyPatch, report: FakeReport) -> None:
    walk = pd.Series.__iter__

    def counted(series: pd.Series[Any]) -> Any:
        assert len(series) < len(report.gaps), f"{series.name}: {len(series)} rows one by one"
        return walk(series)

    monkeypatch.setattr(pd.Series, "__iter__", counted)
    html.render(report)


def test_what_the_timeline_leaves_out_is_counted(monkeypatch: pytest.MonkeyPatch, report: FakeReport) -> None:
    from bubblescope.views.html import payload

    monkeypatch.setattr(payload, "BUDGET", 7_000)
    made = payload.timeline(report)
    assert [b["step"] for b in made.content["steps"]] == [2, 7]
    assert made.notices == [
        "The timeline shows 2 of 12 steps, to keep this file small: the typical step, then outliers. All figures "
        "and tables use every step."
    ]
    monkeypatch.setattr(payload, "BUDGET", 1_000)
    none = payload.timeline(report)
    assert none.content["steps"] == [] and "no timeline" in none.notices[0]


def test_of_too_many_gpus_the_timeline_keeps_the_busiest_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from bubblescope.views.html import payload

    many = fake_report.build(Job(stages=2, replicas=12, steps=1, worker_factor={(7, 1): 1.5}, spikes={}))
    monkeypatch.setattr(payload, "BUDGET", 4_000)
    made = payload.timeline(many)
    assert [15, 1] in made.content["rows"]
    assert {stage for _, stage in made.content["rows"]} == {0, 1}
    assert f"shows {len(made.content['rows'])} of 24 GPUs" in made.notices[0]


def test_the_best_cut_of_whole_layers_stands_beside_the_times_of_today() -> None:
    run = cases.report().run
    timed = replace(run, source=replace(run.source, details={"layer_times": cases.layers(4, 4, 4, 8)}))
    report = build(timed)
    table = tables.partition(report)
    assert [row[1] for row in table.rows] == ["5", "5", "5", "5"]
    assert [row[2:] for row in table.rows] == [("30.00", "37.50")] * 3 + [("60.00", "37.50")]
    assert "slowest stage takes 37.50 ms" in table.caption
    assert 'id="table-partition"' in html.render(report)
    assert tables.partition(cases.report()).rows == ()


def test_hostile_names_are_inert_in_the_page(hostile: FakeReport) -> None:
    page = html.render(hostile)
    ours = page.replace(parts.plotly(), "")
    assert "<script>alert(1)" not in ours
    assert "<img src=x" not in ours
    assert "\x1b" not in page and "\u202e" not in page
    assert "{{7*7}}" in page and "49</li>" not in page


def test_hostile_names_are_inert_in_a_terminal(hostile: FakeReport) -> None:
    text = _terminal(hostile)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text


def test_the_terminal_summary_fits_twenty_lines_of_eighty(report: FakeReport) -> None:
    for made in (report, fake_report.one_rank_missing(), fake_report.build(Job(stages=16, microbatches=16, steps=2))):
        lines = _terminal(made).rstrip("\n").split("\n")
        assert len(lines) <= 20
        assert max(len(line) for line in lines) <= 80
        assert lines[-1] == "report: out/report.html"


def test_no_color_is_obeyed(report: FakeReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = _terminal(report, force_terminal=True)
    assert "\x1b[3" not in text and "\x1b[4" not in text and "48;2" not in text
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[" in _terminal(report, force_terminal=True, color_system="truecolor")


def test_csv_cells_cannot_be_formulas_and_numbers_stay_numbers(hostile: FakeReport, tmp_path: Path) -> None:
    paths = csv_view.write(hostile, tmp_path / "tables")
    assert {p.stem for p in paths} == set(csv_view.TABLES)
    rows = list(csv.DictReader((tmp_path / "tables" / "gaps.csv").open(newline="", encoding="utf-8")))
    assert rows[0]["before"] == "'" + fake_report.FORMULA
    assert len(rows) == len(hostile.gaps)
    imbalance = [float(r["stage_imbalance"]) for r in rows]
    assert np.allclose(imbalance, hostile.gaps["stage_imbalance"], rtol=1e-11, atol=1e-15)
    for path in paths:
        for row in csv.reader(path.open(newline="", encoding="utf-8")):
            assert not any(cell.startswith(("=", "@", "+")) for cell in row)


def test_csv_leaves_unavailable_values_empty() -> None:
    table = pd.DataFrame({"a": [1.5, float("nan")], "b": ["x", None]})
    assert csv_view.table_text(table) == "a,b\r\n1.5,x\r\n,\r\n"


def test_json_is_strict_keeps_the_contract_order_and_the_values(report: FakeReport) -> None:
    text = json_view.render(report)
    read = json.loads(text, parse_constant=pytest.fail)
    assert list(read) == list(report.data)
    assert read["gpus"] == report.data["gpus"]
    report_with_nan = FakeReport(**{**report.__dict__, "data": {"x": float("nan"), "y": np.float64(2), "z": [np.inf]}})
    assert json.loads(json_view.render(report_with_nan)) == {"x": None, "y": 2.0, "z": [None]}


def test_markdown_cannot_become_markup(hostile: FakeReport) -> None:
    text = markdown.render(hostile)
    assert "<" not in text
    assert all(line.count("|") - line.count("\\|") in (0, 4, 5) for line in text.splitlines())


def test_markdown_names_every_ratio(report: FakeReport) -> None:
    text = markdown.render(report)
    assert all(name in text for name, _, _ in RATIOS)


def test_the_page_says_beside_its_causes_and_in_the_glossary_what_a_negative_one_is(report: FakeReport) -> None:
    page = html.render(report)
    causes = page[page.index('id="causes-title"') : page.index('id="steps-title"')]
    assert NEGATIVE in causes
    assert NEGATIVE in page[page.index('id="glossary-title"') :]


def test_markdown_explains_a_negative_cause_where_there_is_one(report: FakeReport) -> None:
    assert NEGATIVE not in markdown.render(replace(report, data=_with_cause(report, 0.001)))
    assert NEGATIVE in markdown.render(replace(report, data=_with_cause(report, -0.001)))


def _with_cause(report: FakeReport, seconds: float) -> dict[str, Any]:
    """The report's data where every cause of every GPU is 0, but one."""
    one = {c.name: 0.0 for c in CAUSES} | {"optimizer": seconds}
    return {**report.data, "gpus": [{**g, "causes": one} for g in report.data["gpus"]]}


def test_the_page_goes_by_the_pipeline_that_was_seen_and_names_that_of_the_closed_form(report: FakeReport) -> None:
    seen = report.data["pipeline"]
    overruled = {name: seen[name] for name in ("schedule", "stages")}
    given = {**seen, "schedule": "GPipe", "stages": 5, "passes_per_step": 2, "overruled": overruled}
    bubble = report.data["bubble"]
    theory = {**dict.fromkeys([name for name, _, _ in RATIOS], 0.5), "source": "GPipe, NeurIPS'19"}
    changed = {**report.data, "pipeline": given, "bubble": {**bubble, "theory": theory}}
    page = html.render(replace(report, data=changed))
    assert f"{seen['schedule']} · {seen['stages']} stages" in page
    assert f"Closed form: GPipe with 5 equal stages and {seen['microbatches'] // 2} micro-batches" in page


def test_perfetto_bubbles_last_as_long_as_the_gaps_and_arrows_come_in_pairs(report: FakeReport) -> None:
    events = json.loads(perfetto.render(report))["traceEvents"]
    bubbles = [e for e in events if e.get("cat") == "bubble"]
    idle = float((report.gaps["end_s"] - report.gaps["start_s"]).sum())
    assert sum(e["dur"] for e in bubbles) == pytest.approx(idle * 1e6, rel=1e-6)
    for event in bubbles[:50]:
        assert sum(event["args"]["causes_us"].values()) == pytest.approx(event["dur"], abs=0.01)
    starts = {e["id"] for e in events if e["ph"] == "s"}
    assert starts == {e["id"] for e in events if e["ph"] == "f"} == set(range(len(report.messages)))


def test_numbers_are_written_one_way() -> None:
    assert fmt.number(-1234.5) == "−1,234" or fmt.number(-1234.5) == "−1,235"
    assert fmt.seconds(float("nan")) == fmt.MISSING
    assert fmt.milliseconds(0.0000123) == "0.012"
    assert fmt.plain("a\u2028b\x9b") == "a\\u2028b\\x9b"
    assert fmt.moment("yesterday\x1b") == "yesterday\\x1b"


def test_a_gap_whose_other_end_is_unknown_keeps_its_length_and_no_invented_parts(report: FakeReport) -> None:
    import base64
    import zlib

    from bubblescope.views.html import payload

    gaps = report.gaps.assign(**dict.fromkeys(fake_report.RUNGS, float("nan")))
    made = payload.timeline(FakeReport(**{**report.__dict__, "gaps": gaps}))
    block = made.content["steps"][0]
    raw = zlib.decompress(base64.b64decode(block["data"]))

    def column(name: str, dtype: str) -> Any:
        _, at, count = block["columns"][name]
        return np.frombuffer(raw, dtype, count, at)

    assert not column("gap_known", "u1").any()
    length = column("gap_end", "<i4") - column("gap_start", "<i4")
    first = report.gaps[report.gaps["step"] == block["step"]]
    assert length.sum() * made.content["unit"] == pytest.approx(
        float((first["end_s"] - first["start_s"]).sum()), rel=1e-6
    )
