"""All that judges the steps of a run, as one: a look before the update, a verdict after it, and who is to blame."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import ShardCheck
from megatron_blackmamba.formats import events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.watch.guard import Action, Cause, Guard, Verdict
from megatron_blackmamba.training.watch.ranks import Ranks
from megatron_blackmamba.training.watch.replicas import Replicas
from megatron_blackmamba.training.watch.reports import Reports
from megatron_blackmamba.training.watch.stragglers import Stragglers

Samples = list[tuple[int, int]]
BAD_STEP = {
    Cause.NOT_FINITE: events.NotFinite,
    Cause.SPIKE: events.Spike,
    Cause.REPLICAS: events.ReplicasDiffer,
    None: events.DeviceFailed,
}


class Watch:
    """The guard of the loss, the comparison of replicas, the search for slow ranks, and the check of the shards."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        model: LanguageModel,
        shards: Iterable[Shard],
        folder: RunFolder,
        report: Callable[[events.Event], None],
    ) -> None:
        self._config, self._report = config.training.guard, report
        self.ranks = Ranks.of_run()
        rate = config.data.verify_rate
        self.shards = ShardCheck(shards, folder.verified, rank=world.rank, ranks=world.size, mb_per_second=rate)
        self._guard = Guard(self._config)
        self._replicas = Replicas(world, model, self.ranks)
        self._stragglers = Stragglers(self._config, self.ranks)
        self._bad_samples: Samples = []
        self._rewinds: Counter[int] = Counter()
        self._refused: events.NotRewound | None = None

    @property
    def in_bad_streak(self) -> bool:
        """Return whether the last step was not finite, and so left the weights in doubt."""
        return self._guard.bad_in_a_row > 0

    def look(self, step: int, loss: float, reports: Reports, new_phase: bool) -> Verdict:
        """Judge the loss of a step before the update. Raise DataError if any rank found a changed shard.

        reports: those of all ranks. new_phase: the mixture changed in this batch, and with it the usual loss.
        """
        self.shards.after_step(reports.different_files, reports.pending_shards, self._report)
        if new_phase:
            self._guard.forget()
        every = self._config.replicas_every
        if every and step % every == 0 and (differing := self._replicas.differing()):
            return self._guard.replicas_differ(differing)  # in the weights that the gradients were computed with
        return self._guard.look(loss)

    def settle(
        self, seen: Verdict, loss: float, grad_norm: float, found: str | None, newest: Callable[[], int | None]
    ) -> Verdict:
        """Return the final verdict, and remember the step.

        found: what a second run of the step has shown. newest: returns the step of the checkpoint to rewind to.
        """
        verdict = seen if seen.cause is Cause.REPLICAS else self._guard.settle(seen, loss, grad_norm)
        verdict = replace(verdict, reason="; ".join(filter(None, [verdict.reason, found])) or None)
        self._refused = None
        if verdict.action is Action.REWIND:
            verdict = replace(verdict, rewind_to=newest())
            self._refused = self._refuses_rewind(verdict.rewind_to, verdict.cause)
        if self._refused:
            verdict = replace(verdict, action=Action.STOP if verdict.cause is Cause.REPLICAS else Action.SKIP)
        return verdict

    def report(self, verdict: Verdict, samples: Samples) -> None:
        """Report the problem of a step and its samples. When giving up, list the samples of all bad steps in a row."""
        if verdict.cause is Cause.NOT_FINITE:
            self._bad_samples += samples
        else:
            self._bad_samples.clear()
        if verdict.reason is not None:
            shown = self._bad_samples or samples if verdict.action is Action.STOP else samples
            self._report(BAD_STEP[verdict.cause](reason=verdict.reason, action=verdict.action.value, samples=shown))
        if self._refused:
            self._report(self._refused)

    def report_slow_ranks(self, computing: list[float], reading: list[float], seconds: float) -> None:
        """Note the times of a step by rank, and report the ranks that have become slow or have recovered."""
        for event in self._stragglers.after_step(computing, reading, seconds):
            self._report(event)

    def _refuses_rewind(self, to: int | None, cause: Cause | None) -> events.NotRewound | None:
        """Count a rewind to a checkpoint. Return why it is refused: no checkpoint exists, or too many rewinds to it."""
        if to is None:
            return events.NotRewound()
        self._rewinds[to] += 1
        most = self._config.max_spikes
        if self._rewinds[to] <= most:
            return None
        if cause is Cause.SPIKE:
            self._guard.forget()
        return events.NotRewound(checkpoint=to, times=most, new_level=cause is Cause.SPIKE)

    def differing(self) -> str | None:
        """Return which replicas of weights differ now, if the run compares them at all."""
        return self._replicas.differing() if self._config.replicas_every else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this."""
        return self._guard.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._guard.restore(state)
        self._bad_samples.clear()
