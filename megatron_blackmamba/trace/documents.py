"""The documents inside the samples of a run, and the samples that hold a document."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_blackmamba.config import read_saved
from megatron_blackmamba.data import DataPlan, build, refuse_changed_data
from megatron_blackmamba.data.datasets import EpochDataset, HeldOutDataset
from megatron_blackmamba.data_tools.inspection import text_of_ids, tokenizer_of
from megatron_blackmamba.data_tools.provenance import Origin, origin, places_of, source_called
from megatron_blackmamba.formats.branches import trunks_of
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.tokenizer import Tokenizer
from megatron_blackmamba.trace.steps import Steps, TraceError


@dataclass(frozen=True)
class Piece:
    """The part of a document that lies in a sample."""

    source: str
    shard: Shard
    document: int
    """Its number in the shard, from 0."""
    origin: Origin
    position: int
    """Where in the sample it begins."""
    first_token: int
    """Where in the document it begins."""
    document_tokens: int
    ids: np.ndarray

    @property
    def whole(self) -> bool:
        return len(self.ids) == self.document_tokens


@dataclass(frozen=True)
class Reading:
    """One sample in which a document was read, wholly or in part."""

    step: int
    sample: int
    epoch: int
    first_token: int
    tokens: int
    document_tokens: int
    run: str = ""
    """A trunk with sequences of another length, whose samples have other numbers."""


class Tracer:
    """The data of a run, opened as training opens it."""

    def __init__(self, run: Path, until: int | None = None) -> None:
        """Open a run, or its steps up to one, which a branch goes on from."""
        folder = RunFolder(run)
        if not folder.config.is_file() or not folder.data_plan.is_file():
            raise TraceError(f"{run}: not a run: it has no {folder.config.name} and {folder.data_plan.name}")
        self.run, self.steps = run, Steps.of_run(run)
        self.config = config = read_saved(folder.config)
        if config.data.kind == "synthetic":
            raise TraceError(f"{run}: trained on synthetic data, which has no documents")
        self.plan: DataPlan = build(
            config.data, vocab_size=config.model.vocab_size, total_samples=max(1, self.steps.end)
        )
        refuse_changed_data(json.loads(folder.data_plan.read_bytes()), self.plan.record, self.steps.end)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._until = until

    def pieces(self, sample: int) -> Iterator[Piece]:
        """Yield the documents of a sample in order; together they are its inputs and its last label."""
        source, within = self.plan.train.schedule.locate(sample)
        dataset = self._dataset(source)
        place, left = dataset.place(within), dataset.sequence_length + 1
        position = 0
        while left:
            shard, inside = dataset.stream.locate(place)
            document = shard.document_at(inside)
            start, length = shard.span(document)
            taken = min(left, start + length - inside)
            yield Piece(
                source=dataset.name,
                shard=shard,
                document=document,
                origin=origin(shard.manifest, document),
                position=position,
                first_token=inside - start,
                document_tokens=length,
                ids=shard.document(document)[inside - start : inside - start + taken],
            )
            position, left = position + taken, left - taken
            place = (place + taken) % dataset.stream.tokens

    def text(self, piece: Piece) -> str:
        """Return the text of a piece; a character cut at its ends is shown as a replacement character."""
        manifest = piece.shard.manifest
        if manifest.tokenizer_sha256 not in self._tokenizers:
            self._tokenizers[manifest.tokenizer_sha256] = tokenizer_of(piece.shard)
        return text_of_ids(piece.ids, self._tokenizers[manifest.tokenizer_sha256])

    def readings(self, file: str, record: int) -> list[Reading]:
        """Return the samples in which training has read a document, in the order of training; a trunk's too."""
        others = [trunk for trunk in trunks_of(RunFolder(self.run)) if trunk.relength]
        found: list[Reading] = []
        refusals: list[TraceError] = []
        for trunk in (*reversed(others), None):
            try:
                tracer = Tracer(trunk.run.root, trunk.step) if trunk else self
                found += tracer._own_readings(file, record)
            except TraceError as error:  # a run may have had other documents than its trunk
                refusals.append(error)
        if len(refusals) > len(others):
            raise refusals[-1]
        return found

    def _own_readings(self, file: str, record: int) -> list[Reading]:
        """Return the readings with this run's numbers of samples."""
        found = [
            reading
            for source, shard, document in self._documents(file, record)
            for reading in self._readings_of(source, shard, document)
            if self._until is None or reading.step <= self._until
        ]
        if self._until is not None:
            found = [replace(reading, run=str(self.run)) for reading in found]
        return sorted(found, key=lambda reading: reading.sample)

    def _documents(self, file: str, record: int) -> Iterator[tuple[int, Shard, int]]:
        shards = [
            (source, shard)
            for source in range(len(self.plan.train.datasets))
            for shard in self._dataset(source).stream.shards
        ]
        raw = source_called(file, (each for _, shard in shards for each in shard.manifest.sources))
        places = [
            (source, shard, place)
            for source, shard in shards
            for place in (places_of(shard.manifest, raw, record) if raw else ())
        ]
        if not places:
            why = "the file has no such record, or it was skipped" if raw else f"{self.run} has no such raw file"
            if held_out := self._held_out_in(file, record):
                why = f"it is in the validation set of source {held_out!r}"
            raise TraceError(f"{file}:{record}: no training document: {why}")
        yield from places

    def _held_out_in(self, file: str, record: int) -> str | None:
        """Return the source whose validation set holds a document."""
        for name, dataset in self.plan.validation.items():
            assert isinstance(dataset, HeldOutDataset)
            raw = source_called(file, (each for shard in dataset.stream.shards for each in shard.manifest.sources))
            if raw and any(places_of(shard.manifest, raw, record) for shard in dataset.stream.shards):
                return name
        return None

    def _readings_of(self, source: int, shard: Shard, document: int) -> Iterator[Reading]:
        dataset, schedule, end = self._dataset(source), self.plan.train.schedule, self.steps.end
        start, length = shard.span(document)
        start += dataset.stream.start_of(shard)
        for part in dataset.order.parts(start, length, schedule.counts(end)[source]):
            sample = schedule.sample_of(source, part.sample, end)
            step = None if sample is None else self.steps.step_of(sample)
            if sample is not None and step is not None:
                yield Reading(step, sample, part.epoch + 1, part.first_token, part.tokens, length)

    def _dataset(self, source: int) -> EpochDataset:
        dataset = self.plan.train.datasets[source]
        assert isinstance(dataset, EpochDataset)
        return dataset
