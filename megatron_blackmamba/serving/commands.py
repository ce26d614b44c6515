"""`blackmamba chat`."""

import ipaddress
import os
import secrets
import socket
from typing import Annotated

import typer

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.progress import working
from megatron_blackmamba.inference.commands import Device, Dtype, ModelPath, TokenizerFile

KEY = "BLACKMAMBA_API_KEY"


class ServingError(ValueError):
    """A server that cannot start as asked."""


def chat(
    model: ModelPath,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model.", show_default="its folder's")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Maximum number of texts generated at once.")] = 64,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of prompt tokens per request; with echo, times n.")
    ] = 32_768,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens per text.")] = 4_096,
    dtype: Dtype = None,
    device: Device = None,
    tokenizer: TokenizerFile = None,
) -> None:
    """Serve a model on this machine: a page to try it, and an endpoint for OpenAI's clients.

    Requests need a key if BLACKMAMBA_API_KEY is set, or if --host is reachable from other machines.

    [dim]blackmamba chat runs/quickstart/quickstart[/dim]

    [dim]blackmamba chat exports/blackmamba_1.5b --port 8080 --max-rows 16[/dim]
    """
    try:
        from megatron_blackmamba.serving.app import Settings, create_app, create_server
    except ImportError:
        raise ServingError("starlette or uvicorn is missing: pip install -e '.[chat]'") from None
    from megatron_blackmamba.inference import load
    from megatron_blackmamba.interchange.commands import torch_dtype
    from megatron_blackmamba.serving.completion import Limits
    from megatron_blackmamba.serving.engine import Engine

    listening = _listen(host, port)
    with working(f"loading {model}"):
        generator = load(model, dtype=torch_dtype(dtype), device=device, tokenizer=tokenizer)
    engine = Engine(generator, max_rows=max_rows)
    local = is_loopback(host)
    key = os.environ.get(KEY) or (None if local else secrets.token_urlsafe(24))
    limits = Limits(prompt_tokens=max_prompt_tokens, new_tokens=max_new_tokens, rows=max_rows)
    hosts = Settings("").hosts if local else None
    called = name or model.resolve().name
    app = create_app(engine, Settings(called, limits, key, None if hosts is None else hosts | {host}))
    shown = f"[{host}]" if ":" in host else host
    print(f"{called}: http://{shown}:{listening.getsockname()[1]}/", flush=True)
    if key and not os.environ.get(KEY):
        print(f"key of this session: {key}", flush=True)
    create_server(app).run(sockets=[listening])
    interrupts.leave()  # the server closes its connections and returns after SIGINT only


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    """Return the listening socket, before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        advice = "Choose another with --port, or 0 for a free one" if port else "Check --host"
        raise ServingError(f"cannot listen on {host}, port {port}: {error.strerror or error}. {advice}") from None
