"""Check the exports of a run beside its training: `blackmamba verify` for one after another."""

from collections.abc import Callable

from megatron_blackmamba.formats.events import Event, NotExported
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.keep.background import Background


class ExportChecks(Background):
    """The exports that wait for their check. `blackmamba verify` can repeat those that are dropped."""

    def __init__(self, how: str, folder: RunFolder, report: Callable[[Event], None]) -> None:
        super().__init__()
        self._how, self._folder, self._report = how, folder, report

    def add(self, step: int) -> None:
        """Check an export as soon as the earlier ones are checked."""
        if self._how != "none":
            super().add(step)

    def command(self, step: int) -> list[str]:
        return ["verify", str(self._folder.export(step)), "--check", self._how]

    def ended(self, step: int, problem: str | None) -> None:
        if problem is not None:
            self._report(NotExported(step=step, problem=problem))
