import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from megatron_blackmamba.inference import Generator, load
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.serving.completion import Limits
from megatron_blackmamba.serving.engine import Engine
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer

LIMITS = Limits(prompt_tokens=20_000, new_tokens=10**9, rows=64)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    hf.write(canonical(tiny(), tokenizer=write_tokenizer(folder / "source.json")), folder)
    return folder


@pytest.fixture(scope="session")
def generator(folder) -> Generator:
    torch.set_num_threads(1)
    return load(folder, dtype=torch.float32)


@dataclass
class Running:
    """A server on a free port of this machine."""

    engine: Engine
    port: int

    def ask(self, path, body=None, **headers) -> tuple[int, dict]:
        """Send a request; return the status and the answer."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", content, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt, **options) -> dict:
        """Return the answer to a completion request."""
        status, answer = self.ask("/v1/completions", {"prompt": prompt, **options})
        assert status == 200, answer
        return answer


@contextmanager
def serve(generator: Generator, api_key: str | None = None) -> Iterator[Running]:
    from megatron_blackmamba.serving.app import Settings, create_app, create_server

    engine = Engine(generator, max_rows=LIMITS.rows)
    server = create_server(create_app(engine, Settings("tiny", LIMITS, api_key)))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Running(engine, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)


@pytest.fixture(scope="session")
def running(generator) -> Iterator[Running]:
    with serve(generator) as running:
        yield running
