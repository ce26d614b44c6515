"""`POST /v1/completions`: what a request may say, and the answers in the form of OpenAI's API."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError, model_validator

from megatron_blackmamba.inference import Sampling
from megatron_blackmamba.inference.sampling import GenerationError
from megatron_blackmamba.serving.job import Experts, Job, Token, Written
from megatron_blackmamba.tokenizer import Tokenizer

T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]
"""A list whose check ends at its first wrong item: the errors of a long one take a gigabyte."""


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, field: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.field, self.headers = status, field, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": None}}


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for."""

    prompt_tokens: int = 32_768
    new_tokens: int = 4_096
    rows: int = 64
    body_bytes: int = 1 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, content: Any) -> Any:
        """Take null for an option that is left out, as OpenAI does."""
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


class StreamOptions(_Strict):
    include_usage: StrictBool = False


class CompletionRequest(_Strict):
    """OpenAI's options, and the sampling options and defaults of `blackmamba generate`."""

    model: StrictStr | None = None
    prompt: StrictStr | List[StrictStr] | List[StrictInt] | List[List[StrictInt]]
    n: StrictInt = Field(default=1, ge=1, le=2**31)
    max_tokens: StrictInt = Field(default=128, ge=0)
    stop: StrictStr | List[StrictStr] | None = None
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: StrictInt = Field(default=0, ge=0, le=2**31)
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: StrictInt | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    logprobs: StrictInt | None = Field(default=None, ge=0, le=20)
    echo: StrictBool = False
    experts: StrictBool = False
    user: Any = None

    # Known to OpenAI's clients, and refused unless they ask for nothing.
    best_of: StrictInt | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    suffix: StrictStr | None = None

    def refuse_unsupported(self) -> None:
        """Refuse what this server cannot do, rather than ignore it."""
        asked = {
            "best_of": self.best_of not in (None, self.n),
            "frequency_penalty": bool(self.frequency_penalty),
            "presence_penalty": bool(self.presence_penalty),
            "logit_bias": bool(self.logit_bias),
            "suffix": bool(self.suffix),
        }
        for name, wanted in asked.items():
            if wanted:
                raise Refused(f"{name} is not supported. Leave it out", field=name)


def parse(body: bytes) -> CompletionRequest:
    """Read a request's body, or refuse it by the field that is wrong."""
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = str(first["loc"][0]) if first["loc"] else None
        where = f"{place[:80]}: " if place else ""
        said = (
            _unknown(place) if place and first["type"] == "extra_forbidden" and len(first["loc"]) == 1 else first["msg"]
        )
        raise Refused(f"{where}{said}", field=place) from None
    request.refuse_unsupported()
    return request


def _unknown(option: str) -> str:
    known = list(CompletionRequest.model_fields)
    close = get_close_matches(option, known, 1)
    return f"unknown option; did you mean {close[0]}?" if close else "unknown option. Leave it out"


@dataclass
class Completion:
    """A request that was accepted, and what its answers have in common."""

    job: Job
    model: str
    seed: int
    stream: bool
    include_usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    new_tokens: int = 0
    offsets: list[int] = field(init=False)
    """Of each row, the characters that were answered so far."""

    def __post_init__(self) -> None:
        self.offsets = [0] * self.job.rows

    def count(self, piece: Written) -> None:
        """Count the tokens of a piece for `usage`."""
        self.new_tokens += piece.written

    def chunk(self, piece: Written) -> dict[str, Any]:
        """Return one piece as a streamed answer."""
        return self._answer([self._choice(piece)])

    def whole(self, pieces: Sequence[Written]) -> dict[str, Any]:
        """Return all pieces as one answer."""
        of_row: list[list[Written]] = [[] for _ in range(self.job.rows)]
        for piece in pieces:
            of_row[piece.row].append(piece)
        choices = []
        for row, own in enumerate(of_row):
            text = "".join(piece.text for piece in own)
            tokens = tuple(token for piece in own for token in piece.tokens)
            experts: tuple[Experts, ...] = tuple(one for piece in own for one in piece.experts)
            choices.append(self._choice(Written(row, text, tokens, experts, finished=own[-1].finished)))
        return self._answer(choices) | {"usage": self.usage}

    def last_chunk(self) -> dict[str, Any]:
        """Return the streamed answer that has the usage and no text."""
        return self._answer([]) | {"usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens; a prompt counts once for all its samples."""
        prompt = sum(map(len, self.job.prompts))
        new = self.new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return head | {"seed": self.seed, "choices": choices}

    def _choice(self, piece: Written) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.row, "text": piece.text, "finish_reason": piece.finished}
        choice["logprobs"] = None if self.job.logprobs is None else self._logprobs(piece)
        return choice | ({"experts": list(piece.experts)} if self.job.experts else {})

    def _logprobs(self, piece: Written) -> dict[str, Any]:
        offsets = []
        for token in piece.tokens:
            offsets.append(self.offsets[piece.row])
            self.offsets[piece.row] += token.characters
        return {
            "tokens": [token.text for token in piece.tokens],
            "token_logprobs": [token.logprob for token in piece.tokens],
            "top_logprobs": [likeliest(token) for token in piece.tokens],
            "text_offset": offsets,
        }


def likeliest(token: Token) -> dict[str, float] | None:
    """Return the likeliest tokens; of those that read alike, the likeliest."""
    found: dict[str, float] = {}
    for text, logprob in token.top:
        found.setdefault(text, logprob)
    return found or None


def require_model(asked: str | None, model: str) -> None:
    """Refuse a request for another model than the server's; None asks for the one there is."""
    if asked not in (None, model):
        raise Refused(f"no model {asked!r} here; this server has {model!r}", status=404, field="model")


def accept(request: CompletionRequest, tokenizer: Tokenizer, limits: Limits, model: str, emit: Any) -> Completion:
    """Tokenize the prompts and check the limits."""
    require_model(request.model, model)
    if request.max_tokens > limits.new_tokens:
        raise Refused(f"max_tokens is {request.max_tokens}; at most {limits.new_tokens}", field="max_tokens")
    if request.max_tokens == 0 and not request.echo:
        raise Refused("max_tokens is 0, which needs echo", field="max_tokens")
    stop = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    if not all(stop) or len(stop) > 16:
        raise Refused("stop is at most 16 strings, none of them empty", field="stop")
    given = _listed(request.prompt)
    if not given:
        raise Refused("prompt is an empty list. Give at least one", field="prompt")
    if len(given) * request.n > limits.rows:
        raise Refused(f"{len(given)} prompts times n={request.n}: at most {limits.rows} texts", field="n")
    encoded = (tokenizer.encode(one) if isinstance(one, str) else one for one in given)
    prompts = [ids or [tokenizer.eod_id] for ids in encoded]
    tokens = sum(map(len, prompts)) * (request.n if request.echo else 1)
    if tokens > limits.prompt_tokens:
        times = f", counted n={request.n} times for echo" if request.echo and request.n > 1 else ""
        raise Refused(f"the prompt has {tokens} tokens{times}; at most {limits.prompt_tokens}", field="prompt")
    seed = secrets.randbits(31) if request.seed is None else request.seed
    filters = (request.top_k, request.min_p, request.repetition_penalty)
    try:
        sampling = Sampling(request.temperature, request.top_p, seed, *filters)
    except GenerationError as error:
        raise Refused(str(error)) from None
    job = Job(
        prompts,
        sampling,
        request.max_tokens,
        emit,
        samples=request.n,
        stop=stop,
        logprobs=request.logprobs,
        echo=request.echo,
        experts=request.experts,
    )
    usage = request.stream_options is not None and request.stream_options.include_usage
    return Completion(job, model, seed, request.stream, usage)


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """Return the prompts of a request, each a text or token ids."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
