"""List all files under a folder."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_under(folder: Path, _above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Yield every file under a folder, recursively and sorted by name.

    Links to folders are followed, and broken links are yielded like files. An unreadable folder raises OSError.
    `Path.rglob` would silently skip all three.
    """
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in _above:  # a link to one of its own parents
        return
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.is_dir():
            yield from files_under(Path(entry.path), (*_above, here))
        else:
            yield Path(entry.path)
