"""An estimate of a deduplication from a sample of its input: documents, time, disk, memory and files."""

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.data_tools.cleaning import Cleaning
from megatron_blackmamba.data_tools.options import DedupOptions
from megatron_blackmamba.data_tools.readers import Reader
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.remote import is_remote

RANGE_BYTES = 1 << 30
"""What the records of one task of a later stage take in memory, in about."""
SAMPLED_FILES = 4
FEWEST_OPEN_FILES = 128
RECOMMENDED_PARTS = 4000
_PROCESS_BYTES = 250 << 20
_BAND, _CONTENT, _DOCUMENT = 24, 40, 40
_CHARACTERS_A_SHINGLE = 6
"""A word of 5 letters and a space add one."""
_HASHES_A_SECOND = 150e6
"""MinHashes of one core: 420 for each distinct shingle."""
_CHARACTERS_A_SECOND = 6e6
"""Text that one core reads twice, cuts into shingles and writes."""


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a deduplication."""

    parts: int
    documents: int
    characters: int
    cpu_seconds: float
    disk: int
    memory: int
    """Bytes of the largest process."""
    files: int
    pieces: int
    """Ranges into which the later stages cut the keys."""

    @classmethod
    def of(cls, cleaning: Cleaning, options: DedupOptions) -> "Estimate":
        """Estimate the cost from the first documents of some files."""
        documents, characters = _sampled(cleaning)
        hashes = options.buckets * options.hashes
        shingles = characters / _CHARACTERS_A_SHINGLE
        row = options.buckets * _BAND + _CONTENT + _DOCUMENT + hashes / 8
        sketches = min(4 * shingles, 4096 * documents)
        bytes_of_largest = documents * max(_BAND, _CONTENT)
        pieces = max(1, round(bytes_of_largest / RANGE_BYTES))
        parts = len(cleaning.parts)
        blocks = parts + documents // (1 << 15)
        return cls(
            parts=parts,
            documents=documents,
            characters=characters,
            cpu_seconds=shingles * hashes / _HASHES_A_SECOND + characters / _CHARACTERS_A_SECOND,
            disk=int(documents * row + sketches + characters / 3),
            memory=int(max(_PROCESS_BYTES + 3 * bytes_of_largest / pieces, _PROCESS_BYTES + 10 * documents)),
            files=parts * 8 + 2 * blocks + pieces * (options.buckets * 4 + 4),
            pieces=pieces,
        )

    def pair_tasks(self, buckets: int) -> int:
        """Return the number of tasks that find pairs; with few documents, each task takes several buckets."""
        return min(buckets * self.pieces, max(8, self.documents // 10_000))

    def __str__(self) -> str:
        hours = (
            f"{self.cpu_seconds / 3600:.1f} CPU-hours" if self.cpu_seconds > 600 else f"{self.cpu_seconds:.0f} CPU-s"
        )
        return (
            f"about {self.documents:,} documents in {self.parts:,} parts: about {hours}, {_size(self.disk)} of disk, "
            f"{_size(self.memory)} of memory in the largest process, {self.files:,} files"
        )

    def check(self, out_dir: Path, memory_gb: float | None) -> list[str]:
        """Refuse what cannot work before it begins; return warnings."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < FEWEST_OPEN_FILES:
            raise InputError(f"ulimit -n {soft}: this needs {FEWEST_OPEN_FILES} open files. Set: ulimit -n 1024")
        place = next(folder for folder in (out_dir, *out_dir.parents) if folder.exists())
        free, nodes = shutil.disk_usage(place).free, os.statvfs(place).f_favail
        if self.disk / 2 > free:
            raise InputError(
                f"{out_dir}: {_size(free)} are free, and about {_size(self.disk)} are needed. "
                "Free some space, or choose another disk"
            )
        if 0 < nodes < self.files:
            raise InputError(
                f"{out_dir}: the file system takes {nodes:,} more files, and about {self.files:,} are needed. "
                "Set a larger --part-size, or choose another disk"
            )
        if memory_gb is not None and self.memory > memory_gb * 1e9:
            raise InputError(
                f"--memory {memory_gb:g}: the largest process needs about {_size(self.memory)}. "
                f"Set --memory {-(-self.memory // 10**9)}"
            )
        warnings = []
        if self.disk > free:
            warnings.append(f"warning: only {_size(free)} are free in {place}")
        if self.parts > RECOMMENDED_PARTS:
            warnings.append(f"warning: {self.parts:,} parts open each other's files. Set a larger --part-size")
        return warnings


def cost_of_signatures(options: DedupOptions) -> float:
    """Return how many times longer they take than the other stage that reads all text."""
    hashes = options.buckets * options.hashes / _CHARACTERS_A_SHINGLE
    return 1 + 2 * hashes * _CHARACTERS_A_SECOND / _HASHES_A_SECOND


def _sampled(cleaning: Cleaning) -> tuple[int, int]:
    """Return about how many documents and characters the input has, from the first batches of some files."""
    sources = [source for part in cleaning.parts for source in part]
    local = [source for source in sources if not is_remote(source.path)] or sources[:1]
    documents = characters = read = 0
    for source in local[:: max(1, -(-len(local) // SAMPLED_FILES))]:
        reader = Reader(source.path, source.format, cleaning.read, lambda *_: None)
        for batch in reader.batches():
            documents += len(batch.texts)
            characters += sum(map(len, batch.texts))
            break
        read += min(max(reader.bytes_read, 1), source.bytes or 1)
    total = sum(source.bytes for source in sources)
    scale = total / max(read, 1)
    return max(1, round(documents * scale)), max(1, round(characters * scale))


def _size(number: float) -> str:
    for unit in ("MB", "GB"):
        number /= 1000 if unit == "GB" else 10**6
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} TB"
