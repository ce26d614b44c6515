"""Folders that appear whole or not at all: filled beside their place, flushed to disk, then renamed."""

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.formats import atomic, leftovers
from megatron_blackmamba.formats.atomic import sync_folder
from megatron_blackmamba.interchange.canonical import InterchangeError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, and rename it to `path` if the block ends without an error.

    overwrite: Replace a model that an earlier conversion wrote; no other folder.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    take_over(path)
    aside = _bring_back(path)
    overwrite &= _is_converted(path)
    if not overwrite:
        refuse_occupied(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = leftovers.beside(path)
    try:
        with interrupts.unfinished(temporary):
            temporary.mkdir()
            yield temporary
            for inside, _, _ in os.walk(temporary):
                sync_folder(Path(inside))
            with atomic.replaced(path, aside) if overwrite else contextlib.nullcontext():
                _rename(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno:
            _name_target(error, temporary, path)
        elif atomic.hides_failed_write(error):
            raise OSError(errno.ENOSPC, atomic.NOT_WHOLE, str(path)) from error
        raise


def _bring_back(path: Path) -> Path:
    """Return where a folder is while it is replaced, after undoing what a killed call left there."""
    aside = path.with_name(f".{path.name}.replaced.tmp")
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.exists():
        os.rename(aside, path)
    return aside


def refuse_occupied(path: Path) -> None:
    """Refuse an output that is there already, but for an empty folder."""
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        again = ""
        if _is_converted(path):
            again = ", overwrite it (--overwrite; in Python overwrite=True), or check it (blackmamba verify)"
        raise InterchangeError(f"{path}: already there; name a folder that does not exist or is empty{again}")
    if path.is_dir() and path.is_mount():
        raise InterchangeError(f"{path}: a file system is mounted here; name a folder inside it")


def _is_converted(path: Path) -> bool:
    """Return whether a folder holds what a conversion wrote: weights alone, or an export with its card."""
    if (path / "manifest.json").is_file() and (path / "model.yaml").is_file():
        return True
    card = path / "README.md"
    return (
        (path / "config.json").is_file() and card.is_file() and "\n- blackmamba\n" in card.read_text("utf-8", "replace")
    )


def take_over(path: Path) -> None:
    """Remove what killed calls left next to an output; refuse one that another process of this machine is writing."""
    for left, process in leftovers.remove_abandoned(path):
        if process is None:
            note = "of an earlier version, or of another machine, container or boot. Remove it if nothing writes it"
            print(f"note: {left}: unfinished, {note}", file=sys.stderr)
        elif process != os.getpid():
            raise InterchangeError(f"{path}: process {process} is writing it. Wait for it, or name another output")


def _rename(temporary: Path, path: Path) -> None:
    try:
        if path.is_dir():
            path.rmdir()
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise InterchangeError(f"{path}: another command has written it meanwhile; name another folder") from None


def _name_target(error: OSError, temporary: Path, path: Path) -> None:
    """Have an error name the output, whose disk it is about, instead of a copied file or a temporary one."""
    named = error.filename2 or error.filename
    inside = isinstance(named, str) and Path(named).is_relative_to(temporary)
    if inside:
        error.filename = str(path / Path(named).relative_to(temporary))
    elif error.errno in NO_ROOM:
        error.filename = str(path)
    if inside or error.errno in NO_ROOM:
        error.filename2 = None
