"""A run on one page: loss, mixture, experts, speed, what interrupted it, and what it was made with."""

from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.report.history import SAMPLES, ReportError, read_history
from megatron_blackmamba.report.page import pictures as pictures_of
from megatron_blackmamba.report.page import render


def write_report(
    run: Path, *, out: Path | None = None, samples: dict[str, str] | None = None, pictures: Path | None = None
) -> Path:
    """Write the page (and PNGs into `pictures`); samples, prompt → text, stay with the run for the next report."""
    if samples:
        atomic.write_json(run / SAMPLES, samples)
    history = read_history(run)
    path = out or history.folder.report
    atomic.write_text(path, render(history))
    if pictures is not None:
        from megatron_blackmamba.report.pictures import write_pictures

        write_pictures(pictures, pictures_of(history))
    return path
