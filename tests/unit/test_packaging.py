"""What is installed: a complete wheel, a cheap import, the promised public names."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bubblescope

REPO = Path(__file__).parents[2]
HEAVY = {"torch", "pandas", "plotly", "scipy", "numpy", "click", "rich", "jinja2", "distributed"}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport json, sys; print(json.dumps([m for m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return {m.partition(".")[0] for m in json.loads(done.stdout.splitlines()[-1])}


def test_importing_bubblescope_loads_nothing_heavy() -> None:
    assert not HEAVY & modules_after("import bubblescope")


def test_the_part_that_lives_in_a_training_process_loads_no_pandas_plotly_or_torch() -> None:
    assert not {"pandas", "plotly", "torch", "scipy", "jinja2"} & modules_after("import bubblescope.capture")


def test_loading_and_analysing_need_no_torch_and_no_plotting() -> None:
    assert not {"torch", "plotly"} & modules_after(
        "import bubblescope as bs; bs.load; bs.analyze; bs.Report; bs.Run"
    )


def test_reading_a_trace_in_one_process_loads_neither_openssl_nor_processes() -> None:
    code = "import bubblescope.ingest.kineto, bubblescope.ingest.native as native; native.status()"
    assert not {"_hashlib", "_ssl", "multiprocessing"} & modules_after(code)


def test_every_promised_name_is_there_and_listed() -> None:
    for name in ("Report", "Run", "analyze", "instrument", "load", "record", "__version__"):
        assert getattr(bubblescope, name) is not None
        assert name in dir(bubblescope)
        assert name in bubblescope.__all__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="analyse"):
        bubblescope.analyse  # noqa: B018


def test_the_wheel_has_every_file_of_the_package_that_is_not_a_cache(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    wheel = Path(next(iter(WheelBuilder(str(REPO)).build(directory=str(tmp_path)))))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    tracked = subprocess.run(
        ["git", "ls-files", "bubblescope"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "bubblescope/py.typed" in names
    assert any(n.startswith("bubblescope/views/") and n.endswith((".html", ".j2")) for n in names), "no templates"
    assert not {f for f in tracked if (REPO / f).exists()} - names
    assert not [n for n in names if not n.startswith("bubblescope")], "the wheel must install nothing else"
    always = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert always
    assert not [line for line in always if "torch" in line]
