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
import warnings
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch.distributed as dist

from megatron_blackmamba import data, model
from megatron_blackmamba.checkpoint import SaveError
from megatron_blackmamba.config import RunConfig, to_saved
from megatron_blackmamba.engine import foreign
from megatron_blackmamba.formats import events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.plan import parameters
from megatron_blackmamba.runtime import device, exits, facts, layout, process, world
from megatron_blackmamba.runtime.parent import die_with_parent
from megatron_blackmamba.runtime.signals import StopRequest
from megatron_blackmamba.runtime.watchdog import Watchdog
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.branch import find_branch, pinned, with_own_data
from megatron_blackmamba.training.keep.keeper import Keeper
from megatron_blackmamba.training.metrics import Taken, record
from megatron_blackmamba.training.record.journal import Journal
from megatron_blackmamba.training.start import headline, kernels, resume
from megatron_blackmamba.training.start.alike import refuse_unlike_data, refuse_unlike_starts
from megatron_blackmamba.training.step.feed import micro_batches, open_plan, unused_rows
from megatron_blackmamba.training.step.learning_rates import Schedule, rate_change
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.progress import Progress
from megatron_blackmamba.training.step.rerun import Attempt, run_again
from megatron_blackmamba.training.step.step import Step, Update
from megatron_blackmamba.training.step.validation import bytes_per_token, validate
from megatron_blackmamba.training.watch.guard import Action, Cause, Verdict
from megatron_blackmamba.training.watch.reports import Reports
from megatron_blackmamba.training.watch.watch import Watch


class Outcome(IntEnum):
    """The outcome of a job, as an exit code."""

    DONE = 0
    """The run has consumed its tokens, or has reached training.stop_after_steps."""
    GAVE_UP = exits.GAVE_UP
    """The guard has stopped the run after bad steps."""
    STOPPED_ON_REQUEST = exits.STOPPED_ON_REQUEST
    """A signal, `Trainer.asked_to_stop` or a full disk at the last save has ended it; starting it again resumes."""


@process.default_float32()
def train(config: RunConfig, trainer: type["Trainer"] | None = None) -> Outcome:
    """Start or resume training, by a subclass of Trainer if given, until its end or a request to stop; on all ranks."""
    for package in (r"megatron\.core", r"torch\.distributed"):  # what they warn of is for their developers
        warnings.filterwarnings("ignore", module=package)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    stop = StopRequest()
    try:
        place = world.find_place()
        if place.launcher == "srun":  # or it would train on, unseen, when slurmstepd dies
            die_with_parent(os.getppid())
        foreign.refuse_missing()
        layout.check(config, place.size)
        resume.refuse_start(config)
        # A pretended world counts, so no real one may exist.
        count = parameters.count(config) if place.rank == 0 and not dist.is_initialized() else None
        if place.rank == 0:
            with contextlib.suppress(OSError):  # standard output may lie on a full disk
                print(*headline.lines(config, place.size, count), sep="\n", flush=True)
        logs = RunFolder.of(config).logs
        with Watchdog(config.training.guard.hang_seconds, place.rank, place.size, logs) as watchdog:
            everyone = world.start(config.parallel, world.PATIENCE, joined=lambda: refuse_unlike_starts(config))
            started = (trainer or Trainer)(config, everyone, stop, watchdog)
            started.count = count
            outcome = started.run()
            world.shutdown()
        return outcome
    finally:
        stop.release()


class Trainer:
    """One rank of a run. Its parts are public: a test or an experiment may put its own in their place."""

    count: parameters.Parameters | None = None
    """Parameters of the whole model, where the first rank could count them."""

    def __init__(self, config: RunConfig, world: World, stop: StopRequest, watchdog: Watchdog) -> None:
        config = pinned(config, world)
        self.branch = find_branch(config)
        config, self.mixture = with_own_data(config, self.branch)
        self.config, self.world, self.stop, self.watchdog = config, world, stop, watchdog
        kernels.refuse_lost(config)
        process.be_deterministic(config.training.deterministic)
        watchdog.alive("building the model")
        self.trainable = make_trainable(config, model.build(config, world), world)
        self.progress = self.branch.progress if self.branch else Progress()
        watchdog.alive("opening the data")
        self.data = self.open_data()
        refuse_unlike_data(self.data.record)
        self.step = Step(config, world, self.trainable, len(self.data.source_names), self.tell_graph)
        self.schedule = Schedule(config, self.trainable.optimizer)
        self.begun_at: int | None = None
        """The step at which this job begins; None until its config, data and checkpoint are accepted."""
        self.modules = facts.code_of_extensions()
        """The code that BLACKMAMBA_IMPORT has brought; its files may change while this job trains."""
        self.asked_to_stop = False
        """Set this to end the run after the step, with a checkpoint."""
        self.keeper = Keeper(config, world, self.trainable, self.state, self.event, watchdog.alive, self.mixture)
        try:  # in the folder that is now locked
            self.watch = Watch(config, world, self.trainable.model, self.data.shards, self.keeper.folder, self.event)
            self.journal = Journal(config, self.keeper.folder, world.rank, world.size, self.progress.step)
            self.batches = self.open_batches()
        except BaseException as error:
            self.keeper.unlock(leave_no_trace=exits.refuses(error))
            raise

    @property
    def over(self) -> bool:
        """Return whether the last step has been taken."""
        return self.progress.step >= self.config.last_step(self.progress.step, self.progress.consumed_samples)

    def run(self) -> Outcome:
        """Train until the run is done, gives up or is asked to stop."""
        try:
            self.begin()
            self.stop.heed(signal.SIGINT)  # before, there is nothing to save
            if self.world.any_rank(self.stop.asked):  # while the model was built or loaded
                return self.end(Outcome.STOPPED_ON_REQUEST)
            while not self.over:
                self.watchdog.alive(f"step {self.progress.step + 1}")
                verdict = self.take_step()
                if verdict.action is Action.STOP:
                    return self.end(Outcome.GAVE_UP)
                if verdict.action is Action.REWIND:
                    self.rewind(verdict)
                self.keeper.after_step(self.progress.step, good=not self.watch.in_bad_streak)
                if self.asked_to_stop and not self.over:
                    return self.end(Outcome.STOPPED_ON_REQUEST)
            return self.end(Outcome.DONE)
        except BaseException as error:
            self.watch.shards.stop()
            self.keeper.close()
            refused = self.begun_at is None and exits.refuses(error)  # such a run leaves no trace
            if not refused:
                self.event(events.Failed(step=self.progress.step, error=type(error).__name__, message=str(error)))
                self.journal.close()
            self.keeper.unlock(leave_no_trace=refused)
            raise

    def begin(self) -> None:
        """Resume from the newest checkpoint, or start from the given weights, or from scratch."""
        where: dict[str, Any] = {"processes": self.world.size, "device": device.name()}
        if self.count:
            where |= {"parameters": self.count.total, "active": self.count.forward}
        size = where | {"tokens_per_step": self.config.tokens_per_step}
        newest, weights = self.keeper.newest(), self.config.start.from_
        if newest is not None:
            changes = self.resume(newest)
            self.begun_at = newest
            if self.progress.end_of_data(self.config) != len(self.data.train):  # other batches, or skipped ranges
                self.data = self.open_data()
            self.reopen_batches()
            size |= {"sample": self.progress.next_sample, "steps_left": self.steps_left}
            self.event(events.Resumed(changes=changes, **size))
        elif self.branch:  # take over another run's checkpoint
            self.branch.refuse_data(self.data.record)
            self.branch.refuse_reread(self.config, self.data)
            protected = self.keeper.load_from(self.branch.checkpoint, self.branch.step)
            if self.branch.reads_on(self.data.record):  # the losses of other data say nothing of a spike
                self.watch.restore(self.branch.state["guard"])
            self.begun_at = self.branch.step
            self.event(self.branch.event(self.config, self.data, protected=protected, **where))
        else:
            if weights:
                resume.refuse_start_tokenizer(self.config, self.data.record)
                self.keeper.load_weights(weights)
            self.begun_at = 0
            unused = unused_rows(self.config, self.data)
            self.event(events.Started(steps=self.config.steps, weights_from=weights, unused_rows=unused, **size))
        if reason := layout.routing(self.config, self.world.size):
            self.event(events.RoutingDependsOnLayout(reason=reason))
        if in_use := kernels.in_use():
            self.event(in_use)
        self.journal.rewind(self.progress.step)
        self.watch.shards.start()
        self.watchdog.begin()
        process.freeze_gc()
        self.keeper.begin(self.data)

    def resume(self, step: int) -> list[str]:
        """Take over a checkpoint of this run, or refuse to; returns the changes that were allowed by name."""
        saved, state = self.keeper.saved(step)
        self.progress = progress = Progress.restored(state["progress"])  # before a refusal, which is of this step
        allowed = resume.refuse_changes(saved.model_dump(mode="json", by_alias=True), self.config, step)
        resume.refuse_tokenizer(state["data"], self.data.record, step)
        data.refuse_changed_data(state["data"], self.data.record, progress.next_sample)
        self.keeper.load(step)
        self.watch.restore(state["guard"])
        edited = resume.edited_modules(state.get("modules", {}), self.modules, step)
        return allowed + rate_change(saved, self.config, step, progress.consumed_samples) + edited

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors; called when one is about to be taken."""
        self.trainable.settle()
        if differing := self.watch.differing():
            raise SaveError(f"replicas of weights differ: {differing}")
        return {
            "config": to_saved(self.config),
            "progress": self.progress.state(),
            "guard": self.watch.state(),
            "data": self.data.record,
            "modules": self.modules,
        }

    @property
    def steps_left(self) -> int:
        """Return the number of steps until the last one."""
        return self.config.steps_left(self.progress.consumed_samples)

    def open_data(self) -> data.DataPlan:
        """Return the training and validation data of the run."""
        return open_plan(self.config, self.progress, self.mixture)

    def open_batches(self) -> data.BatchStream:
        """Return the micro-batches of this rank from the next sample on."""
        return self._batches_from(self.progress.next_sample, self.progress.consumed_samples)

    def reopen_batches(self) -> None:
        """Read on from the next sample, after the progress has changed."""
        self.batches.close()
        self.batches = self.open_batches()

    def _batches_from(self, sample: int, consumed: int | None = None) -> data.BatchStream:
        where = {"start_sample": sample, "passed_over": self.progress.passed_over}
        return micro_batches(self.config, self.world, self.data.train, consumed, **where)

    @property
    def batch(self) -> int:
        """Return the sequences of the next step."""
        return self.config.batch_at(self.progress.consumed_samples)

    def take_step(self) -> Verdict:
        """Take one global batch: gradients, a look at the loss, the update, and the record of it all."""
        self.journal.step_begins(self.progress.step + 1)
        learning_rate = self.schedule.set(self.progress.consumed_samples)
        attempt, found = self.attempt(), None
        if attempt.problem:
            attempt, found = run_again(attempt, self.attempt_again, self.step.first_seen, self.watch.ranks)
        losses, update = attempt.losses, attempt.update
        verdict = self.watch.settle(attempt.seen, losses.loss, update.grad_norm, found, self.keeper.settled)
        self.asked_to_stop = bool(losses.reports.stop_requests)
        batch = self.batch
        self.progress.advance(self.batches.position, batch)
        seconds = self.journal.step_ends(self.progress.step)

        taken = Taken(
            config=self.config,
            progress=self.progress,
            data=self.data,
            trainable=self.trainable,
            utilisation=self.journal.utilisation,
            losses=losses,
            update=update,
            learning_rate=learning_rate,
            tokens=batch * self.config.data.sequence_length,
            seconds=seconds,
            **self.validations(),
        )
        self.journal.step(record(taken))
        self.watch.report_slow_ranks(losses.computing, losses.reading, seconds)
        self.watch.report(verdict, self.progress.between(*self.progress.last_batch))
        return verdict

    def attempt(self) -> Attempt:
        """Run the step: the gradients of the next batch, and the update if nothing speaks against it."""
        reports = Reports(self.stop.asked, *self.watch.shards.findings)
        losses = self.step.gradients(self.batches, reports, self.batch)
        batch = range(self.progress.next_sample, self.batches.position)
        new_phase = any(start in batch for start in self.data.train.schedule.starts)
        seen = self.watch.look(self.progress.step + 1, losses.loss, losses.reports, new_phase)
        update = self.step.update() if seen.action is Action.APPLY else Update(applied=False, grad_norm=math.nan)
        return Attempt(losses, seen, update)

    def attempt_again(self) -> Attempt:
        """Run the same step once more."""
        self.batches.again()
        return self.attempt()

    def validate(self, routed_as_trained: bool = False) -> dict[str, float]:
        """Return the validation loss of every source that has validation data."""
        self.trainable.settle()
        return validate(self.config, self.world, self.data, self.step, self.watchdog.alive, routed_as_trained)

    @cached_property
    def bytes_per_token(self) -> dict[str, float]:
        """The bytes of text per validated token by source."""
        return bytes_per_token(self.config, self.world, self.data, self.watchdog.alive)

    def validations(self) -> dict[str, dict[str, float]]:
        """Return the validation losses that are due after this step, under their names in `Taken`."""
        every = self.config.training.evaluate_every
        if not (self.data.validation and every and (self.progress.step % every == 0 or not self.steps_left)):
            return {}
        found = {"validation": self.validate(), "bytes_per_token": self.bytes_per_token}
        if self.config.training.validate_balanced:
            found["validation_as_trained"] = self.validate(routed_as_trained=True)
        if self.trainable.ema is not None:
            with self.trainable.ema.in_place():  # the averages stand in for the weights meanwhile
                found["validation_of_average"] = self.validate()
        return found

    def rewind(self, verdict: Verdict) -> None:
        """Go back to a checkpoint; unless replicas differed, train past the batch from there."""
        step, rewound_from = verdict.rewind_to, self.progress.step
        assert step is not None  # `Watch.settle` asks for a rewind only where there is a checkpoint
        (first, end), before, now = self.progress.last_batch, self.progress.passed_over, []
        self.resume(step)
        if verdict.cause is not Cause.REPLICAS:
            more = (self.config.training.guard.rewind_batches - 1) * self.batch
            now = [(max(self.progress.next_sample, first - more), end - 1)]
        self.progress.passed_over = [*before, *now]  # past its planned length the data goes on as planned
        self.reopen_batches()
        self.journal.rewind(step)
        self.event(events.Rewound(step=rewound_from, to=step, passed_over=now))

    def end(self, outcome: Outcome) -> Outcome:
        """Save, leave the marker that scripts decide by, and close."""
        step, complete, asked = self.progress.step, not self.steps_left, outcome is Outcome.STOPPED_ON_REQUEST
        saved = self.keeper.last(step, wanted=outcome is not Outcome.GAVE_UP and self.weights_work())
        done = outcome is Outcome.DONE
        if saved and complete and done:
            self.keeper.export_last(step)
        if not done:
            self.keeper.close()
        self.batches.close()
        if step > (self.begun_at or 0):
            self.watch.shards.end(self.event, self.config.data.mixture)
        self.watch.shards.stop()
        if not saved and done:
            outcome = Outcome.STOPPED_ON_REQUEST if self.keeper.another_start_may_save else Outcome.GAVE_UP
        if outcome is Outcome.GAVE_UP:
            self.event(events.GaveUp(saved=saved))
        elif outcome is Outcome.STOPPED_ON_REQUEST or not complete:
            self.event(events.Stopped(saved=saved, on_request=asked, steps_left=self.steps_left))
        else:
            self.event(events.Done(saved=saved))
        self.keeper.mark(done=outcome is Outcome.DONE and complete, requeue=outcome is Outcome.STOPPED_ON_REQUEST)
        self.keeper.finish(lambda: self.stop.asked)
        self.journal.end_trace(step)
        self.journal.close()
        self.keeper.unlock()
        return outcome

    def weights_work(self) -> bool:
        """Return True unless, in a streak of bad steps, the weights fail on the first batch of the run as well."""
        if not self.watch.in_bad_streak:
            return True
        with self._batches_from(0) as batches:
            return math.isfinite(self.step.evaluate(batches).loss)

    def tell_graph(self, news: str) -> None:
        """Record whether micro-batches are CUDA graphs."""
        self.event(events.CudaGraph(news=news))

    def event(self, event: events.Event) -> None:
        """Record what happened; the step is the one last taken, unless the event names another."""
        self.journal.event(event, self.progress.step)
