"""Local copies of token shards in object storage, for readers that need files."""

import re
from pathlib import Path

from megatron_blackmamba.formats.remote import (
    RemoteError,
    cached,
    download,
    file_sha256,
    files_below,
    files_matching,
    one_at_a_time,
)
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX, SUFFIXES, Shard, ShardError, ShardManifest, beside

TOKENIZER = "tokenizer.json"


def fetch_shards(url: str) -> list[Path]:
    """Return the prefixes of local copies of all shards below a URL, or of the one shard with this name.

    Copies of the manifest there are used again if their sizes are right. Processes of one machine share them: the
    first one fetches.
    """
    url = url.rstrip("/")
    for suffix in SUFFIXES:
        url = url.removesuffix(suffix)
    found = files_below(url) or files_below(f"{url}{MANIFEST_SUFFIX}")
    inside = url
    if not found and any(mark in url for mark in "*?["):
        found = files_matching(url) or files_matching(f"{url}{MANIFEST_SUFFIX}")
        inside = re.split(r"[*?[]", url)[0]
    manifests = sorted(n for n in found if n.endswith(MANIFEST_SUFFIX) and "/." not in n.removeprefix(inside))
    prefixes = [_fetch(name.removesuffix(MANIFEST_SUFFIX)) for name in manifests]
    for folder, prefix in dict(zip((name.rpartition("/")[0] for name in manifests), prefixes, strict=True)).items():
        _fetch_tokenizer(folder, ShardManifest.read(beside(prefix, MANIFEST_SUFFIX)).tokenizer_sha256)
    return prefixes


def _fetch(url: str) -> Path:
    prefix = cached(url)
    with one_at_a_time(prefix):
        manifest_path = beside(prefix, MANIFEST_SUFFIX)
        fresh = beside(prefix, f"{MANIFEST_SUFFIX}.new")
        fresh.unlink(missing_ok=True)
        download(url + MANIFEST_SUFFIX, fresh)
        manifest = ShardManifest.read(fresh)
        wanted = {".bin": manifest.bin_sha256, ".idx": manifest.idx_sha256}
        known = ShardManifest.read(manifest_path) if manifest_path.exists() else None
        same = known is not None and (known.bin_sha256, known.idx_sha256) == tuple(wanted.values())
        if not same or not _is_whole(prefix):
            manifest_path.unlink(missing_ok=True)
            for suffix, sha256 in wanted.items():
                path = beside(prefix, suffix)
                path.unlink(missing_ok=True)
                _download(url + suffix, path, sha256)
        fresh.replace(manifest_path)
    return prefix


def _is_whole(prefix: Path) -> bool:
    """Return whether local copies have the sizes that their manifest and index announce."""
    try:
        Shard.open(prefix)
    except (ShardError, OSError):
        return False
    return True


def _download(url: str, path: Path, sha256: str) -> None:
    """Download a file of a shard; once more if it is damaged, since the part that was continued may have been."""
    for _ in range(2):
        download(url, path)
        if file_sha256(path) == sha256:
            return
        path.unlink()
    raise RemoteError(f"{url}: its sha256 is not that of its manifest. Upload the shard again")


def _fetch_tokenizer(folder: str, sha256: str) -> None:
    """Fetch the tokenizer beside shards, unless the copy is the one that made them."""
    path = cached(f"{folder}/{TOKENIZER}")
    with one_at_a_time(path):
        if path.exists() and file_sha256(path) == sha256:
            return
        path.unlink(missing_ok=True)
        if files_below(f"{folder}/{TOKENIZER}"):
            download(f"{folder}/{TOKENIZER}", path)
