"""What `bubblescope run` tells a job, what a process makes of it, and waiting for imports."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bubblescope.attach import launcher
from bubblescope.capture import environment
from bubblescope.capture.environment import Settings, parse_ranks
from bubblescope.capture.imports import when_imported
from bubblescope.errors import UsageError


def test_settings_survive_the_environment() -> None:
    for settings in (
        Settings(),
        Settings(
            "record", "/runs/x", "megatron", steps=7, every=3, warmup=0, ranks=frozenset({0, 5, 6}), notes="/tmp/n"
        ),
        Settings("standby"),
    ):
        assert Settings.read(settings.variables()) == settings
    assert Settings.read({}) == Settings()


@pytest.mark.parametrize(
    "variables", [{"BUBBLESCOPE": "yes"}, {"BUBBLESCOPE_EVERY": "-1"}, {"BUBBLESCOPE_RANKS": "0,x"}]
)
def test_variables_without_sense_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Settings.read(variables)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2"])
def test_lists_of_ranks_without_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ranks(text)


def test_only_the_marked_process_is_its_rank() -> None:
    variables: dict[str, str] = {}
    assert not environment.owned_by_another(2, variables)
    environment.mark_owner(2, variables)
    assert not environment.owned_by_another(2, variables)
    inherited = {"BUBBLESCOPE_OWNER": f"2:{os.getpid() + 1}"}
    assert environment.owned_by_another(2, inherited)
    assert not environment.owned_by_another(3, inherited) and not environment.owned_by_another(None, inherited)


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_the_rank_is_known_from_any_launcher(name: str) -> None:
    assert environment.rank_of_launcher({name: "12"}) == 12
    assert environment.rank_of_launcher({name: ""}) is None


def test_a_job_inside_a_job_has_settings_of_its_own() -> None:
    outer = launcher.job_environment(Settings("record", "/outer", steps=3), {"PATH": "p", "PYTHONPATH": "/mine"})
    outer["BUBBLESCOPE_OWNER"] = "0:1"
    outer["BUBBLESCOPE_SOCKET_DIR"] = "/kept"
    inner = launcher.job_environment(Settings("record", "/inner"), outer)
    assert inner["PYTHONPATH"] == os.pathsep.join([str(launcher.SITE), "/mine"])
    assert inner["BUBBLESCOPE_OUT"] == "/inner" and inner["BUBBLESCOPE_SOCKET_DIR"] == "/kept"
    assert not {"BUBBLESCOPE_OWNER", "BUBBLESCOPE_STEPS"} & inner.keys()


# ---- imports


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "bubblescope_test_awaited"
    (tmp_path / f"{name}.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_callback_comes_once_and_after_the_module_is_whole(module: str) -> None:
    found: list[object] = []
    before = list(sys.meta_path)
    when_imported(module, lambda: found.append(sys.modules[module].value))
    assert len(sys.meta_path) == len(before) + 1
    imported = importlib.import_module(module)
    assert found == [5] and sys.meta_path == before
    assert type(imported.__loader__).__name__ == "SourceFileLoader" and imported.__spec__.loader is imported.__loader__
    when_imported(module, lambda: found.append("there"))
    assert found == [5, "there"]


def test_a_cancelled_callback_does_not_come(module: str) -> None:
    before = list(sys.meta_path)
    cancel = when_imported(module, lambda: pytest.fail("was called"))
    cancel()
    cancel()
    importlib.import_module(module)
    assert sys.meta_path == before


def test_a_callback_that_raises_leaves_the_import_alone(module: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ZeroDivisionError("ours")

    when_imported(module, broken)
    assert importlib.import_module(module).value == 5
    assert "ours" in caplog.text


def test_a_module_that_is_not_there_is_missed_as_ever() -> None:
    cancel = when_imported("bubblescope_test_missing", lambda: pytest.fail("was called"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("bubblescope_test_missing")
    cancel()


# ---- processes that never train


def python(code: str, **variables: str) -> str:
    made = launcher.job_environment(Settings("record", "/nowhere"), {**os.environ, **variables})
    done = subprocess.run([sys.executable, "-c", code], env=made, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_process_without_torch_imports_nothing_of_ours() -> None:
    said = python("import sys; print([m for m in sys.modules if m.startswith(('bubblescope.', 'numpy', 'msgspec'))])")
    assert said == "[]"


def test_the_users_own_sitecustomize_runs_and_stays(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nmine = 'x'\nos.environ['SEEN'] = '1'\n")
    code = "import os, sys, sitecustomize; print(sitecustomize.mine, os.environ['SEEN'], len(sys.meta_path) > 3)"
    assert python(code, PYTHONPATH=str(tmp_path)) == "x 1 True"


def test_a_python_without_bubblescope_finds_the_one_that_launched_it(tmp_path: Path) -> None:
    """-S leaves out site-packages, so bubblescope is only there because the hook's own folder leads to it."""
    code = (
        f"import sys; sys.path.append({str(launcher.SITE)!r}); import sitecustomize; import importlib.util as u;"
        "assert u.find_spec('bubblescope') is None; sitecustomize._find_bubblescope();"
        "import bubblescope.capture.environment as e; print(e.Settings.read().mode)"
    )
    made = launcher.job_environment(Settings("record", "/nowhere"))
    made.pop("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code], env=made, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("record", "")
