"""The server of the dashboard: the page of one job, its news, and the requests of an operator.

    GET  /        the page, with the picture of now
    GET  /stream  server-sent events: the sections of the picture that have changed
    POST /drain   {"node": NODE}, and
    POST /stop    with the header `Authorization: Bearer TOKEN`

The job is looked at only while somebody watches, and once for all who watch. Nothing is changed
without the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zero_contract.decoding import MalformedError, decode
from zero_contract.errors import ZeroError
from zero_orchestrator.ctl.page import document
from zero_orchestrator.ctl.page.picture import Json

EVERY_S = 2.0
"""Seconds between two looks at the job."""
ALIVE_S = 15.0
"""A stream without news has a comment so often, so that a connection that is gone is noticed."""
WRONG_S = 1.0
"""A wrong token is answered after this time."""
MOST_BYTES = 4096
"""Most bytes of a request's body."""

Act = Callable[[Mapping[str, str]], str]
"""Carries out a request, and returns the sentence for whoever asked. Raises ZeroError."""
_log = logging.getLogger(__name__)
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def changes(before: Json, after: Json) -> Json:
    """The sections that differ; of a list of the same length, `[place, value]` of what differs.

    Those of lists are under `patches`: the timelines of 200 nodes change one by one.
    """
    found: Json = {}
    patches: Json = {}
    for name, value in after.items():
        if name not in before:
            found[name] = value
        elif isinstance(value, list) and len(value) == len(before[name]):
            pairs = zip(before[name], value, strict=True)
            if differ := [[place, new] for place, (old, new) in enumerate(pairs) if old != new]:
                patches[name] = differ
        elif value != before[name]:
            found[name] = value
    return {**found, "patches": patches} if patches else found


class Feed:
    """The newest picture of the job, and whoever waits for the next one."""

    def __init__(self, look: Callable[[], Json], every_s: float = EVERY_S) -> None:
        """Nothing is looked at before somebody watches; `look` may raise ZeroError."""
        self._look = look
        self._every_s = every_s
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._number = 0
        self._newest: Json = {}

    async def news(self) -> AsyncGenerator[Json | None]:
        """Yield the `changes` since the last look, all at first; None after a while without one."""
        self._watchers += 1
        if self._looking is None:
            # The last look may be hours old: since then nobody has watched.
            self._number, self._newest = 0, {}
            self._looking = asyncio.create_task(self._keep_looking())
        seen, shown = 0, Json()
        try:
            while True:
                if not await self._after(seen):
                    yield None
                    continue
                # Whoever is slow misses looks: the changes are those since what it was sent.
                seen, before, shown = self._number, shown, {**shown, **self._newest}
                yield changes(before, shown)
        finally:
            self._watchers -= 1
            # An open page is what makes etcd be read.
            if not self._watchers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _after(self, number: int) -> bool:
        """Wait for the look after this one; False if there is none in `ALIVE_S` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALIVE_S), self._changed:
                return await self._changed.wait_for(lambda: self._number > number)
        return False

    async def _keep_looking(self) -> None:
        while True:
            try:
                found = {**await run_in_threadpool(self._look), "trouble": ""}
            except ZeroError as error:
                found = {"trouble": f"The page shows the job as it was: {error}"}
            except Exception as error:  # records that nobody expected
                # The page goes on, and must not look current.
                _log.exception("the job cannot be shown")
                found = {"trouble": f"The page shows the job as it was: internal error, {error!r}"}
            async with self._changed:
                self._number, self._newest = self._number + 1, found
                self._changed.notify_all()
            await asyncio.sleep(self._every_s)


class Server:
    """The answers to all requests."""

    def __init__(self, look: Callable[[], Json], token: str, acts: Mapping[str, Act]) -> None:
        """Nothing is opened; `look` is that of `Feed`; whoever knows the token may act."""
        self._look = look
        self._token = token.encode()
        self._acts = acts
        self._feed = Feed(look)

    def app(self, names: Collection[str]) -> Starlette:
        """The application; `names`: those under which browsers may reach it, beside addresses."""
        routes = [Route("/", self._page), Route("/stream", self._stream)]
        for name, act in self._acts.items():
            routes.append(Route(f"/{name}", self._acting(act), methods=["POST"]))
        guards = [
            Middleware(_Headers),
            Middleware(_Names, known={name.lower() for name in names}),
        ]
        return Starlette(routes=routes, middleware=guards)

    async def _page(self, request: Request) -> Response:
        try:
            picture = await run_in_threadpool(self._look)
        except ZeroError as error:
            return PlainTextResponse(f"zero-ctl dashboard: {error}\n", status_code=503)
        return HTMLResponse(document.page(picture, live=True))

    async def _stream(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[str]:
            # Closed at once when the browser leaves: the feed counts who watches.
            async with contextlib.aclosing(self._feed.news()) as news:
                async for changed in news:
                    if changed is None:
                        yield ": nothing new\n\n"
                    else:
                        text = json.dumps(changed, separators=(",", ":"), allow_nan=False)
                        yield f"event: picture\ndata: {text}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    def _acting(self, act: Act) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            # Before its body is read: whoever lacks the token gets nothing else done.
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind != "Bearer" or not hmac.compare_digest(given.encode(), self._token):
                await asyncio.sleep(WRONG_S)  # whoever guesses is slow
                return _said(
                    403, "The token is wrong; zero-ctl dashboard has printed the right one."
                )
            asked = await _body(request)
            if asked is None:
                return _said(400, "The request is not a small JSON object of texts.")
            try:
                return _said(200, await run_in_threadpool(act, asked))
            except ZeroError as error:
                return _said(409, f"Not done: {error}")

        return answer


class _Names:
    """Refuses what asks under a name that is not known; a numeric address is one of this machine.

    DNS rebinding: the page of a stranger asks under a name of its own that leads here.
    """

    def __init__(self, app: ASGIApp, known: Collection[str]) -> None:
        self._app, self._known = app, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        text = (
            f"zero-ctl dashboard: {host!r} is no name of this machine: use its address, or start "
            "the dashboard with --host=NAME\n"
        )
        refused = PlainTextResponse(text, status_code=400)
        await (self._app if self._knows(host) else refused)(scope, receive, send)

    def _knows(self, host: str) -> bool:
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._known or bool(ip_address(name))
        return False


class _Headers:
    """Adds `_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *ours]
            await send(message)

        await self._app(scope, receive, with_headers)


def _said(code: int, sentence: str) -> Response:
    return JSONResponse({"said": sentence}, status_code=code)


async def _body(request: Request) -> dict[str, str] | None:
    """The JSON object of a request, or None if it is something else, or too large."""
    body = b""
    # Not read to its end if it is too large: its sender need not know the token.
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return None
    try:
        return decode(dict[str, str], body, "a request")
    except MalformedError:
        return None
