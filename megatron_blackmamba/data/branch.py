"""The mixture of a branch: what its trunk read up to the branch, then the sources and weights of another mixture.

A source that both hold goes on where the trunk left it, so that none of its text is read twice before an epoch ends.
The other sources of the new mixture begin. The position in the data stays the trunk's, as do sample numbers.

A branch with another sequence length has a numbering of its own. Its mixture says what the trunk has read of each
source, so that it reads the rest of the epoch where that is possible (`formats/reads.py`).
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megatron_blackmamba.formats.mixture import Mixture, MixtureError, Phase, content_fingerprint
from megatron_blackmamba.formats.reads import Read
from megatron_blackmamba.formats.source_schedule import Schedule


def continued(trunk: Mixture, then: Mixture, first: int, sequence_length: int) -> Mixture:
    """Return the mixture that equals `trunk` before sample `first`, and `then` from there on.

    Phases of `then` count from the branch. Two sources are one if they hold the same tokens, whatever their names.
    """
    before, after = trunk.open_all(), then.open_all()
    known = {content_fingerprint(shards): name for name, (shards, _) in before.items()}
    sources = {source.name: source for source in trunk.with_absolute_paths()}
    name_of: dict[str, str] = {}
    factor_of: dict[str, float] = {}
    for source in then.with_absolute_paths():
        shards = after[source.name][0]
        name = known.get(content_fingerprint(shards))
        if name is None:
            if source.name in before:
                raise MixtureError(
                    f"source {source.name!r} holds other text than the trunk's source of that name, and the branch"
                    " needs both. Rename it in the mixture of the branch"
                )
            name_of[source.name], factor_of[source.name] = source.name, 1.0
            sources[source.name] = source.model_copy(update={"weight": 0.0})
            continue
        ours, measured = sources[name], sum(shard.manifest.tokens for shard in shards)
        name_of[source.name] = name
        factor_of[source.name] = (source.tokens or measured) / (ours.tokens or measured)
        held_out = source if source.validation else ours
        paths = {"shards": held_out.shards, "validation": held_out.validation}  # the same tokens to train on
        sources[name] = ours.model_copy(update={**paths, "max_epochs": source.max_epochs or ours.max_epochs})

    def weights(given: Mapping[str, float]) -> dict[str, float]:
        """Return weights of `then` under the branch's names. A share follows from tokens × weight."""
        return {name_of[name]: weight * factor_of[name] for name, weight in given.items()}

    begun = dict.fromkeys(sources, 0.0) | weights({source.name: source.weight for source in then.sources})
    phases = [phase for phase in trunk.phases if phase.start(sequence_length) < first]
    phases.append(Phase(from_sample=first, weights=begun))
    for phase in then.phases:
        phases.append(Phase(from_sample=first + phase.start(sequence_length), weights=weights(phase.weights)))
    return Mixture(
        sources=list(sources.values()), phases=phases, max_overlap=then.max_overlap, read_before=trunk.read_before
    )


def after(record: Mapping[str, Any], first: int, then: Mixture) -> Mixture:
    """Return the mixture of a branch of another length, which has read what a trunk has before sample `first`.

    record: The trunk's data (as DataPlan.record), which need not be there anymore.
    """
    return then.independent().model_copy(update={"read_before": _read_before(record, first)})


def _read_before(record: Mapping[str, Any], first: int) -> dict[str, list[Read]]:
    """Return what a run and those before it have read of each source, by content."""
    read = {
        content: [Read.model_validate(each) for each in reads]
        for content, reads in record.get("read_before", {}).items()
    }
    prints = {source["name"]: source["fingerprint"] for source in record["sources"]}
    shares = [[Fraction(phase["shares"][name]) for name in prints] for phase in record["phases"]]
    schedule = Schedule(shares, [phase["from_sample"] for phase in record["phases"]], list(prints.values()))
    for content, samples in zip(prints.values(), schedule.counts(first), strict=True):
        if samples:
            now = Read(sequence_length=record["sequence_length"], samples=samples)
            read[content] = [*read.get(content, []), now]
    return read
