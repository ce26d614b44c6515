"""The mixture of a branch: what its trunk read up to the branch, then the sources and weights of another mixture.

A source that both hold goes on where the trunk left it, so that none of its text is read twice before an epoch ends.
The other sources of the new mixture begin. The position in the data stays the trunk's, as do sample numbers.
"""

from collections.abc import Mapping

from megatron_blackmamba.formats.mixture import Mixture, MixtureError, Phase, content_fingerprint


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
        sources[name] = ours.model_copy(update={"max_epochs": source.max_epochs or ours.max_epochs})

    def weights(given: Mapping[str, float]) -> dict[str, float]:
        """Return weights of `then` under the branch's names. A share follows from tokens × weight."""
        return {name_of[name]: weight * factor_of[name] for name, weight in given.items()}

    begun = dict.fromkeys(sources, 0.0) | weights({source.name: source.weight for source in then.sources})
    phases = [phase for phase in trunk.phases if phase.start(sequence_length) < first]
    phases.append(Phase(from_sample=first, weights=begun))
    for phase in then.phases:
        phases.append(Phase(from_sample=first + phase.start(sequence_length), weights=weights(phase.weights)))
    return Mixture(sources=list(sources.values()), phases=phases, max_overlap=then.max_overlap)
