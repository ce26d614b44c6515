"""Folders that appear whole or not at all: filled beside their place, flushed to disk, then renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba import interrupts
from megatron_blackmamba.formats.atomic import sync_folder
from megatron_blackmamba.interchange.canonical import InterchangeError


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, and rename it to `path` if the block ends without an error."""
    path = Path(os.path.abspath(path))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InterchangeError(f"{path}: already there; name a folder that does not exist or is empty")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with interrupts.unfinished(temporary):
            temporary.mkdir()
            yield temporary
            for inside, _, _ in os.walk(temporary):
                sync_folder(Path(inside))
            if path.is_dir():
                path.rmdir()
            os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
