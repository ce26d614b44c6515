"""Shards against their manifests: fingerprints, counts, index, token range, EOD at every end and nowhere else."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from megatron_blackmamba.data_tools.overlaps import sample_of
from megatron_blackmamba.data_tools.progress import Count, reading
from megatron_blackmamba.data_tools.rejects import EMPTY, RejectLog, Tolerance
from megatron_blackmamba.formats.find_shards import shards_at
from megatron_blackmamba.formats.remote import file_sha256, is_remote, local
from megatron_blackmamba.formats.shards import (
    MANIFEST_SUFFIX,
    Shard,
    ShardError,
    ShardManifest,
    SourceFile,
    beside,
    check_idx,
    missing_parts,
    read_idx,
    shard_names,
    shard_prefix,
)
from megatron_blackmamba.tokenizer import Tokenizer

_CHUNK_BYTES = 8 << 20
_BLOCK_TOKENS = 4 << 20
ADOPTED = "adopted"  # options of a shard that another tool made: its EODs are not checked


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one shard: its problems, if any."""

    prefix: Path
    documents: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Findings that may be intended or a mistake."""


@dataclass(frozen=True)
class Scan:
    """One pass over a .bin."""

    sha256: str
    tokens: int
    smallest: int
    largest: int
    eod_misplaced: str | None


def verify(paths: Sequence[str | Path], *, quick: bool = False, cores: int = 1, quiet: bool = False) -> list[Verdict]:
    """Return a verdict on every shard and on every incomplete one; `quick` does not read the tokens."""
    prefixes = _prefixes(paths)
    total = sum(_size(beside(prefix, ".bin")) for prefix in prefixes)
    read = [0] * len(prefixes)

    def check(slot: int) -> Verdict:
        return verify_shard(prefixes[slot], quick=quick, advance=partial(read.__setitem__, slot))

    with (
        reading(total, lambda: Count(sum(read), 0, 0), quiet=quiet or quick),
        ThreadPoolExecutor(cores) as pool,
    ):
        verdicts = list(pool.map(check, range(len(prefixes))))
    _compare(verdicts)
    _find_gaps(verdicts, [folder for folder in map(local, paths) if folder.is_dir()])
    return verdicts


def verify_shard(prefix: Path, *, quick: bool = False, advance: Callable[[int], None] = lambda _: None) -> Verdict:
    """Return the verdict on one shard; an unreadable file is a problem, not an error."""
    try:
        return _verify_shard(prefix, quick, advance)
    except ShardError as error:
        return Verdict(prefix, problems=[str(error)])
    except OSError as error:
        return Verdict(prefix, problems=[f"{error.filename or prefix}: {error.strerror or error}"])


def _verify_shard(prefix: Path, quick: bool, advance: Callable[[int], None]) -> Verdict:
    shard = Shard.open(prefix)
    manifest = shard.manifest
    verdict = Verdict(prefix, manifest.documents, manifest.tokens)
    check_idx(shard.idx, bin_bytes=manifest.bin_bytes, name=str(shard.idx_path))
    problems = verdict.problems
    if shard.idx.dtype != np.dtype(manifest.dtype):
        problems.append(f"the index says {shard.idx.dtype}, the manifest {manifest.dtype}")
    if manifest.sources and sum(source.documents for source in manifest.sources) != manifest.documents:
        problems.append("the document counts of its sources do not add up")
    tokenizer = prefix.parent / "tokenizer.json"
    if tokenizer.exists() and file_sha256(tokenizer) != manifest.tokenizer_sha256:
        problems.append(f"was made with another tokenizer ({manifest.tokenizer}) than the tokenizer.json beside it")
    if quick:
        return verdict
    if file_sha256(shard.idx_path) != manifest.idx_sha256:
        problems.append(".idx: its sha256 is not the one in the manifest: the file was changed")
    eod_id = None if manifest.options.get(ADOPTED) else manifest.eod_id
    ends = np.cumsum(shard.idx.sequence_lengths, dtype=np.int64)
    scan = scan_tokens(shard.bin_path, np.dtype(manifest.dtype), ends, eod_id, _exact(manifest), advance)
    if scan.sha256 != manifest.bin_sha256:
        problems.append(".bin: its sha256 is not the one in the manifest: the file was changed")
    if scan.smallest < 0:
        problems.append(f".bin: holds token {scan.smallest}: ids begin at 0")
    if scan.largest >= manifest.vocab_size:
        problems.append(f".bin: holds token {scan.largest}, the vocabulary ends at {manifest.vocab_size - 1}")
    if scan.eod_misplaced:
        problems.append(scan.eod_misplaced)
    return verdict


def scan_tokens(
    path: Path,
    dtype: np.dtype,
    ends: np.ndarray,
    eod_id: int | None,
    exact: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> Scan:
    """Hash, largest token, and whether EOD stands at the `ends` of documents (`exact`: and nowhere else)."""
    digest = hashlib.sha256()
    tokens, smallest, largest, misplaced = 0, 0, -1, None
    with open(path, "rb") as file:
        while raw := file.read(_CHUNK_BYTES):
            digest.update(raw)
            chunk = np.frombuffer(raw, dtype)
            smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
            if eod_id is not None and misplaced is None:
                found = np.flatnonzero(chunk == eod_id) + tokens
                low, high = np.searchsorted(ends, (tokens + 1, tokens + len(chunk) + 1))
                misplaced = _misplaced(found, ends[low:high] - 1, exact)
            tokens += len(chunk)
            advance(tokens * dtype.itemsize)
    return Scan(digest.hexdigest(), tokens, smallest, largest, misplaced)


def adopt(
    path: str | Path, tokenizer: Tokenizer, *, made_from: Path | None = None, empty: Sequence[int] = ()
) -> ShardManifest:
    """Write the manifest of a .bin and .idx that another tool made, after checking that they are sound.

    Args:
        made_from: The token file that they expose; by default the .bin itself.
        empty: Its documents without a token, counted from 1, which are not in the index.
    """
    prefix = shard_prefix(path)
    _refuse_ours(beside(prefix, MANIFEST_SUFFIX))
    bin_path, idx_path = beside(prefix, ".bin"), beside(prefix, ".idx")
    if not bin_path.exists():
        raise ShardError(f"{bin_path}: no such file")
    idx = read_idx(idx_path)
    check_idx(idx, bin_bytes=bin_path.stat().st_size, name=str(idx_path))
    if idx.dtype.kind not in "iu":
        raise ShardError(f"{idx_path}: holds {idx.dtype}, not token ids")
    if not idx.documents:
        raise ShardError(f"{idx_path}: holds no document: leave it out")
    scan = scan_tokens(bin_path, idx.dtype, np.zeros(0, np.int64), None, False)
    if scan.smallest < 0 or scan.largest >= tokenizer.vocab_size:
        odd = scan.smallest if scan.smallest < 0 else scan.largest
        raise ShardError(
            f"{bin_path}: holds token {odd}, but {tokenizer.name} has {tokenizer.vocab_size}: "
            "it was made with another tokenizer"
        )
    made_from = made_from or bin_path
    itself = SourceFile(
        name=made_from.name,
        sha256=scan.sha256 if made_from.samefile(bin_path) else file_sha256(made_from),
        bytes=made_from.stat().st_size,
        records=idx.documents + len(empty),
        documents=idx.documents,
    )
    rejects = RejectLog(Tolerance(count=len(empty)))
    for record in empty:
        rejects.add(itself.name, str(made_from), record, EMPTY, "no token")
    manifest = ShardManifest(
        documents=idx.documents,
        tokens=scan.tokens,
        dtype=idx.dtype.name,
        bin_sha256=scan.sha256,
        idx_sha256=file_sha256(idx_path),
        eod_id=tokenizer.eod_id,
        tokenizer=tokenizer.short_name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        sources=[itself],
        rejected=rejects.counts,
        rejects=rejects.first,
        options={ADOPTED: True},
    )
    manifest = manifest.model_copy(update={"sample": sample_of(Shard(prefix, manifest))})
    manifest.write(beside(prefix, MANIFEST_SUFFIX))
    if not (prefix.parent / "tokenizer.json").exists():
        tokenizer.save(prefix.parent / "tokenizer.json")
    return manifest


def _refuse_ours(manifest_path: Path) -> None:
    """Refuse to adopt a shard that was tokenized here: its own manifest records more."""
    if manifest_path.exists() and not ShardManifest.read(manifest_path).options.get(ADOPTED):
        raise ShardError(
            f"{manifest_path}: was written here and records its raw files: `blackmamba data verify` checks it"
        )


def documents_without_eod(prefix: Path) -> int:
    """Return how many documents of an adopted shard do not end with EOD."""
    shard = Shard.open(prefix)
    starts = np.asarray(shard.idx.document_indices)
    full = np.flatnonzero(np.diff(starts) > 0)  # a document without a sequence ends nowhere
    ends = np.cumsum(shard.idx.sequence_lengths, dtype=np.int64)[starts[full + 1] - 1]
    missing = 0
    for start in range(0, shard.manifest.tokens, _BLOCK_TOKENS):
        block = shard.token_ids[start : start + _BLOCK_TOKENS]
        low, high = np.searchsorted(ends - 1, (start, start + len(block)))
        missing += int(np.count_nonzero(block[ends[low:high] - 1 - start] != shard.manifest.eod_id))
    return missing


def _misplaced(found: np.ndarray, expected: np.ndarray, exact: bool) -> str | None:
    absent = np.setdiff1d(expected, found, assume_unique=True)
    if len(absent):
        return f".bin: the document that ends with token {absent[0]} does not end with EOD"
    if exact and len(found) > len(expected):
        surplus = np.setdiff1d(found, expected, assume_unique=True)
        return f".bin: token {surplus[0]} is EOD in the middle of a document"
    return None


def _exact(manifest: ShardManifest) -> bool:
    return not manifest.options.get("special_text", False)


def _prefixes(paths: Iterable[str | Path]) -> list[Path]:
    """Return the prefix of every shard, .bin and .idx under the paths, each once, as it was first named, in order."""
    prefixes: dict[Path, Path] = {}
    empty = []
    for path in paths:
        found = shards_at(path)
        if not found and (is_remote(path) or Path(path).is_dir()):
            empty.append(f"{path}: no shard in this folder")
        for prefix in found or [shard_prefix(path)]:
            prefixes.setdefault(prefix.resolve(), prefix)
    if empty:
        raise ShardError("\n".join(empty))
    return [*prefixes.values()]


def _compare(verdicts: list[Verdict]) -> None:
    """Compare shards with each other: duplicate tokens, or two tokenizers in one folder."""
    first_with: dict[str, Path] = {}
    first_from: dict[str, Path] = {}
    first_of_file: dict[str, Path] = {}
    tokenizer_in: dict[Path, tuple[str, Path]] = {}
    for verdict in verdicts:
        if verdict.problems:
            continue
        manifest = ShardManifest.read(beside(verdict.prefix, MANIFEST_SUFFIX))
        other = first_with.setdefault(manifest.bin_sha256, verdict.prefix) if manifest.tokens else verdict.prefix
        if other != verdict.prefix:
            verdict.problems.append(f"has the same tokens as {other}: they would be read twice")
        files = sorted({source.sha256 for source in manifest.sources if source.documents})
        raw = json.dumps([files, manifest.options, manifest.tokenizer_sha256])
        other = first_from.setdefault(raw, verdict.prefix)
        if files and other != verdict.prefix and not verdict.problems:
            verdict.problems.append(f"was made from the same raw files as {other}: they would be read twice")
        if not verdict.problems:
            _compare_raw_files(verdict, manifest, first_of_file)
        sha256, one = tokenizer_in.setdefault(verdict.prefix.parent, (manifest.tokenizer_sha256, verdict.prefix))
        if sha256 != manifest.tokenizer_sha256:
            verdict.problems.append(f"was made with another tokenizer than {one.name} beside it")


def _compare_raw_files(verdict: Verdict, manifest: ShardManifest, first_of_file: dict[str, Path]) -> None:
    """Find raw files that are in two shards. Inside one folder that was reported when the folder was made."""
    decisive = [manifest.options, manifest.tokenizer_sha256]
    for source in manifest.sources:
        for raw in source.all_raw:
            other = first_of_file.setdefault(json.dumps([raw.sha256, *decisive]), verdict.prefix)
            if other.parent != verdict.prefix.parent:
                verdict.problems.append(f"was made from {raw.name}, which is in {other} too: it would be seen twice")
            elif other != verdict.prefix:
                verdict.notes.append(f"was made from {raw.name}, which is in {other} too")
            if raw is source and other != verdict.prefix:
                break  # then everything behind it is in the other shard too


def _find_gaps(verdicts: list[Verdict], given: list[Path]) -> None:
    """Find missing shards by the numbers of the others. Of shards that were named one by one, nobody expects more."""
    of_folder: dict[Path, dict[int, Verdict]] = {}
    for verdict in verdicts:
        found = re.fullmatch(r"shard_(\d{5})", verdict.prefix.name)
        if found and any(verdict.prefix.parent.is_relative_to(folder) for folder in given):
            of_folder.setdefault(verdict.prefix.parent, {})[int(found[1])] = verdict
    for folder, there in of_folder.items():
        sound = [number for number, verdict in there.items() if not verdict.problems]
        manifests = [ShardManifest.read(beside(there[number].prefix, MANIFEST_SUFFIX)) for number in sound]
        missing, expected = missing_parts(manifests)
        missing = sorted(set(missing) - set(there))
        last = there[max(there)]
        if missing:
            last.problems.append(
                f"{folder} lacks {shard_names(missing)} of {expected} shards: not made yet, or removed"
            )
        elif not expected and manifests:
            gone = sorted(set(range(1, max(there))) - set(there))
            lacks = f"{folder} lacks {shard_names(gone)}: not made yet, moved, or removed; " if gone else ""
            last.notes.append(f"{lacks}older manifests do not say how many shards there should be")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
