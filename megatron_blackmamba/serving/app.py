"""The HTTP side: routes, limits, keys and streaming. The model runs on the engine's thread.

Starlette and uvicorn parse HTTP and notice clients that leave; Python's own http.server does neither safely.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_blackmamba.inference.sampling import GenerationError
from megatron_blackmamba.serving.completion import Completion, Limits, Refused, accept, parse, require_model
from megatron_blackmamba.serving.connections import Connections
from megatron_blackmamba.serving.engine import Busy, Engine, Stopped
from megatron_blackmamba.serving.job import Failed, Written

BODY_SECONDS = 60
"""Time that a client has to send a request."""
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
OPEN = {*PAGE, "/health"}
"""Paths that need no key: they tell nothing about the model."""


@dataclass(frozen=True)
class Settings:
    """How the server treats requests. `hosts`: names in a Host header that it answers; None answers all."""

    model: str
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    hosts: frozenset[str] | None = frozenset({"localhost", "127.0.0.1", "[::1]"})


def create_app(engine: Engine, settings: Settings) -> Starlette:
    """Return the application; it starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await run_in_threadpool(engine.stop)

    server = _Server(engine, settings)
    routes = [Route(path, _page(*file)) for path, file in PAGE.items()]
    routes += [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    answers: dict[Any, Callable[..., Any]] = {Refused: _refusal, HTTPException: _http_error, Exception: _failure}
    guard = Middleware(Guard, settings=settings)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=answers, lifespan=lifespan)


def create_server(app: ASGIApp, connections: Connections | None = None) -> uvicorn.Server:
    """Return the HTTP server; `run(sockets=[...])` serves until a signal or `should_exit`."""
    connections = connections or Connections()
    config = uvicorn.Config(
        connections.watching(app),
        http=connections.protocol,  # type: ignore[arg-type]
        proxy_headers=False,  # a header cannot make a client another one
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=512,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


class Guard:
    """Refuses requests with another Host, against pages that rebind their name to this address, or without the key."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request here; pass on any other."""
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await JSONResponse(refusal.body, refusal.status, refusal.headers)(scope, receive, send)

    def _refusal(self, request: Request) -> Refused | None:
        host = request.headers.get("host", "").lower()
        name = host[: host.rfind(":")] if host.rfind(":") > host.rfind("]") else host
        if self.settings.hosts is not None and name not in self.settings.hosts:
            return Refused(f"the Host header names {name!r}, which is not this server", status=421)
        key = self.settings.api_key
        if key is None or request.url.path in OPEN:
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return None
        return Refused("no valid key. Send the header Authorization: Bearer KEY", 401, **{"WWW-Authenticate": "Bearer"})


class _Server:
    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings

    async def health(self, request: Request) -> Response:
        told = {"running": self.engine.running, "waiting": len(self.engine.waiting)}
        if not self.engine.works:
            return JSONResponse({"status": "stopped", **told}, 503)
        return JSONResponse({"status": "ok", **told})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        require_model(request.path_params["model"], self.settings.model)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        config, limits = self.engine.decoder.config, self.settings.limits
        routed = [i for i, how in enumerate(self.engine.decoder.how) if how.routes]
        described = {
            "pattern": config.pattern,
            "routed_layers": routed,
            "experts": config.experts if routed else 0,
            "max_prompt_tokens": limits.prompt_tokens,
            "max_tokens": limits.new_tokens,
        }
        model = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "local"}
        return model | {"blackmamba": described}

    async def chat(self, request: Request) -> Response:
        raise Refused("this is a base model without a chat format: it continues text. Use /v1/completions")

    async def completions(self, request: Request) -> Response:
        body = await _body(request, self.settings.limits.body_bytes)
        pieces: asyncio.Queue[Written | Failed] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(piece: Written | Failed) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def accepted() -> Completion:
            asked, tokenizer = parse(body), self.engine.tokenizer
            return accept(asked, tokenizer, self.settings.limits, self.settings.model, emit)

        completion = await run_in_threadpool(accepted)
        try:
            self.engine.submit(completion.job)
        except GenerationError as error:
            raise Refused(str(error), field="prompt") from None
        except Busy:
            raise Refused("too many requests wait. Try again later", status=429, **{"Retry-After": "5"}) from None
        except Stopped:
            raise Refused("the server has stopped to generate; see its log", status=503) from None
        if not completion.stream:
            return await self._whole(request, completion, pieces)
        return _Streamed(_events(completion, pieces), lambda: self.engine.cancel(completion.job))

    async def _whole(self, request: Request, completion: Completion, pieces: "asyncio.Queue[Any]") -> Response:
        collected = asyncio.ensure_future(_collect(completion, pieces))
        left = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((collected, left), return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                return Response(status_code=499)
            whole = await collected
            return await run_in_threadpool(lambda: JSONResponse(completion.whole(whole)))
        finally:
            self.engine.cancel(completion.job)
            collected.cancel()
            left.cancel()


class _Streamed(StreamingResponse):
    """Server-sent events, with a call for when the answer is over, however early."""

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. If the client has left already, they never start: only this call is sure to end."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


async def _events(completion: Completion, pieces: "asyncio.Queue[Any]") -> AsyncIterator[str]:
    """Yield server-sent events."""

    def chunk(piece: Written) -> str:
        return _event(completion.chunk(piece))

    try:
        async for piece in _pieces(completion, pieces):
            is_prompt = len(piece.tokens) > 1  # and perhaps long
            yield await run_in_threadpool(chunk, piece) if is_prompt else chunk(piece)
        if completion.include_usage:
            yield _event(completion.last_chunk())
        yield "data: [DONE]\n\n"
    except Refused as failure:
        yield _event(failure.body)


async def _pieces(completion: Completion, pieces: "asyncio.Queue[Any]") -> AsyncIterator[Written]:
    """Yield pieces until every row has ended."""
    open_rows = completion.job.rows
    while open_rows:
        piece = await pieces.get()
        if isinstance(piece, Failed):
            raise Refused(piece.message, status=500)
        completion.count(piece)
        open_rows -= piece.finished is not None
        yield piece


async def _collect(completion: Completion, pieces: "asyncio.Queue[Any]") -> list[Written]:
    return [piece async for piece in _pieces(completion, pieces)]


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, limit: int) -> bytes:
    """Read the body, as JSON and at most `limit` bytes.

    Another content type is refused: a browser sends JSON to another site only after asking, and is not answered.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise Refused("the body is JSON. Send the header Content-Type: application/json", status=415)
    parts, size = [], 0
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise Refused(f"the body is larger than {limit} bytes", status=413)
                parts.append(part)
    except TimeoutError:
        raise Refused("the body did not arrive in time", status=408) from None
    except ClientDisconnect:
        raise Refused("the client left", status=499) from None
    return b"".join(parts)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"


def _page(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (resources.files("megatron_blackmamba.serving") / "page" / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return answer


async def _refusal(request: Request, error: Refused) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    refused = Refused(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(refused.body, error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse(Refused("the server failed; see its log", status=500).body, 500)
