"""Questions to Slurm."""

import subprocess


def squeue(*options: str) -> list[str] | None:
    """Return the lines that `squeue` prints with these options, or None where Slurm does not answer."""
    command = ["squeue", "--noheader", *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return None
