"""Memory of `blackmamba chat` under load: many clients, clients that disconnect, and requests that are refused.

    python -m benchmarks.serving_load MODEL [--rounds 6] [--clients 50]

First come three hostile requests: a prompt of 100,000 words, malformed JSON, and a prompt of 20,000 words, which may be
within the limit. Each round then sends `--clients` requests at once, opens twenty streams that are dropped after their
first bytes, and waits until the server is idle. It prints the server's resident memory behind each round, and fails if
the last round has more than the second by 5 % or more. Linux only: it reads /proc.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._common import cpu_model

DROPPED = 20
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


class Server:
    """`blackmamba chat` on a free port."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "megatron_blackmamba", "chat", model, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r":(\d+)/", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        self.port = int(found[1])

    def ask(self, body: bytes) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def complete(self, prompt: str, **options: Any) -> tuple[int, Any]:
        return self.ask(json.dumps({"prompt": prompt, **options}).encode())

    def drop(self, number: int) -> None:
        """Start a long stream and leave after its first bytes."""
        body = json.dumps({"prompt": "def f(", "max_tokens": 4000, "stream": True, "seed": number}).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(HEAD.format(len(body)).encode() + body)
            connection.recv(500)

    def wait_until_idle(self) -> None:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=600) as answer:
                state = json.load(answer)
            if not state["running"] and not state["waiting"]:
                return
            time.sleep(0.05)

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        return int(resident[1]) / 1e3


def hostile(server: Server) -> None:
    requests = {
        "prompt of 100,000 words": json.dumps({"prompt": "word " * 100_000, "max_tokens": 3}).encode(),
        "malformed JSON": b'{"prompt": ',
        "prompt of 20,000 words": json.dumps({"prompt": "word " * 20_000, "max_tokens": 3}).encode(),
    }
    for name, body in requests.items():
        status, answer = server.ask(body)
        told = answer["error"]["message"] if status != 200 else f"{answer['usage']['prompt_tokens']} tokens read"
        print(f"{name}: status {status}, {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    server, memory = Server(options.model), []
    try:
        hostile(server)
        print(f"\n{cpu_model()}\n\n| round | statuses | seconds | resident MB |\n|---:|---|---:|---:|")
        for number in range(1, options.rounds + 1):
            start = time.monotonic()
            with ThreadPoolExecutor(options.clients) as pool:
                prompts = [f"def f{i}" for i in range(options.clients)]
                answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=40)[0], prompts))
                list(pool.map(server.drop, range(DROPPED)))
            server.wait_until_idle()
            memory.append(server.megabytes())
            statuses = ", ".join(map(str, sorted(set(answers))))
            print(f"| {number} | {statuses} | {time.monotonic() - start:.1f} | {memory[-1]:.0f} |", flush=True)
    finally:
        server.process.terminate()
        server.process.wait(60)
    if memory[-1] > 1.05 * memory[min(1, len(memory) - 1)]:
        raise SystemExit("memory grows")


if __name__ == "__main__":
    main()
