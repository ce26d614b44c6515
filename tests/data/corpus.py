"""Small shards for the tests, whose every token is another number: what was read says where it lay."""

import hashlib
from pathlib import Path

import numpy as np
import yaml

from megatron_blackmamba.formats.atomic import atomic_file, write_text
from megatron_blackmamba.formats.shards import MANIFEST_SUFFIX, ShardManifest, beside, write_idx
from megatron_blackmamba.settings import DataConfig

VOCAB = 2**30


def write_shard(
    prefix: Path,
    first_token: int,
    tokens: int,
    *,
    document: int = 37,
    tokenizer: str = "a" * 64,
    vocab: int = VOCAB,
    eod: int = 0,
) -> Path:
    """A shard of the numbers first_token, first_token + 1, … cut into documents."""
    ids = np.arange(first_token, first_token + tokens, dtype=np.int32)
    lengths = [document] * (tokens // document) + [tokens % document] * (tokens % document > 0)
    with atomic_file(beside(prefix, ".bin")) as file:
        file.write(ids.tobytes())
    with atomic_file(beside(prefix, ".idx")) as file:
        idx_sha256 = write_idx(file, np.dtype("int32"), np.array(lengths))
    ShardManifest(
        documents=len(lengths),
        tokens=tokens,
        dtype="int32",
        bin_sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
        idx_sha256=idx_sha256,
        eod_id=eod,
        tokenizer="numbers",
        tokenizer_sha256=tokenizer,
        vocab_size=vocab,
        sources=[],
    ).write(beside(prefix, MANIFEST_SUFFIX))
    return prefix


def write_mixture(folder: Path, sources: list[dict], phases: list[dict] | None = None) -> Path:
    path = folder / "mixture.yaml"
    write_text(path, yaml.safe_dump({"sources": sources, "phases": phases or []}))
    return path


def three_sources(folder: Path) -> Path:
    """A mixture of small sources of 2, 1 and 1 shards; the first has one held out besides."""
    write_shard(folder / "a/one", 0, 1000)
    write_shard(folder / "a/two", 1000, 503)
    write_shard(folder / "a/held_out", 2000, 100)
    write_shard(folder / "b/one", 10_000, 700)
    write_shard(folder / "c/one", 20_000, 90)
    return write_mixture(
        folder,
        [
            {"name": "a", "shards": "a", "validation": "a/held_out", "weight": 1},
            {"name": "b", "shards": "b", "weight": 0.5},
            {"name": "c", "shards": "c", "weight": 3},
        ],
    )


def data_config(mixture: Path, sequence_length: int = 16, **more) -> DataConfig:
    return DataConfig(kind="mixture", mixture=str(mixture), sequence_length=sequence_length, **more)
