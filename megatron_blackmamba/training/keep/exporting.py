"""The schedule of Hugging Face exports. A failed export is reported, and training continues."""

import time
from collections.abc import Callable

from megatron_blackmamba.checkpoint import SaveError
from megatron_blackmamba.formats.events import Event, Exported, NotExported
from megatron_blackmamba.training.keep.export_checks import ExportChecks


class Exporter:
    """An exporter that exports every `every` steps, and once when the run is done; 0: never.

    Each export is checked beside the training that goes on (`export_checks.py`).
    """

    def __init__(
        self,
        every: int,
        export: Callable[[int], None],
        is_exported: Callable[[int], bool],
        report: Callable[[Event], None],
        checks: ExportChecks,
    ) -> None:
        self.every, self._export, self._is_exported, self._report = every, export, is_exported, report
        self._checks = checks
        self._due = False
        self._newest: int | None = None
        self._trained = False

    def after_step(self, step: int) -> None:
        """Export if it is due now, or was during a streak of bad steps."""
        self.postpone(step)
        if self._due:
            self._run(step)

    def postpone(self, step: int) -> None:
        """Note what is due at a bad step: it is exported after the next good one."""
        self._trained = True
        self._checks.poll()
        self._due |= bool(self.every) and step % self.every == 0

    def last(self, step: int) -> None:
        """Export the last step, unless that has happened: now, or when the run ended the first time."""
        if self.every and self._newest != step and (self._trained or not self._is_exported(step)):
            self._run(step)

    def _run(self, step: int) -> None:
        self._due, begun = False, time.perf_counter()
        try:
            self._export(step)
        except SaveError as error:
            self._report(NotExported(step=step, problem=str(error)))
        else:
            self._newest = step
            self._report(Exported(step=step, seconds=round(time.perf_counter() - begun, 3)))
            self._checks.add(step)
