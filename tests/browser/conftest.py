"""Reports as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bubblescope.views import html


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Path]:
    """Writes a report once under a name."""
    folder = tmp_path_factory.mktemp("reports")

    def write(name: str, report: Any) -> Path:
        path = folder / f"{name}.html"
        return path if path.exists() else html.write(report, path)

    return write
