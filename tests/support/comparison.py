"""One generated job as bubblescope, traceinsight and torch-tb-profiler see it; `scripts/compare_tools` runs it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bubblescope as bs
from bubblescope.align import wait_transfer
from bubblescope.report.build import Report
from tests.support import tensorboard
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

ROOT = Path(__file__).resolve().parents[2]
FIRST, LAST = "<!-- compare_tools -->", "<!-- /compare_tools -->"


@dataclass(frozen=True)
class Row:
    """One GPU, percent; None: the tool does not say."""

    rank: int
    true_idle: float
    ours_idle: float
    ours_transfer: float
    hta_idle: float
    hta_communication: float
    hta_compute: float
    tb_utilisation: float | None
    tb_communication: float | None


def compare(folder: Path) -> tuple[list[Row], str]:
    """The rows, and our first sentence about the job."""
    truth = simulate(Shape())
    # Rank files in their own windows: each counts from a base of its own.
    files = write(folder / "job", traces(truth, Style(base_ns={rank: 1_000_000 * rank for rank in range(4)})))
    report = bs.analyze(bs.load(folder / "job"))
    theirs = _hta(folder / "job")
    util, overlap = _tb(files, folder / "board")
    ours = _ours(report)
    rows = [
        Row(
            rank, _true_idle(truth, rank), *ours[rank],
            theirs[rank]["idle_time_pctg"], theirs[rank]["non_compute_time_pctg"], theirs[rank]["compute_time_pctg"],
            util.get(rank), overlap.get(rank),
        )
        for rank in range(4)
    ]  # fmt: skip
    return rows, str(_sentence(report))


def _true_idle(truth: Truth, rank: int) -> float:
    """Idle without transfer, percent of the common window."""
    low, high = truth.windows[0]
    lost = (high - low) - truth.busy_ns(rank) - truth.transfer_ns(rank)
    return 100 * lost / (high - low)


def _ours(report: Report) -> dict[int, tuple[float, float]]:
    """Percent of the window idle without transfer, and in transfer."""
    messages = wait_transfer(report.run)
    receiver = report.run.spans.rank[report.run.links.p2p[:, 1]]
    out = {}
    for gpu in report.data["gpus"]:
        moved = float(messages.transfer[receiver == gpu["rank"]].sum()) / 1e9
        out[gpu["rank"]] = (100 * (gpu["idle"] - moved) / gpu["window"], 100 * moved / gpu["window"])
    return out


def _sentence(report: Report) -> str:
    from bubblescope.views.summary import first_screen

    return " ".join(first_screen(report).sentence.split())


def _hta(folder: Path) -> dict[int, dict[str, float]]:
    done = tensorboard.python(Path(__file__).with_name("peers.py"), folder)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return {int(rank): row for rank, row in json.loads(done.stdout).items()}


def _tb(files: list[Path], folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """GPU utilisation, and communication that is not overlapped where the plugin offers its distributed view."""
    (folder / "job").mkdir(parents=True)
    for rank, path in enumerate(files):
        shutil.copy(path, folder / "job" / f"rank{rank}.1.pt.trace.json.gz")
    with tensorboard.running(folder) as board:
        run = board.runs()[0]
        util = {}
        for rank in range(len(files)):
            shown = board.profiler("overview", run=run, worker=f"rank{rank}", span="1", view="Overview")
            util[rank] = _utilisation(shown)
        try:
            view = board.profiler("distributed/overlap", run=run, worker="All", span="1", view="Distributed")
        except urllib.error.HTTPError:
            return util, {}
        return util, _overlap(view)


def _utilisation(shown: dict[str, Any]) -> float:
    found = re.search(r"GPU Utilization\D*([\d.]+) ?%", json.dumps(shown["gpu_metrics"]))
    if found is None:
        raise RuntimeError(f"no GPU utilisation in {shown['gpu_metrics']}")
    return float(found[1])


def _overlap(view: dict[str, Any]) -> dict[int, float]:
    """Percent of a step in communication; empty where the view has no rows."""
    out = {}
    for worker, row in (view.get("data", {}).get("all") or {}).items():
        total = sum(row)
        out[int(re.sub(r"\D", "", worker) or 0)] = 100 * row[2] / total if total else 0.0
    return out


def table(rows: list[Row]) -> str:
    """Markdown."""
    head = (
        "| GPU | truth: idle without transfer | bubblescope: idle without transfer | bubblescope: transfer "
        "| traceinsight: idle | traceinsight: non-compute | traceinsight: compute | torch-tb-profiler: GPU utilisation "
        "| torch-tb-profiler: communication |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    lines = [
        f"| {r.rank} | {r.true_idle:.2f} % | **{r.ours_idle:.2f} %** | {r.ours_transfer:.2f} % | {r.hta_idle:.2f} % | "
        f"{r.hta_communication:.2f} % | {r.hta_compute:.2f} % | {_percent(r.tb_utilisation)} | "
        f"{_percent(r.tb_communication)} |"
        for r in rows
    ]
    return "\n".join([head, *lines])


def _percent(value: float | None) -> str:
    return "not offered" if value is None else f"{value:.2f} %"


def text(rows: list[Row], sentence: str) -> str:
    """What goes between the marks."""
    return f"{FIRST}\n{table(rows)}\n\nbubblescope on these files: “{sentence}”\n{LAST}"


def renew(path: Path, between: str) -> None:
    """Replace what stands between the marks in a file."""
    old = path.read_text(encoding="utf-8")
    if FIRST not in old or LAST not in old:
        raise SystemExit(f"{path} lacks the marks {FIRST} and {LAST}")
    path.write_text(old[: old.index(FIRST)] + between + old[old.index(LAST) + len(LAST) :], encoding="utf-8")


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        rows, sentence = compare(Path(folder))
    print(text(rows, sentence))
    if "--write" in arguments:
        for path in (ROOT / "README.md", ROOT / "docs" / "comparison.md"):
            renew(path, text(rows, sentence))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
