"""Text that this machine holds: its Python, installed packages, Debian's documents. Nothing is downloaded."""

import importlib.metadata
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.study.texts import SIZES, decoded, digest

DEBIAN = Path("/usr/share/doc")
MANUALS = Path("/usr/share/man")
TEXT = {".md", ".rst", ".txt"}
CODE = {".py", ".h", ".hpp", ".js", ".ts", ".pm", ".vim", ".cmake", ".yml", ".yaml"}
"""Of the folders that a study names."""


@dataclass(frozen=True)
class Machine:
    """This machine's text, with some folders besides Python's own."""

    folders: tuple[Path, ...] = ()

    unseen = "manuals"

    def code(self) -> Iterator[str]:
        """Yield the standard library, then sources of installed packages and of folders, each in a shuffled order."""
        paths = sysconfig.get_paths()
        library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
        yield from _texts(path for path in sorted(library.rglob("*.py")) if packages not in path.parents)
        yield from _texts(_shuffled(packages.rglob("*.py")))
        yield from _texts(_shuffled(self._files(CODE)))

    def prose(self) -> Iterator[str]:
        """Yield documentation: Python's topics, descriptions and documents of packages, Debian's folder."""
        from pydoc_data.topics import topics

        yield from topics.values()
        for package in sorted(importlib.metadata.distributions(), key=lambda each: each.metadata["Name"] or ""):
            _, _, description = (package.read_text("METADATA") or "").partition("\n\n")
            if SIZES[0] <= len(description) <= SIZES[1]:
                yield description
        packages = Path(sysconfig.get_paths()["purelib"])
        yield from _texts(_shuffled(path for path in packages.rglob("*") if path.suffix in TEXT))
        yield from _texts(_shuffled(self._files(TEXT)))
        if DEBIAN.is_dir():
            yield from _texts(_shuffled(path for path in DEBIAN.rglob("*") if "copyright" not in path.name))

    def other(self) -> Iterator[str]:
        """Yield English manual pages."""
        return _texts(_shuffled(path for path in MANUALS.glob("man*/*")))

    def _files(self, suffixes: set[str]) -> Iterator[Path]:
        return (path for folder in self.folders for path in folder.rglob("*") if path.suffix in suffixes)


def _shuffled(paths: Iterator[Path]) -> list[Path]:
    """Order paths by a hash, so that a limit cuts no subject off."""
    return sorted(paths, key=lambda path: digest(str(path)))


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the files that are text of a useful size."""
    for path in paths:
        try:
            if not path.is_file() or path.stat().st_size > SIZES[1]:
                continue
            text = decoded(path.read_bytes(), path.suffix == ".gz")
        except OSError:
            continue  # gone, or not readable
        if text is not None:
            yield text
