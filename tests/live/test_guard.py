"""Who is let in, and that nothing of a token is ever told."""

from __future__ import annotations

import hmac
import logging

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from bubblescope.errors import UsageError
from bubblescope.live import guard
from bubblescope.live.guard import Guard, check_token

TOKEN = "correct-horse-battery-staple"


async def _secret(request: Request) -> PlainTextResponse:
    return PlainTextResponse("the secret")


def _app(token: str | None, hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")) -> Guard:
    routes = [Route(path, _secret) for path in ("/", "/metrics", "/events", "/assets/{name}")]
    return Guard(Starlette(routes=routes), token, frozenset(hosts), "<p>login</p>")


def _client(app: Guard, base: str = "http://127.0.0.1:8710") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=base)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("base", ["http://127.0.0.1:8710", "http://localhost:1", "http://[::1]:9", "http://localhost"])
async def test_this_host_needs_no_token(base: str) -> None:
    async with _client(_app(None), base) as client:
        assert (await client.get("/metrics")).text == "the secret"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8710", "127.0.0.1.evil.example", "", "[::1].evil"])
async def test_a_page_of_elsewhere_cannot_reach_it_by_a_name_of_its_own(host: str) -> None:
    async with _client(_app(None)) as client:
        answer = await client.get("/", headers={"host": host})
    assert answer.status_code == 421 and "secret" not in answer.text


@pytest.mark.parametrize("path", ["/", "/metrics", "/events"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"authorization": "Bearer "},
     {"cookie": f"bubblescope={TOKEN}"}, {"cookie": "bubblescope="}, {"authorization": "Bearer \u00e9".encode()}],
)  # fmt: skip
async def test_without_the_token_nothing_is_told(path: str, headers: dict[str, str]) -> None:
    async with _client(_app(TOKEN), "http://node-7:8710") as client:
        answer = await client.get(path, headers=headers)
    assert answer.status_code == 401
    assert "secret" not in answer.text


async def test_programs_send_the_token_as_bearer() -> None:
    async with _client(_app(TOKEN), "http://node-7:8710") as client:
        answer = await client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.text == "the secret"


async def test_a_browser_logs_in_once_and_its_scripts_see_neither_token_nor_cookie() -> None:
    async with _client(_app(TOKEN), "http://node-7:8710") as client:
        refused = await client.post("/login", data={"token": "wrong" * 5})
        assert refused.status_code == 401 and "set-cookie" not in refused.headers
        answer = await client.post("/login", data={"token": TOKEN})
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert (await client.get("/")).text == "the secret"


async def test_a_login_of_any_size_is_cut_short() -> None:
    async with _client(_app(TOKEN)) as client:
        assert (await client.post("/login", content=b"token=" + b"x" * 1_000_000)).status_code == 413


async def test_assets_are_open_because_the_login_page_needs_them() -> None:
    async with _client(_app(TOKEN)) as client:
        assert (await client.get("/assets/report.css")).status_code == 200
        assert (await client.get("/assets/../metrics")).status_code == 401


async def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(guard.hmac, "compare_digest", noting)
    async with _client(_app(TOKEN)) as client:
        await client.get("/metrics", headers={"authorization": "Bearer guess"})
        await client.post("/login", data={"token": "guess"})
    assert compared.count((b"guess", TOKEN.encode())) == 2


async def test_no_token_gets_into_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with _client(_app(TOKEN)) as client:
        await client.post("/login", data={"token": "a-wrong-guess-that-is-nearly-right"})
        await client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert "a wrong token was given by" in caplog.text
    assert TOKEN not in caplog.text and "nearly-right" not in caplog.text


async def test_every_answer_forbids_what_the_page_does_not_need() -> None:
    async with _client(_app(TOKEN)) as client:
        for path in ("/", "/metrics", "/nowhere"):
            headers = (await client.get(path)).headers
            assert headers["content-security-policy"].startswith("default-src 'none'")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-7"])
async def test_another_address_needs_a_token_that_cannot_be_guessed(host: str) -> None:
    with pytest.raises(UsageError, match="needs a token"):
        check_token(host, None)
    with pytest.raises(UsageError, match="fewer than 16"):
        check_token(host, "short")
    check_token(host, TOKEN)
    check_token("127.0.0.1", None)
