"""`bubblescope watch`: a live page and metrics over a recording that is being written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bubblescope.cli.output import (
    OUTPUT_FILE,
    FiniteRange,
    check_targets,
    json_option,
    require,
    results,
    spare_inputs,
    write_text,
)
from bubblescope.errors import InputError, UsageError
from bubblescope.model import checks

if TYPE_CHECKING:
    from bubblescope.live.watcher import Snapshot, Watcher

MOST_OF_A_CORE = 0.25
"""While a job trains, the watcher rests as long as it takes to stay below this share of one core."""


@dataclass(frozen=True)
class Outputs:
    """Where else the state goes after each refresh. labels: on every metric."""

    textfile: Path | None
    json_to: str | None
    labels: dict[str, str]


@click.command(
    epilog="\b\nExample:\n"
    "  bubblescope watch runs/x --price-per-gpu-hour 2.50\n"
    "  bubblescope watch runs/x --prometheus-port 9410\n"
    "  bubblescope watch runs/x --once --textfile /var/lib/prometheus/node-exporter/bubblescope.prom"
)
@click.argument("path", metavar="PATH")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8710, show_default=True, metavar="N", help="Of the page; 0 = any."
)
@click.option("--prometheus-port", type=click.IntRange(0, 65535), metavar="N", help="Serve /metrics there as well.")
@click.option("--textfile", type=OUTPUT_FILE, metavar="FILE",
              help="Write the metrics for node_exporter, whole or not at all.")  # fmt: skip
@click.option("--price-per-gpu-hour", "price", type=FiniteRange(min=0), metavar="P",
              help="Your price; without one there are hours and no money.")  # fmt: skip
@click.option("--currency", default="USD", show_default=True, metavar="C", help="Name beside the money.")
@click.option("--steps", type=click.IntRange(2, 1000), default=20, show_default=True, metavar="N",
              help="How many of the last steps the page and the gauges look at.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDR",
              help="Address to bind to; any but this machine's own needs a token.")  # fmt: skip
@click.option("--token", envvar="BUBBLESCOPE_TOKEN", metavar="T", show_envvar=True,
              help="Ask for this token. The variable keeps it out of the list of processes.")  # fmt: skip
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Label on every metric; may be repeated.")
@click.option("--interval", type=FiniteRange(0.1, 3600), default=1.0, show_default=True, metavar="S",
              help="Seconds between looks at the files, at least.")  # fmt: skip
@click.option("--patience", type=FiniteRange(0.5, 86400), default=10.0, show_default=True, metavar="S",
              help="Seconds without a line after which a rank is silent (and five steps at least).")  # fmt: skip
@click.option("--once", is_flag=True, help="Read what is there, print it, write --textfile and --json, serve nothing.")
@json_option
def watch(
    path: str,
    port: int,
    prometheus_port: int | None,
    textfile: Path | None,
    price: float | None,
    currency: str,
    steps: int,
    host: str,
    token: str | None,
    labels: tuple[str, ...],
    interval: float,
    patience: float,
    once: bool,
    json_to: str | None,
) -> None:
    """Live page and metrics over a recording that is being written.

    PATH is the folder that the recorder writes (or one file of it). Ctrl-C ends the watch; the training never
    notices it.
    """
    require("watch", "live", "starlette", "uvicorn", "prometheus_client")
    from bubblescope.live.guard import check_token
    from bubblescope.live.watcher import Watcher, WatchOptions
    from bubblescope.views import console

    target = Path(checks.path("PATH", path))
    if not target.exists():
        hint = f"give the folder that the job records to; before the job starts: mkdir -p {path}"
        raise InputError("there is no such file or folder", hint=hint, where=path)
    check_token(host, token)
    if prometheus_port == port != 0:
        raise UsageError(
            f"--port and --prometheus-port are both {port}",
            hint="give two ports, or leave --prometheus-port out: the page's own port serves /metrics as well",
        )
    check_targets(("--textfile", textfile), ("--json", json_to))
    options = WatchOptions(steps=steps, patience_s=patience, price_per_gpu_hour=price, currency=currency)
    watcher = Watcher(target, options)
    spare_inputs([target, *target.glob("*.jsonl")], ("--textfile", textfile), ("--json", json_to))
    outputs = Outputs(textfile, json_to, parse_labels(labels))
    tell = _teller(watcher, outputs)
    if once:
        watcher.read_all()
        tell()
        if watcher.snapshot.report is None:
            raise _nothing_to_show(watcher.snapshot)
        console.print_summary(watcher.snapshot.report, results(json_to))
        return
    ports = (port, *(() if prometheus_port is None else (prometheus_port,)))
    with _served(watcher, outputs, host, token, ports), _until_ended() as stop:
        _follow(watcher, tell, stop, interval)


def _nothing_to_show(snapshot: Snapshot) -> InputError:
    """Why a look at the recording ended without one analysed step."""
    if not snapshot.ranks:
        said = "; ".join(["there is no recording of a pipeline here", *(n.message for n in snapshot.notices)])
        hint = "give the folder that the job records to; traces are for `bubblescope analyze`"
        return InputError(said, hint=hint, where=snapshot.path)
    said = "; ".join(["no step can be analysed yet", *(n.message for n in snapshot.notices)])
    hint = "a step counts once it and the next one are complete; `bubblescope watch` without --once waits for them"
    return InputError(said, hint=hint, where=snapshot.path)


def parse_labels(texts: tuple[str, ...]) -> dict[str, str]:
    """``("run=large",)`` → ``{"run": "large"}``. Raises UsageError for what Prometheus would refuse, a name that a
    metric has already, and a name given twice.

    >>> parse_labels(("run=large", "team=a=b"))
    {'run': 'large', 'team': 'a=b'}
    """
    from bubblescope.live.exporter import OWN_LABELS

    made: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        good = name.isascii() and name.isidentifier() and not name.startswith("__")
        if not equals or not good:
            raise UsageError(f"'{text}' is not a label", hint="it is NAME=VALUE, for example --label run=large")
        if name in OWN_LABELS:
            others = ", ".join(sorted(OWN_LABELS - {name}))
            raise UsageError(f"the metrics have a label {name} of their own", hint=f"another name; nor any of {others}")
        if name in made:
            raise UsageError(f"--label {name} is given twice: {made[name]} and {value}", hint="give each name once")
        made[name] = value
    return made


def _teller(watcher: Watcher, outputs: Outputs) -> Callable[[], None]:
    """A function that writes the newest snapshot to where it was asked for."""
    from bubblescope.live import exporter, state

    metrics = exporter.registry(lambda: watcher.snapshot, outputs.labels)

    def tell() -> None:
        if outputs.textfile is not None:
            exporter.write_textfile(metrics, outputs.textfile)
        if outputs.json_to is not None:
            write_text(state.as_line(watcher.snapshot), outputs.json_to)

    return tell


@contextmanager
def _served(watcher: Watcher, outputs: Outputs, host: str, token: str | None, ports: tuple[int, ...]) -> Iterator[None]:
    from bubblescope.live import exporter, server
    from bubblescope.live.page import Pages

    metrics = exporter.registry(lambda: watcher.snapshot, outputs.labels)
    site = server.Site(Pages(lambda: watcher.snapshot), metrics)
    made = (server.page_app, server.metrics_app)
    sockets = [server.listen(host, port) for port in ports]
    apps = [
        (server.guarded(make(site), host, token), bound)
        for make, bound in zip(made, sockets, strict=False)
    ]  # fmt: skip
    with server.serving(apps, site.streams):
        name = f"[{host}]" if ":" in host else host
        click.echo(f"watching {watcher.follower.path}: http://{name}:{sockets[0].getsockname()[1]}/", err=True)
        for bound in sockets[1:]:
            click.echo(f"metrics: http://{name}:{bound.getsockname()[1]}/metrics", err=True)
        yield


@contextmanager
def _until_ended() -> Iterator[threading.Event]:
    """An event that SIGTERM sets (service managers end a watch that way, and that is no failure) and Ctrl-C, which is
    raised at the end. Not at once: NumPy may turn what is raised inside it into an error of its own. A second Ctrl-C
    does not wait."""
    stop, interrupted = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        stop.set()

    before = signal.signal(signal.SIGTERM, lambda *_: stop.set()), signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    if interrupted.is_set():
        raise KeyboardInterrupt


def _follow(watcher: Watcher, tell: Callable[[], None], stop: threading.Event, interval: float) -> None:
    tell()
    while not stop.is_set():
        more = watcher.refresh()
        tell()
        stop.wait(0.0 if more else max(interval, watcher.snapshot.pass_seconds * (1 / MOST_OF_A_CORE - 1)))
