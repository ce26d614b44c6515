"""Continuous batching: rows join and leave the batch of a recurrent decoder between any two steps.

A turn reads one piece of one waiting prompt, then takes every running row one token further. A long prompt therefore
delays the others by one piece at a time, and prompts take turns.

Shapes: B batch, L tokens, V vocabulary, K experts of a token.
"""

import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_blackmamba.inference import Generator, State
from megatron_blackmamba.inference.captured import Captured, Step, captures, graphs_of, likeliest, stepper
from megatron_blackmamba.inference.sampling import GenerationError, next_tokens
from megatron_blackmamba.serving.job import Experts, Failed, Job, Row, Token, Written, rows_of, told_tokens
from megatron_blackmamba.tokenizer import Tokenizer

READ_ALONE, READ_BESIDE = 512, 128
"""Prompt tokens of a piece, while nothing else runs and beside running rows."""


class Busy(Exception):
    """Too many jobs wait."""


class Stopped(Exception):
    """The engine takes no jobs any more."""


@dataclass
class Reading:
    """A prompt that is being read, for the rows that continue it."""

    rows: list[Row]
    prompt: Sequence[int]
    state: State
    done: int = 0
    tokens: list[Token] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    last_V: Tensor | None = None
    """The logits after the last token read."""

    @property
    def job(self) -> Job:
        return self.rows[0].job


@dataclass
class Batch:
    """Rows that step together; row i is sequence i of the state."""

    rows: list[Row]
    state: State
    step: Step | None = None
    """Takes the state further, once the rows have stepped together."""

    def settled(self) -> State:
        """Return the state after the last step."""
        return self.step.settled() if isinstance(self.step, Captured) else self.state


class Engine:
    """Decodes the jobs of all clients on a thread of its own, which alone touches the model."""

    def __init__(self, generator: Generator, *, max_rows: int = 64, max_waiting: int = 256):
        if generator.tokenizer is None:
            raise GenerationError("this model has no tokenizer. Name one with --tokenizer FILE")
        self.generator, self.decoder = generator, generator.decoder
        self.tokenizer: Tokenizer = generator.tokenizer
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.waiting: deque[Job] = deque()
        self.reading: deque[Reading] = deque()
        self.batches: list[Batch] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work on jobs."""
        if captures(self.decoder):
            graphs_of(self.decoder).reserve(self.max_rows)
        self._thread.start()

    def stop(self) -> None:
        """End after the current turn; jobs that are not finished fail."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Queue a job, or raise `Busy` or `Stopped`."""
        self.generator.check(job.prompts)
        with self._changed:
            if self._stopping:
                raise Stopped
            if len(self.waiting) >= self.max_waiting:
                raise Busy
            self.waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Drop a job that nobody waits for any more; its rows leave before the next step."""
        job.cancelled = True
        with self._changed:
            self._changed.notify()

    @property
    def works(self) -> bool:
        """Return whether jobs that are submitted now are worked on."""
        return self._thread.is_alive() and not self._stopping

    @property
    def running(self) -> int:
        """Number of rows that are read or written now."""
        reading, batches = tuple(self.reading), tuple(self.batches)
        return sum(len(one.rows) for one in reading) + sum(len(batch.rows) for batch in batches)

    def _run(self) -> None:
        try:
            self._work()
        finally:  # however it ends, nobody waits for an answer that does not come
            with self._changed:
                self._stopping = True
            for job in {*self.waiting, *self._begun()}:
                job.emit(Failed("the server is shutting down"))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self.waiting or self.reading or self.batches)
                if self._stopping:
                    break
                self._admit()
            if not self._guarded(self._begun(), self._turn):
                self.reading.clear()
                self.batches.clear()

    def _begun(self) -> list[Job]:
        """Return the jobs that are read or written now, once for each prompt or row."""
        return [*(one.job for one in self.reading), *(row.job for batch in self.batches for row in batch.rows)]

    def _admit(self) -> None:
        """Start to read the prompts of waiting jobs while their rows fit. Call it with the lock: clients add jobs."""
        self.waiting = deque(job for job in self.waiting if not job.cancelled)
        while self.waiting and self.running + self.waiting[0].rows <= self.max_rows:
            job = self.waiting.popleft()
            self._guarded([job], self._open, job)

    def _open(self, job: Job) -> None:
        weights = self.decoder.weights
        rows = rows_of(job, self.tokenizer, weights.embedding_VD.shape[0], weights.device)
        for number, prompt in enumerate(job.prompts):
            own = rows[number * job.samples : (number + 1) * job.samples]
            self.reading.append(Reading(own, prompt, self.decoder.start(1)))

    def _turn(self) -> bool:
        """Drop cancelled rows, read one piece of a prompt, and take every row one token further. Return True."""
        self.reading = deque(one for one in self.reading if not one.job.cancelled)
        self.batches = [left for batch in self.batches if (left := self._without_cancelled(batch)).rows]
        if self.reading:
            one = self.reading.popleft()
            if self._guarded([one.job], self._read, one):
                self.reading.append(one)
        for batch in self.batches:
            if not self._guarded([row.job for row in batch.rows], self._step, batch):
                batch.rows = []
        self.batches = [batch for batch in self.batches if batch.rows]
        return True

    def _guarded(self, jobs, work, *arguments) -> bool:
        """Return what the work returns; if it fails, so do its jobs, and the engine goes on."""
        try:
            return work(*arguments)
        except Exception as error:
            if not isinstance(error, GenerationError):
                traceback.print_exc()
            for job in set(jobs):
                job.cancelled = True
                job.emit(Failed(str(error) if isinstance(error, GenerationError) else "the server failed; see its log"))
            return False

    def _without_cancelled(self, batch: Batch) -> Batch:
        return self._kept(batch, [not row.job.cancelled for row in batch.rows])

    def _kept(self, batch: Batch, keep: list[bool]) -> Batch:
        if all(keep):
            return batch
        index = torch.tensor([i for i, kept in enumerate(keep) if kept], device=batch.state.last_B.device)
        rows = [row for row, kept in zip(batch.rows, keep, strict=True) if kept]
        return Batch(rows, batch.settled().rows(index.long()))

    def _read(self, one: Reading) -> bool:
        """Read one piece of a prompt; behind its last, write the first tokens. Return whether some of it is left."""
        job, size = one.job, READ_BESIDE if self.batches else READ_ALONE
        piece = list(one.prompt[one.done : one.done + size])
        choices: list[Tensor] | None = [] if job.experts else None
        tokens_1L = torch.tensor([piece], device=self.decoder.weights.device)
        stream_LD = self.decoder.stream(one.state, tokens_1L, choices=choices)[0]
        one.experts += [] if choices is None else experts_of([choice[0] for choice in choices])
        tell = job.echo and job.logprobs is not None
        logits_LV = self.decoder.logits_of_stream(stream_LD if tell else stream_LD[-1:])
        if tell:
            assert job.logprobs is not None
            if one.last_V is None:
                text, characters = self.tokenizer.spelled(piece[0], first=True)
                one.tokens.append(Token(text, None, characters=characters))
                before_LV, behind = logits_LV[:-1], piece[1:]
            else:
                before_LV, behind = torch.cat([one.last_V[None], logits_LV[:-1]]), piece
            one.tokens += told_tokens(before_LV, behind, job.logprobs, self.tokenizer)
        one.last_V, one.done = logits_LV[-1], one.done + len(piece)
        if one.done < len(one.prompt):
            return True
        self._begin(one)
        return False

    def _begin(self, one: Reading) -> None:
        """Write the first token of each row behind a prompt; the rows that go on join the batch."""
        assert one.last_V is not None
        going_on = []
        tokens = next_tokens([row.sampler for row in one.rows], one.last_V.expand(len(one.rows), -1))
        for row, token in zip(one.rows, tokens, strict=True):
            if row.job.echo:
                row.job.emit(Written(row.number, self.tokenizer.decode(one.prompt), tuple(one.tokens)))
            if row.job.max_new_tokens == 0:
                row.job.emit(Written(row.number, experts=tuple(one.experts), finished="length"))
            elif row.advance(token, one.last_V, self.tokenizer, one.experts):
                going_on.append(row)
        if not going_on:
            return
        if self.decoder.grows:  # sequences of different lengths cannot share a state
            self.batches += [Batch([row], one.state.rows(one.state.last_B.new_zeros(1))) for row in going_on]
            return
        joining = one.state.rows(one.state.last_B.new_zeros(len(going_on)))
        if not self.batches:
            self.batches.append(Batch(going_on, joining))
        else:
            batch = self.batches[0]
            self.batches[0] = Batch([*batch.rows, *going_on], State.joined([batch.settled(), joining]))

    def _step(self, batch: Batch) -> bool:
        """Take every row one token further; the rows that end leave. Return True."""
        tokens_B = torch.tensor([row.last for row in batch.rows], device=self.decoder.weights.device)
        choices: list[Tensor] | None = [] if any(row.job.experts for row in batch.rows) else None
        best: list[int] | None = None
        if choices is None:
            batch.step = batch.step or stepper(self.decoder, batch.state)
            logits_BV = batch.step(tokens_B)
            best = None if (known_B := likeliest(batch.step)) is None else known_B.tolist()
        else:  # a captured step does not tell them
            logits_BV = self.decoder.step(batch.settled(), tokens_B, choices)
        experts = [] if choices is None else experts_of(choices)
        tokens, keep = next_tokens([row.sampler for row in batch.rows], logits_BV, best), []
        for i, row in enumerate(batch.rows):
            advance = (row.advance, tokens[i], logits_BV[i], self.tokenizer, experts[i : i + 1])
            keep.append(self._guarded([row.job], *advance))
        left = self._kept(batch, keep)
        batch.rows, batch.state, batch.step = left.rows, left.state, left.step
        return True


def experts_of(choices: list[Tensor]) -> list[Experts]:
    """Turn `[L, K]` of each routed layer into the experts of each token."""
    return torch.stack(choices, dim=1).tolist() if choices else []


__all__ = ["Busy", "Engine", "Stopped", "Written"]
