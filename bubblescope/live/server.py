"""Serves the live page and the metrics, each from a thread of its own, while the watcher has the main one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from bubblescope.errors import UsageError
from bubblescope.live import exporter
from bubblescope.live.guard import Guard, is_local
from bubblescope.live.page import Pages, View, asset, login_page

MOST_READERS = 64
LOOK_S = 0.25
"""How often an open page's stream looks for a new view."""
HEARTBEAT_S = 15.0


async def _view(pages: Pages) -> View:
    """The newest view; rendering it must not hold up others, and fetching it must cost nothing."""
    return await run_in_threadpool(pages.view) if pages.stale else pages.view()


@dataclass
class Streams:
    """The open event streams. `stop` ends them all."""

    stopping: bool = False
    count: int = 0

    async def follow(self, pages: Pages, version: str) -> AsyncIterator[bytes]:
        """Views as server-sent events, each when it differs from the one before; a slow reader misses some."""
        self.count += 1
        quiet = 0.0
        try:
            yield b"retry: 2000\n\n"
            while not self.stopping:
                view = await _view(pages)
                if view.version != version:
                    version, quiet = view.version, 0.0
                    yield f"event: view\nid: {version}\ndata: {view.event}\n\n".encode()
                elif quiet >= HEARTBEAT_S:
                    quiet = 0.0
                    yield b": still here\n\n"
                await asyncio.sleep(LOOK_S)
                quiet += LOOK_S
        finally:
            self.count -= 1


@dataclass(frozen=True)
class Site:
    """What is served."""

    pages: Pages
    metrics: CollectorRegistry
    streams: Streams = field(default_factory=Streams)

    async def page(self, request: Request) -> Response:
        view = await _view(self.pages)
        return HTMLResponse(view.html)

    async def events(self, request: Request) -> Response:
        if self.streams.count >= MOST_READERS:
            return PlainTextResponse(f"{MOST_READERS} pages are open already.\n", 503)
        stream = self.streams.follow(self.pages, request.query_params.get("have", ""))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            text = await run_in_threadpool(asset, name)
        except KeyError:
            return PlainTextResponse("There is no such file.\n", 404)
        media = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(text, media_type=media, headers={"cache-control": "private, max-age=31536000, immutable"})

    async def scrape(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = await run_in_threadpool(exporter.render, self.metrics, accept)
        return Response(body, headers={"content-type": content_type})


def page_app(site: Site) -> ASGIApp:
    return Starlette(
        routes=[
            Route("/", site.page),
            Route("/events", site.events),
            Route("/metrics", site.scrape),
            Route("/assets/{name}", site.asset),
        ]
    )


def metrics_app(site: Site) -> ASGIApp:
    return Starlette(routes=[Route("/metrics", site.scrape)])


def guarded(app: ASGIApp, host: str, token: str | None) -> Guard:
    """`app` behind what its address demands."""
    names = {"localhost", "127.0.0.1", "::1", host} if is_local(host) else {host}
    return Guard(app, token, frozenset(names), login_page())


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises UsageError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
            made.listen()  # who reads the address can connect, though it is answered a moment later
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}", hint=_what_to_do(host, error)
        ) from error
    return made


def _what_to_do(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: give one that is, 0.0.0.0 for all of them"
    if isinstance(error, PermissionError):
        return "ports below 1024 are the administrator's: choose a higher one, 0 takes any free one"
    return "another program may have it: choose another port, 0 takes any free one"


@contextlib.contextmanager
def serving(apps: Sequence[tuple[ASGIApp, socket.socket]], streams: Streams) -> Iterator[None]:
    """Answer requests while the block runs. Open streams end with it."""
    servers = [uvicorn.Server(_config(app)) for app, _ in apps]
    threads = [
        threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="bubblescope-serve", daemon=True)
        for server, (_, bound) in zip(servers, apps, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        streams.stopping = True
        for server in servers:
            server.should_exit = True
        for thread in threads:
            thread.join(5.0)


def _config(app: ASGIApp) -> uvicorn.Config:
    # No access log: it would grow with each scrape. Nothing of a request is written anywhere.
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ws="none",
    )
