"""Replace the code files of an export by the installed package's; weights and all other files stay as they are."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.formats.atomic import sync_folder
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.interchange.canonical import InterchangeError

CONFIG = "config.json"


@dataclass(frozen=True)
class Change:
    """A change of a code file: added, replaced or removed, and by how many lines."""

    file: str
    what: str
    added: int
    removed: int

    def __str__(self) -> str:
        return f"{self.what} {self.file} (+{self.added} -{self.removed} lines)"


def refresh(folder: Path) -> list[Change]:
    """Give an export this version's code files and return what changed; a call that was killed can be repeated."""
    ours = _files_for(folder)
    for left_over in folder.glob(".*_blackmamba.py.new"):
        left_over.unlink()
    theirs = {file.name: file.read_text("utf-8", "replace") for file in hf.code_files(folder)}
    stale = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    try:
        for name in stale:  # all are on disk before the first one counts
            if name in ours:
                _write_beside(folder / name, ours[name])
        for name in stale:
            if name in ours:
                os.replace(_beside(folder / name), folder / name)
            else:
                (folder / name).unlink()
    except OSError as error:
        raise InterchangeError(
            f"{folder}: cannot be written ({error.strerror}). Copy it to a folder of yours"
        ) from None
    sync_folder(folder)
    return [_change(name, theirs.get(name), ours.get(name)) for name in stale]


def _files_for(folder: Path) -> dict[str, str]:
    """Return this version's code files for an export; refuse another folder."""
    if not (folder / CONFIG).is_file():
        raise InterchangeError(f"{folder}: has no {CONFIG}. Name a folder written by `export hf` or `save_pretrained`")
    config, content = hf.read_config(folder / CONFIG)
    elsewhere = [name for name in content.get("auto_map", {}).values() if "--" in str(name)]
    if elsewhere:
        raise InterchangeError(
            f"{folder / CONFIG}: auto_map takes the code from {elsewhere[0].split('--')[0]} on the hub, not from the "
            "folder. Remove that prefix from auto_map first"
        )
    return hf.modeling_files(config)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _write_beside(path: Path, text: str) -> None:
    with open(_beside(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _change(name: str, before: str | None, after: str | None) -> Change:
    what = "added" if before is None else "removed" if after is None else "replaced"
    lines = list(difflib.ndiff((before or "").splitlines(), (after or "").splitlines()))
    return Change(name, what, sum(line[:2] == "+ " for line in lines), sum(line[:2] == "- " for line in lines))
