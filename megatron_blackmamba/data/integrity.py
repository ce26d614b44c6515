"""Compare the shards of a run with their manifests in the background, while it trains.

A thread of the lowest priority reads this rank's share of the shards and compares their sha256 with the manifests.
The run folder remembers size, modification time and inode of correct files, so a restart reads only files that changed.
The result travels to all ranks with the losses of a step.
"""

import hashlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_blackmamba.data.datasets import DataError
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.events import Event, ShardsUnverified, ShardsVerified
from megatron_blackmamba.formats.remote import cache_folder
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.runtime.world import gathered

LOOK_AGAIN_SECONDS = 60.0
"""Time between two looks at size, modification time and inode of files that were read before."""
_BLOCK_BYTES = 4 << 20
_LOWEST_PRIORITY = 19
SHORT_SECONDS = 600.0  # a run that ends earlier says nothing of shards it had no time for
_PATIENCE_SECONDS = 5.0  # for a file system that does not answer: the thread ends with the process


class _Stopped(Exception):
    """The run ended while a file was being read."""


class ShardCheck:
    """A thread that reads this rank's share of the shards and compares them with their manifests."""

    def __init__(
        self,
        shards: Iterable[Shard],
        memory: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        mb_per_second: float = 100.0,
        look_again_seconds: float = LOOK_AGAIN_SECONDS,
    ) -> None:
        """Prepare the check of shards, at most `mb_per_second` (0 reads none); `memory` has earlier results."""
        everything = sorted(shards, key=lambda shard: (-shard.manifest.bin_bytes, str(shard.prefix)))
        self.total = len(everything) if mb_per_second else 0
        self.share: Sequence[Shard] = everything[rank::ranks] if mb_per_second else []
        self.memory, self.look_again_seconds = memory, look_again_seconds
        self.different: list[str] = []
        """One line for each file that differs from its manifest."""
        self.bytes_read = 0
        self._seconds_per_byte = 1e-6 / mb_per_second if mb_per_second else 0.0
        self._next_read = 0.0
        self._correct: dict[Path, dict[str, object]] = {}
        self._complained: set[Path] = set()
        self._announced = not self.total
        self._pending_everywhere = self.total
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.share:
            self._thread = threading.Thread(target=self._work, name="shard-check", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(_PATIENCE_SECONDS)

    @property
    def findings(self) -> tuple[int, int]:
        """Return the number of damaged files and of unverified shards of this rank, to be summed over all ranks."""
        return len(self.different), len(self.share) - len(self._correct)

    def after_step(self, different: int, pending: int, report: Callable[[Event], None]) -> None:
        """Raise DataError on every rank if any of them found a difference. The numbers are sums over all ranks."""
        if different:
            raise DataError(_explain([line for of_rank in gathered(self.different) for line in of_rank]))
        self._pending_everywhere = pending
        if not pending and not self._announced:
            self._announced = True
            report(ShardsVerified(shards=self.total))

    def end(self, report: Callable[[Event], None], mixture: str | None = None) -> None:
        """Stop, and report how many shards were not compared in the time that the run took, unless it was short."""
        self.stop()
        if not self._announced and time.monotonic() - self._began >= SHORT_SECONDS:
            pending = self._pending_everywhere
            report(ShardsUnverified(pending=pending, shards=self.total, mixture=shlex.quote(mixture or "MIXTURE")))

    def look(self) -> None:
        """Check every shard of the share once. Read a file only if it changed since it was last found correct."""
        for shard in self.share:
            try:
                now = _describe(shard)
                if self._correct.get(shard.prefix) == now:
                    continue
                self._correct.pop(shard.prefix, None)
                if self._is_remembered(shard, now) or self._read(shard, now):
                    self._correct[shard.prefix] = now
            except OSError as error:  # a file system may recover: the next look tries again
                self._complain(shard, error)

    def _work(self) -> None:
        if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        with suppress(_Stopped):
            while not self.different:
                self.look()
                if self._over.wait(self.look_again_seconds):
                    return

    def _read(self, shard: Shard, before: dict[str, object]) -> bool:
        """Compare both files with the manifest; False if they differ, or if they changed during the reading."""
        expected = {shard.bin_path: shard.manifest.bin_sha256, shard.idx_path: shard.manifest.idx_sha256}
        found = {path: self._sha256(path) for path in expected}
        if _describe(shard) != before:
            return False
        lines = [
            f"{path}: its sha256 is {found[path][:16]}…, its manifest says {expected[path][:16]}…"
            for path in expected
            if found[path] != expected[path]
        ]
        self.different += lines
        if lines:
            return False
        with suppress(OSError):  # a full disk only costs another reading after a restart
            atomic.write_json(self._record(shard), before)
        return True

    def _is_remembered(self, shard: Shard, now: dict[str, object]) -> bool:
        try:
            return json.loads(self._record(shard).read_bytes()) == now
        except (OSError, ValueError, RecursionError):  # a damaged record only costs another reading
            return False

    def _record(self, shard: Shard) -> Path:
        """Record a verified shard in its own file, so that ranks never write to the same file."""
        name = hashlib.blake2b(str(shard.prefix).encode(errors="surrogateescape"), digest_size=12).hexdigest()
        return self.memory / f"{name}.json"

    def _sha256(self, path: Path) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
        with open(path, "rb", buffering=0) as file:
            while length := file.readinto(block):
                digest.update(block[:length])  # releases the interpreter lock, as reading does
                self.bytes_read += length
                self._keep_pace(length)
        return digest.hexdigest()

    def _keep_pace(self, length: int) -> None:
        now = time.monotonic()
        self._next_read = max(self._next_read, now) + length * self._seconds_per_byte
        if self._over.wait(self._next_read - now):
            raise _Stopped

    def _complain(self, shard: Shard, error: OSError) -> None:
        if shard.prefix not in self._complained:
            self._complained.add(shard.prefix)
            print(f"{shard.prefix}: cannot be compared with its manifest yet: {error}", file=sys.stderr, flush=True)


def _describe(shard: Shard) -> dict[str, object]:
    """Return everything that must be unchanged for an earlier check to count."""
    identities = {}
    for path in (shard.bin_path, shard.idx_path):
        status = path.stat()
        identities[path.suffix] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return {
        "shard": str(shard.prefix).encode(errors="surrogateescape").decode(errors="backslashreplace"),
        "bin_sha256": shard.manifest.bin_sha256,
        "idx_sha256": shard.manifest.idx_sha256,
        "size, modified_ns, inode": identities,
    }


def _explain(lines: Sequence[str]) -> str:
    copies = any(line.startswith(f"{cache_folder()}/") for line in lines)
    return (
        "the token shards are not what was tokenized:\n  "
        + "\n  ".join(lines)
        + "\nCheckpoints of this run that are newer than the change may have learned from wrong tokens. "
        "Put the files back, or make them again with `blackmamba data tokenize`; then start the run again."
        + (f" Files below {cache_folder()} are local copies: remove them, and the run fetches them again." * copies)
    )
