"""Token shards by file name, folder or URL."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_blackmamba.formats.remote import is_remote
from megatron_blackmamba.formats.remote_shards import fetch_shards
from megatron_blackmamba.formats.shards import (
    MANIFEST_SUFFIX,
    SUFFIXES,
    Shard,
    ShardError,
    beside,
    no_manifest_advice,
    shard_prefix,
)
from megatron_blackmamba.formats.tree import files_under


def shards_at(path: str | os.PathLike[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Return the prefixes of all shards under a folder, or of the one shard with this name.

    A folder and a shard may have the same name, as with megatron-core's cache; the folder counts if it contains shards.
    Hidden files and folders are skipped.
    """
    if is_remote(path):
        return fetch_shards(os.fspath(path))
    path = Path(path)
    files = files_under(path) if path.is_dir() else iter(())
    inside = {shard_prefix(file) for file in files if file.name.endswith(tuple(suffixes)) and not _hidden(file, path)}
    if inside:
        return sorted(inside)
    prefix = shard_prefix(path)
    return [prefix] if any(beside(prefix, suffix).is_file() for suffix in suffixes) else []


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def find_shards(*paths: str | os.PathLike[str]) -> list[Shard]:
    """Return the shards named by prefixes, files and folders (searched recursively), sorted by name."""
    prefixes: list[Path] = []
    for path in paths:
        found = shards_at(path, (MANIFEST_SUFFIX,))
        if not found and (is_remote(path) or Path(path).is_dir()):
            raise ShardError(f"{path}: no shard in this folder. {no_manifest_advice(Path(path) / 'any')}")
        prefixes.extend(found or [shard_prefix(path)])
    return [Shard.open(prefix) for prefix in prefixes]
