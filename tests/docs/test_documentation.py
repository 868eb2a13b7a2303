"""The documentation does what it says: its commands run, its reference is that of the program, its links lead
somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from bubblescope.cli.main import COMMANDS, root

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)

NOT_RUN = {
    "README.md": [
        "installs a virtual environment; tests/cli/test_demo.py runs what it starts",
        "installs the package; scripts/_setup.sh does",
        "needs a training job",
    ],
    "docs/attach.md": ["needs a job that trains"],
    "docs/howto/deepspeed.md": ["needs GPUs and DeepSpeed"],
    "docs/howto/kubernetes.md": ["needs a Kubernetes cluster", "needs a bucket", "needs a Kubernetes cluster",
                                 "needs a Kubernetes cluster"],
    "docs/howto/megatron.md": ["needs GPUs and Megatron-LM"],
    "docs/howto/nsys.md": ["needs GPUs and Nsight Systems"],
    "docs/howto/slurm.md": ["needs a Slurm cluster", "needs MPI", "needs a Slurm cluster"],
    "docs/howto/tensorboard.md": ["needs traces of a GPU job", "needs the tensorboard extra"],
    "docs/howto/torchtitan.md": ["needs GPUs and torchtitan"],
    "docs/monitoring.md": ["serves until Ctrl-C"],
}  # fmt: skip
"""Every block of commands that no test runs, with its reason: nothing is left out in silence."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    why: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start("text"))
            yield Block(str(page.relative_to(ROOT)), line, found["language"], found["text"], found["why"])


BLOCKS = list(_blocks())
COMMAND_BLOCKS = [b for b in BLOCKS if b.language in ("sh", "console", "bash")]
RUN = [b for b in COMMAND_BLOCKS if b.why is None]
LEFT_OUT = [b for b in COMMAND_BLOCKS if b.why is not None]


def test_every_block_that_is_not_run_is_known_with_its_reason() -> None:
    found: dict[str, list[str]] = {}
    for block in LEFT_OUT:
        found.setdefault(block.page, []).append(str(block.why))
    assert found == NOT_RUN


def test_commands_stand_in_blocks_that_are_known_as_commands() -> None:
    """A block without a language, or a text, that begins with a command would be left out in silence."""
    hidden = [
        str(b) for b in BLOCKS
        if b.language in ("", "text") and re.match(r"\$ |bubblescope |scripts/|pip |python3? ", b.text)
    ]  # fmt: skip
    assert hidden == []


def test_there_is_something_to_run() -> None:
    assert len(RUN) >= 10
    assert {b.page for b in RUN} >= {"README.md", "docs/theory.md", "docs/howto/ci.md"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has who cloned the repository, as far as the commands need it."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    return folder


@pytest.mark.parametrize("block", RUN, ids=str)
def test_commands_run(block: Block, workplace: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=workplace, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("block", LEFT_OUT, ids=str)
def test_commands_that_are_not_run_are_shell_at_least(block: Block) -> None:
    text = re.sub(r"<[a-z ]+>", "PLACE", block.text)
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", LEFT_OUT, ids=str)
def test_options_of_commands_that_are_not_run_exist(block: Block) -> None:
    for name, arguments in _own_commands(block.text):
        command = root.get_command(click.Context(root), name)
        assert command is not None, f"bubblescope has no command {name}"
        command.make_context(name, list(arguments))


def _own_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, arguments) of each call of bubblescope."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for i, word in enumerate(words[:-1]):
            if word == "bubblescope" and words[i + 1] in COMMANDS:
                rest = words[i + 2 :]
                end = next((k for k, w in enumerate(rest) if set(w) <= set(";|&()<>")), len(rest))
                yield words[i + 1], rest[:end]


def test_python_blocks_compile() -> None:
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, str(block), "exec")


def test_the_readme_s_python_runs(workplace: Path) -> None:
    (code,) = [b.text for b in BLOCKS if b.page == "README.md" and b.language == "python"]
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (workplace / "report.html").exists()


def test_links_lead_to_files() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_reference_shows_the_help_that_the_program_prints(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bubblescope", name, "--help"], env={**os.environ, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert f"## bubblescope {name}\n\n```text\n{printed}\n```" in page


def test_the_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_docs"), "--check"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun scripts/build_docs"


def test_the_readme_lists_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `bubblescope (\w+)", text, re.M)) == set(COMMANDS)


def test_the_picture_of_the_readme_is_small() -> None:
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size < 300_000
