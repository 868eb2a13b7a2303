"""Who may ask the watcher anything: this host only, or who knows the token.

Without a token, only requests that name this host are answered, so that no page of elsewhere can reach it under a
name of its own (DNS rebinding). With one, a browser logs in once and gets a cookie that its scripts cannot read;
programs send ``Authorization: Bearer TOKEN``. Tokens are compared in constant time, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bubblescope.errors import UsageError

log = logging.getLogger("bubblescope.live")

LEAST_TOKEN = 16
MOST_BODY = 4096
COOKIE = "bubblescope"
OPEN_PATHS = "/assets/"
"""Scripts and styles of the package: the same everywhere, and needed by the login page."""

_HOST = re.compile(r"(\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]]+))(:\d+)?")

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine.

    >>> is_local("127.0.0.1"), is_local("::1"), is_local("localhost"), is_local("0.0.0.0"), is_local("node-7")
    (True, True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(host: str, token: str | None) -> None:
    """Raise UsageError where an address needs a token and has none, or one that could be guessed."""
    if token is None and not is_local(host):
        raise UsageError(
            f"--host {host} can be reached from other machines, and needs a token",
            hint="set BUBBLESCOPE_TOKEN (python3 -c 'import secrets; print(secrets.token_urlsafe())'), "
            "or keep 127.0.0.1 and use ssh -L",
        )
    if token is not None and len(token) < LEAST_TOKEN:
        raise UsageError(f"the token has fewer than {LEAST_TOKEN} characters", hint="a short one can be guessed")


class Guard:
    """ASGI middleware around everything that is served."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: frozenset[str], login_page: str) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        self._login_page = login_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = await self._refusal(Request(scope, receive))
        await (answer or self._app)(scope, receive, _with_headers(send))

    async def _refusal(self, request: Request) -> Response | None:
        """What is answered instead; None lets the request pass."""
        if self._token is None:
            if _name_of(request.headers) in self._hosts:
                return None
            return PlainTextResponse("This watcher answers to its own host name only.\n", 421)
        if request.url.path == "/login" and request.method == "POST":
            return await self._login(request)
        if request.url.path.startswith(OPEN_PATHS) or self._knows(request):
            return None
        if request.url.path == "/" and request.method == "GET":
            return HTMLResponse(self._login_page, 401)
        return PlainTextResponse("A token is needed.\n", 401, {"www-authenticate": "Bearer"})

    async def _login(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY:
                return PlainTextResponse("Too long.\n", 413)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not _same(given, self._token or ""):
            who = request.client.host if request.client is not None else "somebody"
            log.warning("a wrong token was given by %s", who)
            return HTMLResponse(self._login_page, 401)
        answer = RedirectResponse(".", 303)
        answer.set_cookie(COOKIE, _cookie(self._token or ""), httponly=True, samesite="strict")
        return answer

    def _knows(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _same(given.strip(), self._token or ""):
            return True
        return _same(request.cookies.get(COOKIE, ""), _cookie(self._token or ""))


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _cookie(token: str) -> str:
    """From which the token cannot be found."""
    return hmac.new(token.encode(), b"bubblescope watch session", hashlib.sha256).hexdigest()


def _name_of(headers: Headers) -> str:
    """The host that the request names, without its port; "" for what is no host."""
    found = _HOST.fullmatch(headers.get("host", ""))
    return "" if found is None else found["six"] or found["name"]


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sending
