"""On one job of known truth: what we print is the truth, what others print is what the documents say they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import comparison

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.real
def test_our_idle_is_the_truth_and_others_call_waiting_work(tmp_path: Path) -> None:
    rows, sentence = comparison.compare(tmp_path)
    assert [r.true_idle for r in rows] == pytest.approx([46.55, 45.67, 45.67, 20.26], abs=0.01)
    for row in rows:
        assert row.ours_idle == pytest.approx(row.true_idle, abs=0.3)
        assert row.hta_idle < 1
        assert row.tb_utilisation is not None
        assert row.tb_utilisation > 99
        assert row.hta_communication + row.hta_compute == pytest.approx(100, abs=0.5)
    assert "stage 3 is 1.5× slower" in sentence


def test_both_documents_hold_the_same_table() -> None:
    tables = []
    for name in ("README.md", "docs/comparison.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        tables.append(text[text.index(comparison.FIRST) : text.index(comparison.LAST)])
    assert tables[0] == tables[1]
    assert "| 3 | 20.26 % |" in tables[0]
