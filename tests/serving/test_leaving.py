"""Clients that leave before their answer begins, through the application itself: the moment is then the test's own."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from megatron_blackmamba.serving.app import Settings, create_app
from megatron_blackmamba.serving.job import Written


class Engine:
    """Remembers its jobs and works on none, unless told to answer."""

    def __init__(self, answers=False):
        self.jobs, self.answers = [], answers
        self.tokenizer = SimpleNamespace(encode=lambda text: [1, 2], eod_id=0)

    def submit(self, job):
        self.jobs.append(job)
        if self.answers:
            job.emit(Written(0, "so", finished="length"))

    def cancel(self, job):
        job.cancelled = True


def ask(engine, stream, spec, receive_after, send):
    """Call the application as a server of this ASGI version does."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    body = json.dumps({"prompt": "a state", "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await receive_after()

    async def answered():
        await asyncio.wait_for(create_app(engine, Settings("tiny"))(scope, receive, send), 120)

    asyncio.run(answered())


async def left():
    return {"type": "http.disconnect"}


async def stays():
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_client_gone_before_the_answer_cancels(stream):
    engine = Engine()

    async def send(message):
        await asyncio.sleep(0)  # the stream ends here, before its first event

    ask(engine, stream, "2.3", left, send)
    assert [job.cancelled for job in engine.jobs] == [True]


def test_failing_first_write_cancels_the_job():
    engine = Engine()

    async def send(message):
        raise OSError("the connection is closed")

    with pytest.raises(Exception, match=r"^$"):  # starlette's ClientDisconnect, which the server drops
        ask(engine, True, "2.4", stays, send)
    assert [job.cancelled for job in engine.jobs] == [True]


def test_a_finished_stream_ends_its_job():
    engine, sent = Engine(answers=True), []

    async def send(message):
        sent.append(message.get("body", b""))

    ask(engine, True, "2.3", stays, send)
    assert b"".join(sent).endswith(b"data: [DONE]\n\n")
    assert [job.cancelled for job in engine.jobs] == [True]
