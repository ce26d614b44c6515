"""The MFU to plan with: a number, or what a run on the cluster has measured."""

from pathlib import Path
from statistics import median

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import parse_line

LAST_STEPS = 200


class MfuError(ValueError):
    """No MFU there; the message says what was looked for."""


def mfu(number_or_run: str) -> float:
    """Parse an MFU: a number such as `0.25`, or a run folder, for the median over its last steps."""
    try:
        given = float(number_or_run)
    except ValueError:
        return _of_run(Path(number_or_run))
    if not 0 < given <= 1:
        raise MfuError(f"MFU must be between 0 and 1, not {given}")
    return given


def _of_run(folder: Path) -> float:
    path = RunFolder(folder).metrics
    if not path.is_file():
        raise MfuError(f"--mfu takes a number or a run folder; {folder} has no {path.name}")
    lines = path.read_bytes().splitlines(keepends=True)[-LAST_STEPS:]
    measured = [record["speed/mfu"] for line in lines if (record := parse_line(line)) and record.get("speed/mfu")]
    if not measured:
        raise MfuError(f"{path} holds no mfu: it is measured on GPUs whose peak is known")
    return median(measured)
