"""The MFU to plan with: a number, or what a run on the cluster has measured."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from megatron_blackmamba.formats.run_folder import RunFolder

LAST_STEPS = 200


class MfuError(ValueError):
    """No MFU there; the message says what was looked for."""


def mfu(number_or_run: str) -> float:
    """`0.25`, or a run folder: the median over its last steps."""
    try:
        given = float(number_or_run)
    except ValueError:
        return _of_run(Path(number_or_run))
    if not 0 < given <= 1:
        raise MfuError(f"an MFU lies between 0 and 1, not at {given}")
    return given


def _of_run(folder: Path) -> float:
    path = RunFolder(folder).metrics
    if not path.is_file():
        raise MfuError(f"--mfu takes a number or a run folder; {folder} has no {path.name}")
    lines = path.read_text(encoding="utf-8").splitlines()[-LAST_STEPS:]
    measured = [record["mfu"] for record in map(_record, lines) if record.get("mfu")]
    if not measured:
        raise MfuError(f"{path} holds no mfu: it is measured on GPUs whose peak is known")
    return median(measured)


def _record(line: str) -> dict[str, Any]:
    """The metrics of a step; nothing of a line that a killed run left half-written, or is just being written."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
