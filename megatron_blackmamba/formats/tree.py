"""List all files under a folder."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path


def files_under(folder: Path, _above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Yield every file under a folder, recursively and sorted by name.

    Links to folders are followed. Broken links and links to themselves are yielded like files. An unreadable folder
    raises OSError. `Path.rglob` would silently skip all three.
    """
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in _above:  # a link to one of its own parents
        return
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if _is_folder(entry):
            yield from files_under(Path(entry.path), (*_above, here))
        else:
            yield Path(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
