"""Clients that connect and do not send, or do not read: real sockets to a real server."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron_blackmamba.serving.app import create_server
from megatron_blackmamba.serving.connections import Connections
from tests.waiting import wait_until

HEADER, READ = 0.8, 1.2
GET = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n"


async def application(scope, receive, send):
    """Answer at once, slowly, or with more than a client's buffers take."""
    assert scope["type"] == "http"  # it has no lifespan
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * HEADER)
    for _ in range(1000 if scope["path"] == "/large" else 0):
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


@contextmanager
def serving(**limits):
    connections = Connections(HEADER, READ)
    server = create_server(application, connections)
    server.config.limit_concurrency = 25
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield connections, lambda: socket.create_connection(listening.getsockname(), timeout=60)
    finally:
        server.should_exit = True
        thread.join(60)


def answered(connect, path=b"", seconds=60) -> bytes:
    """Return the whole answer to a request."""
    with connect() as client:
        client.sendall(GET % path + b"Connection: close\r\n\r\n")
        return b"".join(iter(lambda: client.recv(2**16), b""))


@pytest.mark.parametrize("sent", [b"", GET % b"", GET % b"" + b"\r\n" + GET % b""], ids=["nothing", "half", "second"])
def test_clients_that_send_no_header_make_way(sent):
    with serving() as (connections, connect):
        clients = [connect() for _ in range(24)]
        for client in clients:
            client.sendall(sent)
        wait_until(lambda: len(connections.open) == 24)
        assert b"503" in answered(connect)
        wait_until(lambda: not connections.open, seconds=30)
        assert b"\r\nend\r\n" in answered(connect)
        for client in clients:
            client.close()


def test_half_header_after_an_answer_is_too_late():
    """uvicorn closes a connection that stays silent, and no longer after its first letter."""
    with serving() as (connections, connect), connect() as client:
        client.sendall(GET % b"" + b"\r\n")
        answer = b""
        while not answer.endswith(b"end\r\n0\r\n\r\n"):
            answer += client.recv(2**16)
        client.sendall(b"G")
        wait_until(lambda: not connections.open, seconds=15)


def test_header_sent_letter_by_letter_is_too_late():
    with serving() as (_, connect), connect() as client:
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < begun + 30:
                client.sendall(b"G")
                time.sleep(HEADER / 20)
        assert time.monotonic() < begun + 15


def test_client_that_reads_nothing_is_cut():
    with serving() as (connections, connect), connect() as client:
        client.sendall(GET % b"large" + b"\r\n")
        wait_until(lambda: connections.open)
        wait_until(lambda: not connections.open, seconds=30)


def test_slow_answers_and_slow_readers_are_served():
    with serving() as (_, connect):
        assert b"\r\nend\r\n" in answered(connect, b"slow")
        with connect() as client:
            client.sendall(GET % b"large" + b"Connection: close\r\n\r\n")
            read, begun = 0, time.monotonic()
            while got := client.recv(2**22):
                read += len(got)
                time.sleep(0.05)
        assert read > 10**8 and time.monotonic() > begun + READ
