"""What is served, and to how many."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from bubblescope.errors import UsageError
from bubblescope.live import exporter
from bubblescope.live.page import SCRIPTS, STYLES, Pages
from bubblescope.live.server import MOST_READERS, Site, Streams, listen, page_app
from bubblescope.live.watcher import Snapshot, Watcher, WatchOptions
from tests.live import jobs

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _client(snapshot: Snapshot, streams: Streams | None = None) -> httpx.AsyncClient:
    site = Site(Pages(lambda: snapshot), exporter.registry(lambda: snapshot), streams or Streams())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=page_app(site)), base_url="http://127.0.0.1")


def _watched(folder: Path) -> Snapshot:
    jobs.steady().write(folder, range(5))
    made = Watcher(folder, WatchOptions(steps=3))
    while made.refresh():
        pass
    return made.snapshot


async def test_who_reads_the_address_can_connect_and_nobody_else_can_take_it() -> None:
    with listen("127.0.0.1", 0) as made, socket.socket() as reader:
        reader.connect(made.getsockname())
        with pytest.raises(UsageError, match="cannot listen"):
            listen("127.0.0.1", made.getsockname()[1])


async def test_more_readers_than_there_is_room_for_are_told_so() -> None:
    async with _client(Snapshot(), Streams(count=MOST_READERS)) as client:
        assert (await client.get("/events")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200


async def test_the_page_names_only_what_is_served_and_nothing_runs_inline(tmp_path: Path) -> None:
    async with _client(_watched(tmp_path)) as client:
        page = (await client.get("/")).text
        assert "<script>" not in page and "<style>" not in page and "style=" not in page and "onclick" not in page
        for name in ("plotly.js", *SCRIPTS, *STYLES):
            address = page.split(f"assets/{name}", 1)[1].split('"', 1)[0]
            answer = await client.get(f"/assets/{name}{address}")
            assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]
        for name in ("page.py", "..%2Fpage.py", "report.html.j2"):
            assert (await client.get(f"/assets/{name}")).status_code == 404


async def test_a_stream_sends_a_view_once_and_ends_when_the_watch_does(tmp_path: Path) -> None:
    snapshot, streams = _watched(tmp_path), Streams()
    pages, received = Pages(lambda: snapshot), []
    async for chunk in streams.follow(pages, version="none"):
        received.append(chunk)
        streams.stopping = len(received) == 2
    assert received[0].startswith(b"retry:")
    assert received[1].startswith(b"event: view\nid: ") and received[1].endswith(b"\n\n")
    assert received[1].count(b"\n") == 4, "a view is one line of JSON"
    assert streams.count == 0


async def test_the_same_snapshot_is_rendered_once(tmp_path: Path) -> None:
    snapshot = _watched(tmp_path)
    pages = Pages(lambda: snapshot)
    assert pages.stale
    first = pages.view()
    assert not pages.stale and pages.view() is first
