"""A small file system, which a test fills up."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int, *, required: bool = True) -> Iterator[Path]:
    """Mount `size` bytes on a folder, new or not; where nothing can be mounted, skip if it is required."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    refused = subprocess.run(mount, capture_output=True, text=True)
    if refused.returncode and required:
        pytest.skip(f"no small file system can be mounted here: {refused.stderr.strip()}")
    try:
        yield folder
    finally:
        if not refused.returncode:
            subprocess.run(["umount", "-l", folder], check=True)
