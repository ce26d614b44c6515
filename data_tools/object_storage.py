"""Shards of `tokenize` in object storage."""

from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.formats.remote import cached, download, file_system, files_below, one_at_a_time, upload
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX, SUFFIXES, ShardManifest, beside, idx_bytes

TOKENIZER = "tokenizer.json"
TRAINED = "tokenizer.trained.json"
"""The record of what --train-tokenizer was asked for."""


@dataclass(frozen=True)
class RemoteFolder:
    """The output folder in object storage, and the local folder in which shards are made for it."""

    url: str
    folder: Path

    @classmethod
    def open(cls, url: str) -> "RemoteFolder":
        """Fetch the manifests of finished shards. Other processes of this machine may use the same local folder."""
        url = url.rstrip("/")
        remote = cls(url, cached(url) / ".making")
        remote.folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(remote.folder):
            there = {name.rpartition("/")[2]: name for name in files_below(url) if name.rpartition("/")[0] == url}
            for stale in remote.folder.glob(f"shard_*{MANIFEST_SUFFIX}"):
                if stale.name not in there and not _is_being_published(stale):
                    stale.unlink(missing_ok=True)
            for name, object_url in there.items():
                local = remote.folder / name
                if name.endswith((MANIFEST_SUFFIX, TOKENIZER, TRAINED)) and not _is_being_published(local):
                    download(object_url, local)
        return remote

    def has(self, prefix: Path) -> bool:
        """Return whether a shard is there, by its manifest and the sizes of its files."""
        manifest_path = beside(prefix, MANIFEST_SUFFIX)
        if not manifest_path.exists():
            return False
        manifest = ShardManifest.read(manifest_path)
        wanted = {".bin": manifest.bin_bytes, ".idx": idx_bytes(manifest.documents, manifest.documents)}
        return all(self._size(prefix, suffix) == size for suffix, size in wanted.items())

    def _size(self, prefix: Path, suffix: str) -> int | None:
        url = f"{self.url}/{prefix.name}{suffix}"
        found = files_below(url).get(url)
        return None if found is None else int(found["size"])

    def publish(self, prefix: Path) -> None:
        """Upload a finished shard, its manifest last, and remove the local tokens."""
        if beside(prefix, ".bin").exists():
            self._remove(prefix, MANIFEST_SUFFIX)  # of the shard that this one replaces
        for suffix in (".bin", ".idx", MANIFEST_SUFFIX):
            local = beside(prefix, suffix)
            if local.exists():
                upload(local, f"{self.url}/{prefix.name}{suffix}")
        for suffix in (".idx", ".bin"):
            beside(prefix, suffix).unlink(missing_ok=True)

    def publish_tokenizer(self) -> None:
        """Upload the tokenizer, and the record of its training if it has one."""
        for name in (TOKENIZER, TRAINED):
            if (self.folder / name).exists():
                upload(self.folder / name, f"{self.url}/{name}")

    def remove(self, prefix: Path) -> None:
        """Remove a shard that no input makes any more."""
        for suffix in SUFFIXES:
            self._remove(prefix, suffix)

    def _remove(self, prefix: Path, suffix: str) -> None:
        if self._size(prefix, suffix) is not None:
            fs, path = file_system(f"{self.url}/{prefix.name}{suffix}")
            fs.rm_file(path)


def _is_being_published(manifest_path: Path) -> bool:
    """Return whether the tokens of a manifest are here: another process (of --array) uploads them, or was killed."""
    name = manifest_path.name
    return name.endswith(MANIFEST_SUFFIX) and manifest_path.with_name(name.replace(MANIFEST_SUFFIX, ".bin")).exists()
