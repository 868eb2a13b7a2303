"""Every expression of every dashboard and rule, asked of a real Prometheus that scraped a real training run."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bubblescope.views.words import CAUSES
from tests.live import jobs
from tests.live.processes import ROOT, Prometheus, prometheus, training, wait_for, watching
from tests.live.test_exporter import LABELS
from tests.support.programs import program

pytestmark = pytest.mark.real

BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "dashboards/grafana").glob("*.json"))}
RULES = ROOT / "dashboards/prometheus/rules.yml"
ALERTS = ROOT / "dashboards/prometheus/alerts.yml"
TARGETS = [
    (board, panel["title"], target["expr"])
    for board, content in BOARDS.items()
    for panel in content["panels"]
    for target in panel["targets"]
]
NEEDS_GPUS_OR_REPLICAS = ("DCGM_", "straggler")
"""Asked of a recorded job with two replicas on (generated) GPUs: the machine of the tests has none."""


@dataclass(frozen=True)
class Asked:
    """A Prometheus that has scraped for a while: `train` is a real run, `gpus` a generated one with two replicas."""

    prometheus: Prometheus
    train: str
    gpus: str

    def result(self, expression: str) -> list[dict[str, Any]]:
        """The answer for the run that can have one, with Grafana's variables filled in."""
        job = "gpus" if any(word in expression for word in NEEDS_GPUS_OR_REPLICAS) else "train"
        names = {"$job": job, "$instance": getattr(self, job), "$__rate_interval": "10s", "$__range": "30s"}
        for name, value in names.items():
            expression = expression.replace(name, value)
        assert "$" not in re.sub(r'"\$\d"', "", expression), "a variable that nobody fills in"
        return self.prometheus.query(expression)


class _Dcgm(http.server.BaseHTTPRequestHandler):
    """What NVIDIA's exporter says of two GPUs of node-a."""

    def do_GET(self) -> None:
        rows = [f'DCGM_FI_DEV_GPU_UTIL{{gpu="{i}",UUID="GPU-{i}",Hostname="node-a"}} {90 + i}' for i in range(2)]
        body = ("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n" + "\n".join(rows) + "\n").encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _dcgm() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Dcgm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@contextlib.contextmanager
def _growing(folder: Path) -> Iterator[None]:
    """A generated job with two replicas on eight GPUs, one of them slow, that gains a step every 0.4 seconds."""
    from tests.support import synthetic

    def length(step: int, replica: int, rank: int, action: Any) -> int:
        slow = 1.5 if (replica, action.stage) == (1, 2) else 1.0
        return round(slow * (5 if action.kind.name == "FORWARD" else 10) * jobs.MS)

    plan = synthetic.Job(steps=120, replicas=2, microbatches=4, comm=jobs.MS, origin=jobs.MS)
    job, stop = jobs.record(plan, length, device="cuda"), threading.Event()

    def grow() -> None:
        for step in range(plan.steps):
            job.write(folder, [step])
            if stop.wait(0.4):
                return

    writer = threading.Thread(target=grow, daemon=True)
    writer.start()
    yield
    stop.set()
    writer.join()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    program("prometheus"), program("promtool")
    folder = tmp_path_factory.mktemp("monitored")
    shape = ("--stages", "2", "--microbatches", "4", "--steps", "1000")
    with contextlib.ExitStack() as stack:
        (folder / "train").mkdir()
        (folder / "gpus").mkdir()
        stack.enter_context(training(folder / "train", *shape))
        stack.enter_context(_growing(folder / "gpus"))
        price = ("--price-per-gpu-hour", "2.5")
        train = stack.enter_context(watching(folder / "train", folder / "train.log", *price))
        gpus = stack.enter_context(watching(folder / "gpus", folder / "gpus.log", *price))
        dcgm = stack.enter_context(_dcgm())
        targets = {
            "train": train.metrics.split("/")[2], "gpus": gpus.metrics.split("/")[2], "dcgm": dcgm,
        }  # fmt: skip
        made = stack.enter_context(prometheus(folder, targets, [RULES, ALERTS]))
        wait_for("ten counted steps of the real run", lambda: _steps(made, "train") >= 10, 120)
        wait_for("ten counted steps of the generated run", lambda: _steps(made, "gpus") >= 10, 60)
        rule = "run:bubblescope_step_duration_seconds:p50_rate5m"
        wait_for("the rules", lambda: len(made.query(f"{rule} > 0")) == 2, 30)
        yield Asked(made, targets["train"], targets["gpus"])


def _steps(made: Prometheus, job: str) -> float:
    return max((float(row["value"][1]) for row in made.query(f'bubblescope_steps_total{{job="{job}"}}')), default=0.0)


@pytest.mark.parametrize(("board", "title", "expression"), TARGETS)
def test_every_panel_has_an_answer(asked: Asked, board: str, title: str, expression: str) -> None:
    found = asked.result(expression)
    assert found, f"{board}, {title}: no data for {expression}"
    values = [float(row["value"][1]) for row in found]
    assert any(math.isfinite(value) for value in values), f"{board}, {title}: {values}"


def test_variables_of_the_dashboards_find_the_watchers(asked: Asked) -> None:
    for content in BOARDS.values():
        for variable in content["templating"]["list"]:
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            selector = selector.replace("$job", "train")
            found = asked.prometheus.get(f"label/{label}/values", **{"match[]": selector})
            assert asked.train in found or {"train", "gpus"} <= set(found)


def test_every_rule_is_evaluated_without_error(asked: Asked) -> None:
    rules = [rule for group in asked.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert len(rules) == 15


def test_every_recording_rule_has_an_answer(asked: Asked) -> None:
    rules = [rule for group in asked.prometheus.get("rules")["groups"] for rule in group["rules"]]
    recorded = [rule for rule in rules if rule["type"] == "recording"]
    empty = [rule["name"] for rule in recorded if not asked.prometheus.query(rule["name"])]
    assert empty == []


def test_alert_expressions_are_answered(asked: Asked) -> None:
    """That they fire when they must, and only then, is in alerts_test.yml: here they are read by a real server."""
    rules = [rule for group in asked.prometheus.get("rules")["groups"] for rule in group["rules"]]
    for rule in rules:
        if rule["type"] == "alerting":
            asked.prometheus.query(rule["query"])
    firing = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    assert firing["StageImbalance"] == "pending"  # one stage of each run is twice as slow; it fires after 15 minutes
    assert firing["Straggler"] == "pending"
    assert firing["RankSilent"] == firing["WatchFailing"] == "inactive"


def test_what_prometheus_computes_is_what_the_run_is(asked: Asked) -> None:
    """The demo's first of two stages is twice as slow: 1.33 times the mean; the generated straggler is 1.2 times its
    stage's median of two."""
    [row] = asked.prometheus.query('run:bubblescope_stage_imbalance:ratio{job="train"}')
    assert float(row["value"][1]) == pytest.approx(4 / 3, rel=0.1)
    worst = asked.prometheus.query('topk(1, rank:bubblescope_straggler:ratio{job="gpus"})')[0]
    assert (worst["metric"]["rank"], worst["metric"]["stage"]) == ("6", "2")
    assert float(worst["value"][1]) == pytest.approx(1.2, rel=0.05)
    parts = asked.prometheus.query('sum(run_cause:bubblescope_idle:ratio_rate5m{job="train"})')
    [whole] = asked.prometheus.query('run:bubblescope_idle:ratio_rate5m{job="train"}')
    assert float(parts[0]["value"][1]) == pytest.approx(float(whole["value"][1]), rel=1e-6)


def test_gpus_join_with_the_metrics_of_their_own_exporter(asked: Asked) -> None:
    expression = next(e for _, _, e in TARGETS if "DCGM_" in e)
    rows = {row["metric"]["rank"]: float(row["value"][1]) for row in asked.result(expression)}
    assert rows == {"0": 90.0, "1": 91.0}


def test_no_counter_ever_went_backwards(asked: Asked) -> None:
    for name in LABELS:
        if name.endswith("_total"):
            resets = asked.prometheus.query(f"max(resets({name}[5m]))")
            assert [float(row["value"][1]) for row in resets] == [0.0], name


def test_metrics_are_as_promtool_wants_them(asked: Asked) -> None:
    import urllib.request

    with urllib.request.urlopen(f"http://{asked.train}/metrics", timeout=10) as answer:
        text = answer.read()
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=30)
    complaints = [line for line in (done.stdout + done.stderr).decode().splitlines() if "hour" not in line]
    assert complaints == []  # GPU-hours are what people buy: the unit is on purpose


def test_rules_and_alerts_pass_promtool() -> None:
    files = [str(RULES), str(ALERTS)]
    done = subprocess.run([program("promtool"), "check", "rules", *files], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_must_and_only_then() -> None:
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(Path(__file__).with_name("alerts_test.yml"))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_asked_for_that_is_not_exported() -> None:
    recorded = set(re.findall(r"record: (\S+)", RULES.read_text()))
    texts = [expression for _, _, expression in TARGETS] + [RULES.read_text(), ALERTS.read_text()]
    asked_for = {name for text in texts for name in re.findall(r"(?<![\w:])bubblescope_\w+", text)}
    assert asked_for - set(LABELS) == set()
    used = {name for text in texts for name in re.findall(r"\b(?:run|rank|run_cause|run_stage):\w+:\w+", text)}
    assert used <= recorded


def test_dashboards_can_be_imported_by_anyone() -> None:
    """A datasource input instead of somebody's own uid, distinct uids, and causes in the colours of the report."""
    assert len({content["uid"] for content in BOARDS.values()}) == 3
    for name, content in BOARDS.items():
        assert [i["pluginId"] for i in content["__inputs"]] == ["prometheus"]
        text = json.dumps(content)
        assert set(re.findall(r'"uid": "(\$[^"]*)"', text)) == {"${DS_PROMETHEUS}"}
        ids = [panel["id"] for panel in content["panels"]]
        assert len(ids) == len(set(ids))
        assert all(panel["targets"] and panel["title"] for panel in content["panels"]), name
        for panel in content["panels"]:
            if any(t["legendFormat"] == "{{cause}}" for t in panel["targets"]):
                colours = {
                    override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
                    for override in panel["fieldConfig"]["overrides"]
                }
                assert colours == {cause.name: cause.colour for cause in CAUSES}
