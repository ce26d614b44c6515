"""The endpoint as clients meet it: over HTTP, with the openai package and with plain requests."""

import contextlib
import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from urllib.request import urlopen

import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.inference import Sampling
from megatron_blackmamba.serving.completion import CompletionRequest, Limits, Refused, accept, parse
from tests.docs.session import ROOT
from tests.pages import check_page
from tests.reference import forward, tiny
from tests.serving.conftest import serve

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
TEXTS = ["a state", "so", "what then, they said"]


@pytest.fixture(scope="module")
def guarded(generator):
    """A server that asks for a key."""
    with serve(generator, "secret") as running:
        yield running


def wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_same_seed_gives_the_text_of_generate(running, folder):
    command = ["generate", str(folder), "-p", "a state", "-n", "3", "--seed", "7", "--max-new-tokens", "30", "--json"]
    expected = [answer["text"] for answer in json.loads(CliRunner().invoke(app, command).stdout)]
    answer = running.complete("a state", n=3, seed=7, max_tokens=30)
    assert [choice["text"] for choice in answer["choices"]] == expected


def test_openai_client_gets_models_and_streams(running, generator):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        asked = {"model": model.id, "prompt": TEXTS, "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**asked)
        texts = [""] * len(TEXTS)
        for event in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            for choice in event.choices:
                texts[choice.index] += choice.text
        with pytest.raises(openai.BadRequestError, match="base model"):
            client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "hello"}])
    assert texts == [choice.text for choice in whole.choices] == generator.generate_batch(TEXTS, max_new_tokens=12)
    assert event.usage == whole.usage
    assert whole.usage.prompt_tokens == sum(len(generator.tokenizer.encode(text)) for text in TEXTS)
    assert whole.usage.completion_tokens == 36


def test_openai_client_validates_every_answer(running):
    """The client takes any JSON; its types, applied strictly, do not."""
    openai = pytest.importorskip("openai")
    from openai.types import Completion, Model

    with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client:
        listed = json.loads(client.models.with_raw_response.list().text)["data"]
        (model,) = (Model.model_validate(each, strict=True) for each in listed)
        one = client.models.with_raw_response.retrieve(model.id)
        assert Model.model_validate_json(one.text, strict=True) == model
        asked = {"model": model.id, "prompt": "a state", "max_tokens": 4, "logprobs": 2, "n": 2, "temperature": 0}
        whole = client.completions.with_raw_response.create(**asked)
        choices = Completion.model_validate_json(whole.text, strict=True).choices
        texts, ends = ["", ""], [None, None]
        for event in client.completions.create(**asked, stream=True):
            for choice in event.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason
    assert [choice.text for choice in choices] == texts
    assert [choice.finish_reason for choice in choices] == ends == ["length", "length"]
    assert [len(choice.logprobs.token_logprobs) for choice in choices] == [4, 4]


@pytest.mark.parametrize(
    "error, field, request_of",
    [
        ("NotFoundError", "model", lambda client: client.models.retrieve("gpt-5")),
        ("NotFoundError", "model", lambda client: client.completions.create(model="gpt-5", prompt="a")),
        ("NotFoundError", None, lambda client: client.embeddings.create(model="tiny", input="a")),
        ("BadRequestError", "prompt", lambda client: client.completions.create(model="tiny", prompt="a " * 50_000)),
        ("BadRequestError", "best_of", lambda client: client.completions.create(model="tiny", prompt="a", best_of=2)),
        ("AuthenticationError", None, lambda client: client.with_options(api_key="wrong").models.list()),
    ],
    ids=["another model", "no such model", "no such endpoint", "too long", "not supported", "wrong key"],
)
def test_openai_client_raises_its_own_errors(guarded, error, field, request_of):
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{guarded.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
    with client, pytest.raises(getattr(openai, error)) as raised:
        request_of(client)
    assert raised.value.type == "invalid_request_error" and raised.value.param == field


def test_python_block_of_the_page_runs(running, capsys):
    pytest.importorskip("openai")
    (code,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs/generation.md").read_text(), re.DOTALL | re.MULTILINE)
    assert "127.0.0.1:8000" in code
    names = {}
    exec(code.replace("127.0.0.1:8000", f"127.0.0.1:{running.port}"), names)
    names["client"].close()
    assert capsys.readouterr().out == names["answer"].choices[0].text + "\n"


def test_fifty_requests_at_once_answer_as_alone(running):
    requests = [{"prompt": TEXTS[i % 3], "seed": i, "max_tokens": 5 + i, "temperature": 3.0} for i in range(50)]
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(lambda options: running.complete(**options), requests))
    for options, answer in zip(requests[::7], together[::7], strict=True):
        assert answer["choices"] == running.complete(**options)["choices"]
    wait(lambda: running.engine.running == 0)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_disconnected_client_frees_its_row(running, stream):
    body = json.dumps({"prompt": "a state", "max_tokens": 10**9, "temperature": 0, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    head += f"\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        wait(lambda: running.engine.batches)
        row = running.engine.batches[0].rows[0]
        assert not stream or b"200 OK" in connection.recv(200)
    wait(lambda: running.engine.running == 0)
    assert row.job.cancelled
    assert row.written < 10**9


@pytest.mark.parametrize(
    "body, status, told",
    [
        (b'{"prompt": "a', 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        (b'{"prompt": "\\ud800"}', 400, "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b"[" * 100_000, 400, "JSON"),
        (b" " * 2**20 + b"{}", 413, "larger"),
        ({"prompt": "a " * 50_000}, 400, "100000 tokens; at most 20000"),
        ({"prompt": [1, 64]}, 400, "token id 64"),
        ({"prompt": [1] * 10_000, "n": 3, "echo": True}, 400, "30000 tokens, counted n=3 times for echo"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ["a"] * 65}, 400, "at most 64"),
        ({"prompt": "a", "max_tokens": 10**10}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "needs echo"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "stop": ""}, 400, "stop"),
        ({"prompt": "a", "colour": "red"}, 400, "colour"),
        ({"prompt": "a", "logit_bias": {"5": 3}}, 400, "logit_bias"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "tiny"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_bad_request_is_refused(running, body, status, told):
    answered, answer = running.ask("/v1/completions", body)
    assert answered == status
    assert told in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300
    assert running.ask("/health")[1]["status"] == "ok"


def test_other_methods_types_and_hosts_are_refused(running):
    assert running.ask("/v1/completions")[0] == 405
    assert running.ask("/nowhere")[0] == 404
    assert running.ask("/v1/completions", b"{}", Content_Type="text/plain")[0] == 415
    assert running.ask("/v1/models", Host="evil.example:80")[0] == 421
    assert running.ask("/v1/models", Host="[::1]:80")[0] == 200


def test_an_html_parser_reads_the_page(running):
    parts = frozenset({"/page.css", "/page.js"})
    for path in ("/", *parts):
        with urlopen(f"http://127.0.0.1:{running.port}{path}") as answer:
            content = answer.read().decode()
        if path == "/":
            check_page(content, own=parts)


def test_probabilities_and_experts_are_the_reference_s(running, generator):
    choice = running.complete("a state", max_tokens=6, temperature=0, echo=True, logprobs=3, experts=True)["choices"][0]
    tokens = [i for token in choice["logprobs"]["tokens"] for i in generator.tokenizer.encode(token)]
    trace = forward(tiny().weights, tiny().config, tokens)
    logprobs = trace.logits_SV - [[math.log(sum(math.exp(x) for x in row))] for row in trace.logits_SV]
    expected = [logprobs[i, token] for i, token in enumerate(tokens[1:])]
    assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(value, abs=1e-4) for value in expected)]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
    assert best == pytest.approx([row.max() for row in logprobs[:-1]], abs=1e-4)
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert [[one for (one,) in layers] for layers in choice["experts"]] == [
        list(layers) for layers in zip(*(route[:-1] for _, route in sorted(trace.routes.items())), strict=True)
    ]


def test_logprobs_tell_a_generated_end_of_document(running, generator):
    """The last of the prompt's tokens is counted from the end, as lm-eval does."""
    prompt = [33, 7, 54, 19, 60, 29, 42, 55]
    logits_1V = generator.decoder.read(generator.decoder.start(1), torch.tensor([prompt]))
    eod = int(logits_1V.argmax())
    tokenizer = replace(generator.tokenizer, eod_id=eod)
    with serve(replace(generator, tokenizer=tokenizer)) as running:
        asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
        answer = running.complete(prompt, **asked)
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1 and choice["finish_reason"] == "stop"
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert answer["usage"]["completion_tokens"] == 1


def test_a_key_opens_all_but_the_page(guarded):
    with contextlib.closing(HTTPConnection("127.0.0.1", guarded.port, timeout=120)) as connection:
        connection.request("GET", "/v1/models")
        refused = connection.getresponse()
        assert refused.status == 401 and refused.getheader("WWW-Authenticate") == "Bearer"
    assert guarded.ask("/v1/completions", {"prompt": "a"}, Authorization="Bearer wrong")[0] == 401
    assert guarded.ask("/v1/models", Authorization="Bearer secret")[0] == 200
    assert guarded.ask("/health")[0] == 200


def test_the_command_serves_until_interrupted(folder):
    command = [sys.executable, "-m", "megatron_blackmamba", "chat", str(folder), "--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r":(\d+)/$", process.stdout.readline().strip())[1])
            key = process.stdout.readline().split()[-1]
            assert len(key) >= 24
            with socket.create_connection(("127.0.0.1", port)) as connection:
                head = f"GET /v1/models HTTP/1.1\r\nHost: node-1\r\nAuthorization: Bearer {key}\r\nConnection: close"
                connection.sendall(f"{head}\r\n\r\n".encode())
                assert b"200 OK" in connection.recv(100)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert "Traceback" not in errors
    assert process.returncode in (0, 130)


def test_a_port_in_use_is_told_in_words(folder, running):
    from megatron_blackmamba.serving.commands import ServingError

    with pytest.raises(ServingError, match="--port"):
        CliRunner().invoke(app, ["chat", str(folder), "--port", str(running.port)], catch_exceptions=False)


def test_ipv6_addresses_are_listened_on():
    from megatron_blackmamba.serving.commands import _listen

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with _listen("::1", 0) as listening:
        assert listening.family == socket.AF_INET6


def test_generate_and_the_endpoint_have_the_same_options():
    import inspect

    from megatron_blackmamba.inference.commands import generate

    defaults = {name: parameter.default for name, parameter in inspect.signature(generate).parameters.items()}
    fields = {name: field.default for name, field in CompletionRequest.model_fields.items()}
    for name in Sampling.__dataclass_fields__:
        assert name in fields
        assert name == "seed" or fields[name] == defaults[name]


@pytest.mark.parametrize(("status", "kind"), [(499, "invalid_request_error"), (500, "server_error")])
def test_errors_say_whose_fault_they_are(status, kind):
    assert Refused("no", status).body["error"]["type"] == kind


@pytest.mark.parametrize(("options", "sent"), [(None, False), ({}, False), ({"include_usage": True}, True)])
def test_streams_have_usage_only_on_request(options, sent):
    request = parse(json.dumps({"prompt": [1], "stream": True, "stream_options": options}).encode())
    assert accept(request, None, Limits(), "tiny", None).include_usage is sent


def test_null_means_that_an_option_is_left_out():
    fields = {**dict.fromkeys(CompletionRequest.model_fields), "prompt": "a"}
    assert parse(json.dumps(fields).encode()) == parse(b'{"prompt": "a"}')


@pytest.mark.parametrize("option", ["max_new_tokens", "max_completion_tokens"])
def test_options_of_other_programs_are_answered_with_ours(option):
    with pytest.raises(Refused, match=rf"{option}: unknown option; did you mean max_tokens\?"):
        parse(json.dumps({"prompt": "a", option: 5}).encode())
