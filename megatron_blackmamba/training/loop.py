"""A run from its config to its last checkpoint: process groups → model → optimizer → data → steps → save.

Everything a run remembers is in its checkpoints: weights and optimizer as tensors, the rest as the JSON of `state`.
No random number is drawn in a step and the learning rate is a function of the samples consumed, so that is enough to
resume exactly.
"""

import contextlib
import logging
import math
import os
import signal
import time
import warnings
from collections import Counter
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_blackmamba import data as serving
from megatron_blackmamba import model as modelling
from megatron_blackmamba import optimizers
from megatron_blackmamba.checkpoint import Checkpoints, SaveError
from megatron_blackmamba.checkpoint.reading import saved_config
from megatron_blackmamba.config import RunConfig, to_saved, to_yaml
from megatron_blackmamba.formats import atomic, events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.ops import backends
from megatron_blackmamba.registry import extensions
from megatron_blackmamba.runtime import exits, foreign, layout, process, world
from megatron_blackmamba.runtime.parent import die_with_parent
from megatron_blackmamba.runtime.signals import StopRequest
from megatron_blackmamba.runtime.watchdog import Watchdog
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training import headline
from megatron_blackmamba.training.alike import refuse_unlike_data, refuse_unlike_starts
from megatron_blackmamba.training.export_checks import ExportChecks
from megatron_blackmamba.training.exporting import Exporter
from megatron_blackmamba.training.guard import Action, Cause, Guard, Verdict
from megatron_blackmamba.training.kernels import refuse_lost
from megatron_blackmamba.training.lock import Lock
from megatron_blackmamba.training.loggers import Loggers
from megatron_blackmamba.training.metrics import Taken, record
from megatron_blackmamba.training.optimizer import make_trainable
from megatron_blackmamba.training.progress import Progress
from megatron_blackmamba.training.ranks import Ranks
from megatron_blackmamba.training.records import Records
from megatron_blackmamba.training.replicas import Replicas
from megatron_blackmamba.training.rerun import Attempt, run_again
from megatron_blackmamba.training.resume import (
    refuse_changes,
    refuse_start,
    refuse_start_tokenizer,
    refuse_tokenizer,
)
from megatron_blackmamba.training.saving import Saver
from megatron_blackmamba.training.schedule import Schedule, rate_change
from megatron_blackmamba.training.speed import Utilisation
from megatron_blackmamba.training.step import Step, Update
from megatron_blackmamba.training.stragglers import Stragglers
from megatron_blackmamba.training.tracing import Tracing
from megatron_blackmamba.training.validation import validate
from megatron_blackmamba.version import __version__

VOCABULARY_MULTIPLE = 128
"""Vocabularies are often padded to a multiple of this, times the tensor-parallel ranks."""
BAD_STEP = {
    Cause.NOT_FINITE: events.NotFinite,
    Cause.SPIKE: events.Spike,
    Cause.REPLICAS: events.ReplicasDiffer,
    None: events.DeviceFailed,
}


class Outcome(IntEnum):
    """The outcome of a job, as an exit code."""

    DONE = 0
    """The run has consumed its tokens, or has reached training.stop_after_steps."""
    GAVE_UP = exits.GAVE_UP
    """The guard has stopped the run after bad steps."""
    STOPPED_ON_REQUEST = exits.STOPPED_ON_REQUEST
    """A signal, `Trainer.asked_to_stop` or a full disk at the last save has ended it; starting it again resumes."""


def train(config: RunConfig, trainer: type["Trainer"] | None = None) -> Outcome:
    """Start or resume training, by a subclass of Trainer if given, until its end or a request to stop; on all ranks."""
    for package in (r"megatron\.core", r"torch\.distributed"):  # what they warn of is for their developers
        warnings.filterwarnings("ignore", module=package)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    stop = StopRequest()
    try:
        return _train(config, trainer or Trainer, stop)
    finally:
        stop.release()


@process.default_float32()
def _train(config: RunConfig, trainer: type["Trainer"], stop: StopRequest) -> Outcome:
    place = world.find_place()
    if place.launcher == "srun":  # or it would train on, unseen, when slurmstepd dies
        die_with_parent(os.getppid())
    foreign.refuse_missing()
    layout.check(config, place.size)
    optimizers.refuse_missing(config.optimizer)
    refuse_start(config)
    if place.rank == 0:
        with contextlib.suppress(OSError):  # standard output may lie on a full disk
            print(*headline.lines(config, place.size, counted=not dist.is_initialized()), sep="\n", flush=True)
    logs = RunFolder(Path(config.folder) / config.name).logs
    with Watchdog(config.training.guard.hang_seconds, place.rank, place.size, logs) as watchdog:
        everyone = world.start(config.parallel, world.PATIENCE, joined=lambda: refuse_unlike_starts(config))
        outcome = trainer(config, everyone, stop, watchdog).run()
        world.shutdown()
    return outcome


class Trainer:
    """One rank of a run. Its parts are public: a test or an experiment may put its own in their place."""

    def __init__(self, config: RunConfig, world: World, stop: StopRequest, watchdog: Watchdog) -> None:
        self.config, self.world, self.stop, self.watchdog = config, world, stop, watchdog
        refuse_lost(config)
        process.be_deterministic(config.training.deterministic)
        watchdog.alive("building the model")
        self.trainable = make_trainable(config, modelling.build(config, world), world)
        self.progress = Progress()
        watchdog.alive("opening the data")
        self.data = self.open_data()
        refuse_unlike_data(self.data.record)
        self.ranks = Ranks.of(world)
        self.replicas = Replicas(world, self.trainable.model, self.ranks)
        self.stragglers = Stragglers(config.training.guard, self.ranks)
        self.step = Step(config, world, self.trainable, len(self.data.source_names))
        self.schedule = Schedule(config, self.trainable.optimizer)
        self.guard = Guard(config.training.guard)
        self.folder = RunFolder(Path(config.folder) / config.name)
        if world.is_main:
            self.folder.refuse_obstacles()
        self.lock = Lock(self.folder.lock) if world.is_main else None
        self.has_begun = False
        """The run has accepted its config, data and checkpoint."""
        try:
            self._open()
        except BaseException as error:
            self._unlock(error)
            raise

    def _open(self) -> None:
        """Open what needs the locked folder."""
        config, world, watchdog = self.config, self.world, self.watchdog
        self.loggers = Loggers.for_run(config, self.folder, world.is_main)
        model, optimizer = self.trainable.model, self.trainable.optimizer
        self.checkpoints = Checkpoints(self.folder, config, world, model, optimizer, self.event, watchdog.alive)
        self.saver = Saver(config.checkpoint, self.checkpoints, self.state, self.event)
        checks = ExportChecks(config.checkpoint.export_check if world.is_main else "none", self.folder, self.event)
        self.exporter = Exporter(config.checkpoint.export_every, self.export, self.is_exported, self.event, checks)
        self.utilisation = Utilisation(config, world.size)
        self.tracing = Tracing(config.training.profile, self.folder.profile, world.rank)
        self.records: Records | None = None
        self.first_sample = self.begun_at = 0
        self.asked_to_stop = False
        """Set this to end the run after the step, with a checkpoint."""
        self.bad_samples: list[tuple[int, int]] = []
        self.rewinds: Counter[int] = Counter()
        self.batches = self.open_batches()
        self.shard_check = self.open_shard_check()

    def run(self) -> Outcome:
        """Train until the run is done, gives up or is asked to stop."""
        try:
            self.begin()
            self.stop.heed(signal.SIGINT)  # before, there is nothing to save
            if self.world.any_rank(self.stop.asked):  # while the model was built or loaded
                return self.end(Outcome.STOPPED_ON_REQUEST)
            while self.progress.step < self.config.last_step(self.progress.step, self.progress.consumed_samples):
                self.watchdog.alive(f"step {self.progress.step + 1}")
                verdict = self.take_step()
                action = self.rewind(verdict.cause) if verdict.action is Action.REWIND else verdict.action
                if action is Action.STOP:
                    return self.end(Outcome.GAVE_UP)
                if self.guard.bad_in_a_row:
                    self.saver.postpone(self.progress.step)
                    self.exporter.postpone(self.progress.step)
                else:
                    self.saver.after_step(self.progress.step)
                    self.exporter.after_step(self.progress.step)
                if self.asked_to_stop:
                    return self.end(Outcome.STOPPED_ON_REQUEST)
            return self.end(Outcome.DONE)
        except BaseException as error:
            self.shard_check.stop()
            self.exporter.close()
            if self.has_begun or not exits.refuses(error):  # a refused run leaves no trace
                self.event(events.Failed(step=self.progress.step, error=type(error).__name__, message=str(error)))
                self.loggers.close()
            self._unlock(error)
            raise

    def begin(self) -> None:
        """Resume from the newest checkpoint, or start from the given weights, or from scratch."""
        newest = self.checkpoints.newest()
        if newest is not None:
            allowed = self.resume(newest)
            self.has_begun = True
            if self.end_of_data != len(self.data.train):  # the batch size changed, or ranges were skipped
                self.data = self.open_data()
            sample, left, tokens = self.progress.next_sample, self.steps_left, self.config.tokens_per_step
            size = {"tokens_per_step": tokens, "processes": self.world.size}
            self.event(events.Resumed(sample=sample, steps_left=left, changes=allowed, **size))
        else:
            weights = self.config.start.from_
            if weights:
                refuse_start_tokenizer(self.config, self.data.record)
                self.checkpoints.load_weights(weights)
            self.has_begun = True
            steps, tokens = self.config.steps, self.config.tokens_per_step
            size = {"tokens_per_step": tokens, "processes": self.world.size}
            multiple = VOCABULARY_MULTIPLE * self.config.parallel.tensor
            unused = self.data.unused_rows(self.config.model.vocab_size, multiple)
            self.event(events.Started(steps=steps, weights_from=weights, unused_rows=unused, **size))
        self.begun_at = self.progress.step
        if reason := layout.routing(self.config, self.world.size):
            self.event(events.RoutingDependsOnLayout(reason=reason))
        self.report_kernels()
        self.loggers.rewind(self.progress.step)
        self.batches = self.open_batches()
        self.shard_check.start()
        self.watchdog.begin()
        process.freeze_gc()
        if self.world.is_main:
            self.folder.requeue.unlink(missing_ok=True)
            self.folder.done.unlink(missing_ok=True)
            self.folder.failed.unlink(missing_ok=True)
            self.records = self.make_records()
            self.records.write()

    def make_records(self) -> Records:
        """Return what the folder says of this start; rank 0 only."""
        assert self.lock
        used = ",".join(extensions())
        needs = f"# trained with BLACKMAMBA_IMPORT={used}\n" if used else ""
        contents = {
            self.folder.config: (needs + to_yaml(self.config)).encode(),
            self.folder.data_plan: atomic.json_bytes(self.data.describe()),
        }
        tokenizer = self.data.record["tokenizer"]
        if tokenizer and tokenizer["file"]:
            contents[self.folder.tokenizer] = Path(tokenizer["file"]).read_bytes()
        return Records(self.lock, contents)

    def report_kernels(self) -> None:
        """On a GPU, record the kernels in use, with a warning if none of this project's can run."""
        if backends.has_gpu():
            self.event(events.Kernels(in_use=backends.in_use(), problem=backends.why_no_triton() or ""))

    def resume(self, step: int) -> list[str]:
        """Take over a checkpoint of this run, or refuse to; returns the changes that were allowed by name."""
        state = self.checkpoints.state(step)
        saved = saved_config(self.folder.checkpoint(step), state)
        self.progress = progress = Progress.restored(state["progress"])  # before a refusal, which is of this step
        allowed = refuse_changes(saved.model_dump(mode="json", by_alias=True), self.config, step)
        refuse_tokenizer(state["data"], self.data.record, step)
        serving.refuse_changed_data(state["data"], self.data.record, progress.next_sample)
        self.checkpoints.load(step)
        self.saver.resumed_at(step)
        self.guard.restore(state["guard"])
        return allowed + rate_change(saved, self.config, step, progress.consumed_samples)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors; called when one is about to be taken."""
        if self.records and (restored := self.records.restore()):
            self.event(events.LoggingProblem(problem=restored))
        self.trainable.settle()
        differing = self.config.training.guard.replicas_every and self.replicas.differing()
        if differing:
            raise SaveError(f"replicas of weights differ: {differing}")
        return {
            "config": to_saved(self.config),
            "progress": self.progress.state(),
            "guard": self.guard.state(),
            "data": self.data.record,
        }

    def export(self, step: int) -> None:
        """Write the weights as they are as a Hugging Face model, every rank its part."""
        from megatron_blackmamba.interchange import live, megatron

        self.watchdog.alive(f"exporting step {step}")
        state, folder = self.state(), self.folder
        live.export(
            self.trainable.model,
            self.world,
            folder.export(step),
            source=f"step {step} of {folder.root}",
            tokenizer=folder.tokenizer if folder.tokenizer.is_file() else None,
            sequence_length=self.config.data.sequence_length,
            past=lambda: megatron.past(self.config, state, step, folder, __version__),
        )

    def is_exported(self, step: int) -> bool:
        """Return whether the export of a step exists."""
        return self.world.any_rank(self.world.is_main and self.folder.export(step).exists())

    @property
    def steps_left(self) -> int:
        """Return the number of steps until the last one."""
        return self.config.steps_left(self.progress.consumed_samples)

    @property
    def end_of_data(self) -> int:
        """Return the index of the sample after the last one of the run, counting skipped samples."""
        return self.progress.end_after(self.steps_left * self.config.training.global_batch)

    def open_data(self) -> serving.DataPlan:
        """Return the training and validation data of the run."""
        model = self.config.model
        return serving.build(
            self.config.data, vocab_size=model.vocab_size, total_samples=self.end_of_data, eod_reset=model.eod_reset
        )

    def open_batches(self) -> serving.BatchStream:
        """Return the micro-batches of this rank from the next sample on."""
        return self._stream(self.progress.next_sample)

    def _stream(self, first: int) -> serving.BatchStream:
        training = self.config.training
        return serving.BatchStream(
            self.data.train,
            start_sample=first,
            global_batch=training.global_batch,
            micro_batch=training.micro_batch,
            dp_rank=self.world.data_rank,
            dp_size=self.world.data_size,
            part=(self.world.context_rank, self.world.parallel.context),
            workers=self.config.data.workers,
            skips=self.progress.passed_over,
        )

    def open_shard_check(self) -> serving.ShardCheck:
        """Start the check of the token shards in the background."""
        return serving.ShardCheck(
            self.data.shards,
            self.folder.verified,
            rank=self.world.rank,
            ranks=self.world.size,
            mb_per_second=self.config.data.verify_rate,
        )

    def take_step(self) -> Verdict:
        """Take one global batch: gradients, a look at the loss, the update, and the record of it all."""
        begun = time.perf_counter()
        self.tracing.before(self.progress.step + 1)
        self.first_sample = self.progress.next_sample
        learning_rate = self.schedule.set(self.progress.consumed_samples)
        attempt, found = self.attempt(), None
        if attempt.problem:
            attempt, found = run_again(attempt, self.attempt_again, self.step.first_seen, self.ranks)
        losses, update = attempt.losses, attempt.update
        verdict = attempt.seen
        if verdict.cause is not Cause.REPLICAS:
            verdict = self.guard.settle(verdict, losses.loss, update.grad_norm)
        verdict = replace(verdict, reason="; ".join(filter(None, [verdict.reason, found])) or None)
        self.asked_to_stop = losses.asked_to_stop
        self.progress.advance(self.batches.position, self.config.training.global_batch)
        traced = self.tracing.after(self.progress.step)
        seconds = time.perf_counter() - begun

        slow = self.stragglers.after_step(losses.computing, losses.reading, seconds)
        validation = self.validate() if self.validation_is_due else {}
        balanced = self.validate(True) if validation and self.config.training.validate_balanced else {}
        self.loggers.step(record(Taken(self, losses, update, learning_rate, seconds, validation, balanced)))
        for event in filter(None, [traced, *slow]):
            self.event(event)
        self.report(verdict)
        return verdict

    def attempt(self) -> Attempt:
        """Run the step: the gradients of the next batch, and the update if nothing speaks against it."""
        losses = self.step.gradients(self.batches, self.stop.asked, self.shard_check.findings)
        self.shard_check.after_step(*losses.shards, self.event)
        if any(self.first_sample <= start < self.batches.position for start in self.data.train.schedule.starts):
            self.guard.forget()  # a phase of the mixture begins, with a loss of its own
        seen = self.guard.look(losses.loss)
        every = self.config.training.guard.replicas_every
        if every and (self.progress.step + 1) % every == 0:
            differing = self.replicas.differing()  # of the weights that these gradients were computed with
            seen = self.guard.replicas_differ(differing) if differing else seen
        update = self.step.update() if seen.action is Action.APPLY else Update(applied=False, grad_norm=math.nan)
        return Attempt(losses, seen, update)

    def attempt_again(self) -> Attempt:
        """Run the same step once more."""
        self.batches.again()
        return self.attempt()

    @property
    def validation_is_due(self) -> bool:
        """Return whether to validate after this step."""
        every = self.config.training.evaluate_every
        return bool(self.data.validation and every and (self.progress.step % every == 0 or not self.steps_left))

    def validate(self, routed_as_trained: bool = False) -> dict[str, float]:
        """Return the validation loss of every source that has validation data."""
        self.trainable.settle()
        return validate(self.config, self.world, self.data, self.step, self.watchdog.alive, routed_as_trained)

    def report(self, verdict: Verdict) -> None:
        """Record the problem of a step and its samples. When giving up, list the samples of all bad steps in a row."""
        samples = self.progress.between(self.first_sample, self.progress.next_sample)
        if verdict.cause is Cause.NOT_FINITE:
            self.bad_samples += samples
        else:
            self.bad_samples.clear()
        if verdict.reason is not None:
            shown = self.bad_samples or samples if verdict.action is Action.STOP else samples
            self.event(BAD_STEP[verdict.cause](reason=verdict.reason, action=verdict.action.value, samples=shown))

    def rewind(self, cause: Cause | None) -> Action:
        """Go back to the newest checkpoint; unless replicas differed, train past the batch from there."""
        first, last = self.first_sample, self.progress.next_sample - 1
        step = self.saver.settled()
        if step is None:
            self.event(events.NotRewound())
            return Action.STOP if cause is Cause.REPLICAS else Action.SKIP
        self.rewinds[step] += 1
        most = self.config.training.guard.max_spikes
        if self.rewinds[step] > most:
            new_level = cause is Cause.SPIKE
            if new_level:
                self.guard.forget()
            self.event(events.NotRewound(checkpoint=step, times=most, new_level=new_level))
            return Action.STOP if cause is Cause.REPLICAS else Action.SKIP
        passed_over, skipped = self.progress.passed_over, []
        rewound_from = self.progress.step
        self.resume(step)
        self.bad_samples.clear()
        if cause is not Cause.REPLICAS:
            more = (self.config.training.guard.rewind_batches - 1) * self.config.training.global_batch
            skipped = [(max(self.progress.next_sample, first - more), last)]
        self.progress.passed_over = [*passed_over, *skipped]  # past its planned length the data goes on as planned
        self.batches.close()
        self.batches = self.open_batches()
        self.loggers.rewind(step)
        self.event(events.Rewound(step=rewound_from, to=step, skipped=skipped))
        return Action.REWIND

    def end(self, outcome: Outcome) -> Outcome:
        """Save, leave the marker that scripts decide by, and close."""
        self.saver.wait()  # giving up takes nothing back that was well before
        asked = outcome is Outcome.STOPPED_ON_REQUEST
        saved = outcome is not Outcome.GAVE_UP and (
            self.progress.step == 0 or (self.weights_work() and self.saver.last(self.progress.step))
        )
        if saved and outcome is Outcome.DONE and not self.steps_left:
            self.exporter.last(self.progress.step)
        self.exporter.close(finish=outcome is Outcome.DONE)
        self.batches.close()
        if self.progress.step > self.begun_at:
            self.shard_check.end(self.event, self.config.data.mixture)
        else:
            self.shard_check.stop()
        if not saved and outcome is Outcome.DONE:
            outcome = Outcome.STOPPED_ON_REQUEST if self.saver.last_failed else Outcome.GAVE_UP
        if outcome is Outcome.GAVE_UP:
            self.event(events.GaveUp(saved=saved))
        elif outcome is Outcome.STOPPED_ON_REQUEST or self.steps_left:
            self.event(events.Stopped(saved=saved, on_request=asked, steps_left=self.steps_left))
        else:
            self.event(events.Done(saved=saved))
        if self.world.is_main:  # an empty file can be made on a full disk too
            if outcome is Outcome.DONE and not self.steps_left:
                self.folder.done.touch()
            elif outcome is Outcome.STOPPED_ON_REQUEST:
                self.folder.requeue.touch()
        self.loggers.close()
        self._unlock()
        return outcome

    def _unlock(self, error: BaseException | None = None) -> None:
        """Let other jobs train in the folder."""
        if self.lock and error and not self.has_begun and exits.refuses(error):
            self.lock.discard()
        elif self.lock:
            self.lock.release()

    def weights_work(self) -> bool:
        """Return True unless, in a streak of bad steps, the weights fail on the first batch of the run as well."""
        if not self.guard.bad_in_a_row:
            return True
        with self._stream(0) as batches:
            return math.isfinite(self.step.evaluate(batches).loss)

    def event(self, event: events.Event) -> None:
        """Record what happened; the step is the one last taken, unless the event names another."""
        self.loggers.event(event if event.step is not None else replace(event, step=self.progress.step))
