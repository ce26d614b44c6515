"""The files under a folder, none passed over in silence."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_under(folder: Path, _above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Every file to any depth, in order of name. Links to folders are followed, a link to nothing is given like a file,
    a folder that cannot be read raises OSError: `Path.rglob` would leave out what lies behind all three."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in _above:  # a link back to a folder it lies in
        return
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.is_dir():
            yield from files_under(Path(entry.path), (*_above, here))
        else:
            yield Path(entry.path)
