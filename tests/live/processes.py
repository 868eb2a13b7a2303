"""Processes that tests watch and ask: a real training, a watcher, a Prometheus. All end with their block."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.programs import program
from tests.support.sleeping import free_port

ROOT = Path(__file__).resolve().parents[2]
BUBBLESCOPE = (sys.executable, "-m", "bubblescope")


def wait_for(what: str, check: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value that `check` gives."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = check()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"waited {timeout_s:g} s for {what}")


@contextlib.contextmanager
def training(out: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real demo training over gloo, recorded into ``out/recording``, that ends with the block."""
    command = [*BUBBLESCOPE, "demo", "--out", str(out), *more]
    with (out.parent / "demo.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


@dataclass
class Watching:
    """A running watcher: where its page and its metrics are, its process, and what it wrote to stderr so far."""

    process: subprocess.Popen[bytes]
    log: Path
    page: str = ""
    metrics: str = ""

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def watching(path: Path, log: Path, *more: str) -> Iterator[Watching]:
    """`bubblescope watch` on free ports."""
    command = [*BUBBLESCOPE, "watch", str(path), "--port", "0", "--prometheus-port", "0", "--interval", "0.3", *more]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr)
    made = Watching(process, log)

    def served() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"watch ended with {process.returncode}: {made.said}")
        urls = re.findall(r"http://\S+", made.said)
        if len(urls) == 2:
            made.page, made.metrics = urls
        return len(urls) == 2

    try:
        wait_for("the watcher to listen", served)
        yield made
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=30)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **query: str) -> Any:
        """The data of an API answer. Raises RuntimeError with Prometheus' own words for an error."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error).get("error")) from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        found = self.get("query", query=expression)
        return found["result"] if found["resultType"] == "vector" else [{"metric": {}, "value": found["result"]}]

    def ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextlib.contextmanager
def prometheus(folder: Path, targets: dict[str, str], rules: list[Path]) -> Iterator[Prometheus]:
    """A real one that scrapes {job: host:port} and evaluates `rules` every second."""
    port = free_port()
    copies = []
    for rule in rules:
        copy = folder / rule.name
        copy.write_text(re.sub(r"interval: \d+s", "interval: 1s", rule.read_text()))
        copies.append(str(copy))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": copies,
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    made = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for("Prometheus", made.ready)
        yield made
    finally:
        process.terminate()
        process.wait(timeout=60)
