"""From a run's `data:` section to its samples, and to the record that says what they were."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_blackmamba.data.blend import MixtureDataset
from megatron_blackmamba.data.datasets import DataError, EpochDataset, HeldOutDataset, WindowDataset
from megatron_blackmamba.data.stream import TokenStream
from megatron_blackmamba.data.synthetic import HELD_OUT_SAMPLES, SyntheticDataset
from megatron_blackmamba.formats.mixture import Mixture, check_together, content_fingerprint
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.formats.source_schedule import Schedule
from megatron_blackmamba.settings import DataConfig

RECORD_VERSION = 1


@dataclass(frozen=True)
class DataPlan:
    """The data of a run: its ordered training samples, its validation sets, and a fingerprint of them."""

    train: MixtureDataset
    validation: dict[str, WindowDataset]
    record: dict[str, Any]
    """The content of data_plan.json: everything that determines the samples, plus the paths of the data."""
    shards: list[Shard] = field(default_factory=list)
    """All training and validation shards; empty for synthetic data."""

    @property
    def source_names(self) -> list[str]:
        return [dataset.name for dataset in self.train.datasets]

    def unused_rows(self, vocab_size: int, multiple: int) -> int:
        """Return the rows of a vocabulary beyond the tokens of the data; 0 if padding to a multiple explains them."""
        if not self.shards:
            return 0
        tokens = max(shard.manifest.vocab_size for shard in self.shards)
        return vocab_size - tokens if vocab_size > -(-tokens // multiple) * multiple else 0

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the endless sequence of samples; it is equal if and only if all samples are."""
        decisive = {key: self.record[key] for key in ("version", "kind", "seed", "sequence_length", "phases")}
        decisive["sources"] = [(source["name"], source["fingerprint"]) for source in self.record["sources"]]
        if "read_before" in self.record:
            decisive["read_before"] = self.record["read_before"]
        return hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16).hexdigest()

    def read_again(self) -> dict[str, tuple[float, int]]:
        """Return the tokens of each source that are read again before an epoch ends, and all that are read."""
        counts = self.train.schedule.counts(len(self.train))
        return {
            dataset.name: (dataset.read_again(samples), samples * dataset.sequence_length)
            for dataset, samples in zip(self.train.datasets, counts, strict=True)
            if isinstance(dataset, EpochDataset)
        }

    def describe(self) -> dict[str, Any]:
        """Return the record, with the fingerprint and the planned samples of each source."""
        planned = len(self.train)
        counts = self.train.schedule.counts(planned)
        takes = {
            dataset.name: {"samples": n, "epochs": dataset.epochs(n) if isinstance(dataset, EpochDataset) else None}
            for dataset, n in zip(self.train.datasets, counts, strict=True)
        }
        return {"fingerprint": self.fingerprint, **self.record, "planned": {"samples": planned, "sources": takes}}


def build(
    config: DataConfig,
    *,
    vocab_size: int,
    total_samples: int,
    eod_reset: int | None = None,
    mixture: Mixture | None = None,
) -> DataPlan:
    """Open everything a run reads. Takes as long as opening the shards does, whatever they hold.

    eod_reset: The token after which the model resets its state, which must be the one that ends the documents.
    mixture: The content of data.mixture, if that file is not written yet.
    """
    if total_samples < 1:
        raise DataError(f"a run of {total_samples} samples reads nothing: training.tokens is too small")
    if config.kind == "synthetic":
        if config.mask_first_token:
            raise DataError("data.mask_first_token=true: synthetic data has no documents. Set it to false")
        return _build_synthetic(config, vocab_size, total_samples)
    return _build_mixture(config, mixture or Mixture.read(config.mixture or ""), vocab_size, total_samples, eod_reset)


def _build_synthetic(config: DataConfig, vocab_size: int, total_samples: int) -> DataPlan:
    numbers = range(config.synthetic.sources)
    schedule = Schedule([[1] * len(numbers)])
    length, seed = config.sequence_length, config.seed

    def datasets(samples: Sequence[int], split: str) -> list[WindowDataset]:
        orders = [1 + i % config.synthetic.order for i in numbers]
        return [
            SyntheticDataset(i, orders[i], vocab_size, length, seed=seed, samples=samples[i], split=split)
            for i in numbers
        ]

    train = datasets(schedule.counts(total_samples), "train")
    held_out = datasets([HELD_OUT_SAMPLES] * len(numbers), "valid")
    sources = [{"name": dataset.name, "fingerprint": dataset.fingerprint} for dataset in train]
    return DataPlan(
        train=MixtureDataset(train, schedule, total_samples),
        validation={dataset.name: dataset for dataset in held_out},
        record=_record(config, sources, schedule),
    )


def _build_mixture(
    config: DataConfig, mixture: Mixture, vocab_size: int, total_samples: int, eod_reset: int | None
) -> DataPlan:
    together = mixture.open_all()
    opened = list(together.values())
    check_together(together, vocab_size, eod_reset, one_eod=config.mask_first_token, max_overlap=mixture.max_overlap)
    streams = [TokenStream.of_shards(shards) for shards, _ in opened]
    prints = [content_fingerprint(shards) for shards, _ in opened]
    schedule = mixture.schedule([stream.tokens for stream in streams], config.sequence_length, tie_break=prints)
    length = config.sequence_length
    train = [
        EpochDataset(
            source.name,
            stream,
            fingerprint,
            length,
            seed=config.seed,
            samples=samples,
            max_epochs=source.max_epochs,
            reads=mixture.read_before.get(fingerprint, ()),
        )
        for source, stream, fingerprint, samples in zip(
            mixture.sources, streams, prints, schedule.counts(total_samples), strict=True
        )
    ]
    if config.mask_first_token:
        for dataset in train:
            dataset.masked_after = opened[0][0][0].manifest.eod_id
    validation: dict[str, WindowDataset] = {
        source.name: HeldOutDataset(source.name, TokenStream.of_shards(shards), content_fingerprint(shards), length)
        for source, (_, shards) in zip(mixture.sources, opened, strict=True)
        if shards
    }
    sources = [
        {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "tokens": dataset.stream.tokens,
            "windows": dataset.windows,
            "shards": [_describe_shard(shard) for shard in shards],
            "validation": [_describe_shard(shard) for shard in held_out],
        }
        for dataset, (shards, held_out) in zip(train, opened, strict=True)
    ]
    record = _record(
        config, sources, schedule, _describe_tokenizer([shard for shards, _ in opened for shard in shards])
    )
    if mixture.read_before:
        record["read_before"] = {
            content: [read.model_dump() for read in reads] for content, reads in mixture.read_before.items()
        }
    shards = [shard for both in opened for part in both for shard in part]
    return DataPlan(MixtureDataset(train, schedule, total_samples), validation, record, shards)


def _record(
    config: DataConfig, sources: list[dict], schedule: Schedule, tokenizer: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "version": RECORD_VERSION,
        "kind": config.kind,
        "seed": config.seed,
        "sequence_length": config.sequence_length,
        "phases": [
            {
                "from_sample": start,
                "shares": {source["name"]: str(p) for source, p in zip(sources, blend.probabilities, strict=True)},
            }
            for start, blend in zip(schedule.starts, schedule.blends, strict=True)
        ],
        "tokenizer": tokenizer,
        "sources": sources,
    }


def _describe_shard(shard: Shard) -> dict[str, Any]:
    return {"path": str(shard.prefix), "tokens": shard.manifest.tokens, "sha256": shard.manifest.bin_sha256}


def _describe_tokenizer(shards: Sequence[Shard]) -> dict[str, Any]:
    """Describe the tokenizer of the data, with its path if its file is still in the folder of the shards."""
    manifest = shards[0].manifest
    beside = (shard.prefix.parent / "tokenizer.json" for shard in shards)
    file = next((path for path in beside if _sha256(path) == manifest.tokenizer_sha256), None)
    return {
        "name": manifest.tokenizer,
        "sha256": manifest.tokenizer_sha256,
        "eod_id": manifest.eod_id,
        "file": file and str(file.resolve()),
    }


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
