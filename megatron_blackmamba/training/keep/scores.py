"""Score the checkpoints of a run beside its training: `blackmamba evaluate` for one after another."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from megatron_blackmamba.formats.evaluations import claim
from megatron_blackmamba.formats.events import Event, NotScored
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.settings import EvaluationConfig
from megatron_blackmamba.training.keep.background import Background

RENEW_SECONDS = 60.0


class Scores(Background):
    """The checkpoints that wait to be scored, each protected from removal until it is.

    Scored are the first checkpoint at or after every `evaluation.every` steps, and the last one of the run.
    """

    def __init__(self, settings: EvaluationConfig, folder: RunFolder, report: Callable[[Event], None]) -> None:
        super().__init__()
        self._settings, self._folder, self._report = settings, folder, report
        self._claims: dict[int, tuple[ExitStack, Callable[[], None]]] = {}
        self._renewed = time.monotonic()
        self._newest = 0

    def resumed_at(self, step: int) -> None:
        """Note the checkpoint that the run resumes from."""
        self._newest = step

    def saved(self, step: int, last: bool = False) -> None:
        """Score a new checkpoint if that is due."""
        every = self._settings.every
        due = every and (step // every > self._newest // every or last) and step not in self._claims
        self._newest = step
        if due and not (last and self._folder.evaluation(step).exists()):
            stack = ExitStack()
            try:
                self._claims[step] = stack, stack.enter_context(claim(self._folder.root, step))
            except OSError as error:  # a full disk
                self._report(NotScored(step=step, problem=f"it cannot be claimed: {error}"))
            else:
                self.add(step)

    def poll(self) -> None:
        """Handle the end of a command, begin the next, and renew the claims."""
        super().poll()
        if self._claims and time.monotonic() > self._renewed + RENEW_SECONDS:
            self._renewed = time.monotonic()
            for _, renew in self._claims.values():
                renew()

    def stop(self) -> None:
        """End the command that runs, and drop the others: `blackmamba evaluate RUN --watch` can score them."""
        super().stop()
        for step in list(self._claims):
            self._release(step)

    def command(self, step: int) -> list[str]:
        settings = self._settings
        words = ["evaluate", str(self._folder.checkpoint(step)), "--tasks", settings.tasks, "--device", "cpu"]
        words += ["--data", str(settings.data)]
        return words + (["--limit", str(settings.limit)] if settings.limit else [])

    def ended(self, step: int, problem: str | None) -> None:
        self._release(step)
        if problem is not None:
            self._report(NotScored(step=step, problem=problem))

    def _release(self, step: int) -> None:
        stack, _ = self._claims.pop(step)
        stack.close()
