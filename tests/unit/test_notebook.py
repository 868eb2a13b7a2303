"""In a notebook: short, safe HTML for reports and runs, and an example that runs from its first cell to its last."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import plotly.graph_objects as go
import pytest

import bubblescope as bs
from bubblescope.model import Notice, Run
from bubblescope.views import notebook
from tests.support import cases, fake_report

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SCRIPT = "</script><script>alert(1)</script>"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def _tags(text: str) -> list[tuple[str, list[tuple[str, str | None]]]]:
    parser = _Tags()
    parser.feed(text)
    return parser.found


def test_a_report_is_its_first_screen_and_its_causes() -> None:
    report = cases.report()
    text = report._repr_html_()
    assert "lost to pipeline bubbles" in text
    assert "stage imbalance" in text and "first-in saving" in text
    assert len(text) < 20_000


def test_it_runs_and_loads_nothing() -> None:
    tags = _tags(cases.report()._repr_html_())
    assert not {tag for tag, _ in tags} & {"script", "img", "iframe", "link", "object", "style"}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in tags for name, _ in attrs)


def test_foreign_names_stay_text() -> None:
    text = notebook.render(fake_report.hostile())
    assert "<script" not in text and "<img" not in text and "\x1b" not in text


@pytest.mark.parametrize("damage", ["bubble", "cost", "causes", "gpus", "replay"])
def test_what_is_missing_is_called_unavailable(damage: str) -> None:
    report = fake_report.build(fake_report.Job(steps=2))
    report.data[damage] = [] if damage == "gpus" else {}
    text = notebook.render(report)
    assert "None" not in text and "nan" not in text.lower().split()


def test_the_repr_of_a_report_is_its_sentence() -> None:
    text = repr(cases.report())
    assert text.startswith("Report: ") and text.endswith(".") and "\n" not in text


def test_the_repr_of_a_run_is_one_line_and_its_html_has_the_notices() -> None:
    run = cases.report().run
    assert repr(run) == "Run(4 ranks, 6 steps, 650 spans, 1F1B, synthetic, 0 notices)".replace(
        "650", f"{len(run.spans):,}"
    )
    assert repr(Run.empty()) == "Run(0 ranks, 0 steps, 0 spans, schedule not known, no source, 0 notices)"
    shown = run.with_notices(Notice("odd", SCRIPT, ""))._repr_html_()
    assert "1 notice" in shown and "<script" not in shown and "alert(1)" in shown


@pytest.mark.parametrize("name", ["timeline", "causes", "steps", "balance", "heatmap"])
def test_figures_are_plotly_objects(name: str) -> None:
    assert isinstance(getattr(cases.report(), f"{name}_figure")(), go.Figure)


def test_the_example_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    book: Any = nbformat.read(folder / "post_mortem.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    shown = [out["data"] for cell in book.cells for out in cell.get("outputs", []) if "data" in out]
    figures = [data for data in shown if "application/vnd.plotly.v1+json" in data]
    assert len(figures) == 3
    assert any("lost to pipeline bubbles" in data.get("text/html", "") for data in shown)
    assert any("less time" in data.get("text/plain", "") for data in shown)
    assert (folder / "post_mortem.html").stat().st_size > 1_000_000


def test_the_example_is_committed_without_outputs() -> None:
    book: Any = nbformat.read(EXAMPLES / "post_mortem.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)


def test_the_example_recordings_are_those_that_their_text_describes() -> None:
    before = bs.analyze(bs.load(EXAMPLES / "before"))
    assert before.data["pipeline"]["schedule"] == "1F1B"
    assert before.data["pipeline"]["stages"] == 4 and before.data["pipeline"]["microbatches"] == 8
    kinds = {name: row["seconds"] for name, row in before.data["causes"].items()}
    assert kinds["stage_imbalance"] > 0.1
    assert "because stage 2 is 1.93× slower than the others" in repr(before)
    after = bs.analyze(bs.load(EXAMPLES / "after"))
    assert after.data["causes"]["stage_imbalance"]["seconds"] < kinds["stage_imbalance"] / 4
