"""Documents held out of training, chosen by a hash: near-copies are on the same side, in every shard and every run."""

import base64
import csv
import hashlib
import re
import sys
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_blackmamba.data_tools.origins import COLUMNS, REMOVED
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.remote import file_sha256

Side = Literal["train", "validation"]
SIDES: tuple[Side, Side] = ("train", "validation")
_NO_WORD = re.compile(r"[\W_]+")
_ASCII_WORDS = "".join(chr(i).lower() if chr(i).isalnum() else " " for i in range(128))
"""What becomes of each character of ASCII."""


@dataclass(frozen=True)
class HoldOut:
    """One side of a split by hash."""

    share: float
    """Of the documents, for validation."""
    side: Side
    clusters: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    """For each document with copies, by file and record, the one that is kept, as FILE:RECORD."""
    clusters_sha256: str | None = None

    @property
    def recorded(self) -> dict[str, Any]:
        """Return what decides the content of a shard, for its manifest."""
        others = {"others": "by text"} if self.clusters_sha256 else {}  # once by name
        return {"share": self.share, "clusters": self.clusters_sha256, "side": self.side, **others}

    def takes(self, file: str, records: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        """Return for each document whether it is on this side."""
        clusters = self.clusters.get(file, {})
        kept = (clusters.get(str(record)) for record in records)
        keys = [name or normalized(text) for name, text in zip(kept, texts, strict=True)]
        hashes = np.array([_hash(key) for key in keys], np.uint64)
        held_out = hashes < np.uint64(int(self.share * (1 << 64)))
        return held_out if self.side == "validation" else ~held_out

    def of(self, files: Collection[str]) -> "HoldOut":
        """Return this with the clusters of some files only."""
        return replace(self, clusters={file: self.clusters[file] for file in files if file in self.clusters})


def normalized(text: str) -> str:
    """Return a text without case, punctuation and spacing; one without a letter stays as it is."""
    if text.isascii():  # the same, four times as fast
        return " ".join(text.translate(_ASCII_WORDS).split()) or text
    return _NO_WORD.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip() or text


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def hold_out_of(share: str, clusters: str | None, side: Side, files: Collection[str]) -> HoldOut:
    """Return one side of a split, after checking the share and reading the clusters of a deduplication."""
    number = _share(share)
    if clusters is None:
        return HoldOut(number, side)
    path = Path(clusters, REMOVED)
    if not path.is_file():
        raise InputError(f"{path}: no such file. Name the output folder of `blackmamba data dedup`")
    csv.field_size_limit(sys.maxsize)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, COLUMNS, delimiter="\t"):
            if row["reason"] == "near-duplicate":
                found[row["file"]][row["record"]] = row["resembles"]
    if found and not found.keys() & set(files):
        raise InputError(
            f"{path}: lists other files than the inputs, such as {next(iter(found))}. Name the deduplication of these "
            "inputs, and give both commands the same inputs"
        )
    for kept in {kept for of_file in found.values() for kept in of_file.values()}:
        kept_file, _, record = kept.rpartition(":")
        found[kept_file][record] = kept
    return HoldOut(number, side, dict(found), file_sha256(path))


def _share(text: str) -> float:
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise InputError(f"--hold-out {text}: give a share of the documents, such as 1% or 0.01")
    return share


def packed(mask: np.ndarray) -> str:
    """Return a mask as text for a manifest."""
    return f"{len(mask)}:" + base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 9)).decode()
