"""Time limits of connections, which uvicorn lacks: to send a request's header, to idle, and to read an answer."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 10.0
"""Time that a client has to send the header of a request, once it is connected or answered."""
READ_SECONDS = 60.0
"""Time that a client has to read what was sent, before more is sent or the connection is closed."""


class Connections:
    """The open connections of a server. `protocol` makes one, `watching` tells them which requests are answered."""

    def __init__(self, header_seconds: float = HEADER_SECONDS, read_seconds: float = READ_SECONDS) -> None:
        self.header_seconds, self.read_seconds = header_seconds, read_seconds
        self.open: dict[tuple[str, int], _Connection] = {}

    def protocol(self, **options: Any) -> "_Connection":
        return _Connection(self, **options)

    def watching(self, app: ASGIApp) -> ASGIApp:
        """Return the application, with a connection's limit for headers lifted while it answers."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self.open.get(tuple(scope.get("client") or ()))
            if connection is None:
                await app(scope, receive, send)
                return
            connection.begin_answer()
            try:
                await app(scope, receive, send)
            finally:
                connection.end_answer()

        return watched


class _Connection(asyncio.Protocol):
    """A connection that is cut when its client neither sends a header nor reads in time; uvicorn does all else."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        self.http: asyncio.Protocol = AutoHTTPProtocol(**options)
        self.connections, self.answers = connections, 0
        self.waiting: asyncio.TimerHandle | None = None
        self.reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport, self.place = transport, tuple((transport.get_extra_info("peername") or ("", 0))[:2])
        self.connections.open[self.place] = self
        self._wait()
        self.http.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel(self.waiting, self.reading)
        self.connections.open.pop(self.place, None)  # clients without an address share a place
        self.http.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.http.data_received(data)

    def eof_received(self) -> bool | None:
        return self.http.eof_received()

    def pause_writing(self) -> None:
        """Begin to wait for a client to whom much was sent."""
        self.http.pause_writing()
        self.reading = asyncio.get_running_loop().call_later(self.connections.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self.http.resume_writing()
        self._cancel(self.reading)

    def begin_answer(self) -> None:
        self.answers += 1
        self._cancel(self.waiting)

    def end_answer(self) -> None:
        self.answers -= 1
        if not self.answers and self.connections.open.get(self.place) is self:
            self._wait()

    def _wait(self) -> None:
        self.waiting = asyncio.get_running_loop().call_later(self.connections.header_seconds, self._overdue)

    def _overdue(self) -> None:
        """Close, and later cut a client that does not read the end of its answer either."""
        self.transport.close()
        self.waiting = asyncio.get_running_loop().call_later(self.connections.read_seconds, self.transport.abort)

    @staticmethod
    def _cancel(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()
