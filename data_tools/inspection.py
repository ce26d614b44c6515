"""Documents of token shards as text again, each with the raw record it came from."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_blackmamba.data_tools.provenance import Origin, origin
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.shards import Shard, ShardError
from megatron_blackmamba.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Document:
    """One document of a shard."""

    shard: Shard
    number: int
    ids: np.ndarray
    origin: Origin
    text: str


def read_documents(
    paths: Sequence[str],
    *,
    numbers: Sequence[int] = (),
    count: int = 3,
    seed: int | None = None,
    tokenizer: str | None = None,
) -> Iterator[Document]:
    """Read documents of one shard: the numbered ones, or the first `count`, or random ones if a seed is given.

    Documents are numbered from 0, through all shards given in turn.
    """
    shards = find_shards(*paths)
    starts = np.cumsum([0, *(shard.manifest.documents for shard in shards)])
    total = int(starts[-1])
    if not numbers:
        everything = range(total)
        numbers = (
            sorted(random.Random(seed).sample(everything, min(count, total)))
            if seed is not None
            else everything[:count]
        )
    loaded: dict[str, Tokenizer] = {}
    for number in numbers:
        if not 0 <= number < total:
            raise InputError(f"document {number}: there are {total}, numbered from 0 to {total - 1}")
        at = int(np.searchsorted(starts, number, side="right")) - 1
        shard, place = shards[at], number - int(starts[at])
        sha256 = shard.manifest.tokenizer_sha256
        if sha256 not in loaded:
            loaded[sha256] = tokenizer_of(shard, tokenizer)
        try:
            ids = shard.document(place)
            _ = ids[-1]
        except ShardError:
            raise
        except (IndexError, ValueError):
            raise InputError(f"{shard.idx_path}: is damaged: `blackmamba data verify` says where") from None
        yield Document(shard, place, ids, origin(shard.manifest, place), text_of_ids(ids, loaded[sha256]))


def text_of_ids(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return token ids as text, without an EOD at their end."""
    return tokenizer.decode(ids[:-1] if len(ids) and ids[-1] == tokenizer.eod_id else ids)


def tokenizer_of(shard: Shard, given: str | None = None) -> Tokenizer:
    """Return the tokenizer of a shard: its tokenizer.json, or the given one if its fingerprint matches."""
    manifest = shard.manifest
    name: str | Path = given if given is not None else shard.prefix.parent / "tokenizer.json"
    if given is None and not Path(name).exists():
        raise InputError(f"{name}: missing; name the tokenizer of these shards ({manifest.tokenizer}) with --tokenizer")
    tokenizer = load_tokenizer(name, eod=manifest.eod_id)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise InputError(
            f"{name}: sha256 {tokenizer.sha256[:12]}, but {shard.prefix} was made with {manifest.tokenizer}, "
            f"sha256 {manifest.tokenizer_sha256[:12]}: another tokenizer would show different text"
        )
    return tokenizer
