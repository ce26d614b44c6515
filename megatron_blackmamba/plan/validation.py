"""Notes on what a run's validation leaves out: sources without validation text, or text that no step reads."""

from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.mixture import Mixture


def notes(config: RunConfig) -> Iterator[str]:
    """Yield what to say about the validation of a run on a mixture."""
    mixture, every = config.data.mixture or "", config.training.evaluate_every
    if config.data.kind == "synthetic" or not Path(mixture).is_file():
        return
    sources = Mixture.read(mixture).sources
    without = [source.name for source in sources if not source.validation]
    if not every and len(without) < len(sources):
        yield "the mixture has validation text, which training.evaluate_every=0 never reads"
    elif every and len(without) == len(sources):
        yield (
            f"training.evaluate_every={every} measures nothing, since no source of {mixture} has `validation`:"
            " `blackmamba data tokenize --hold-out 1%` makes such shards"
        )
    elif every and without:
        yield f"no validation loss of {', '.join(without)}: name shards under its `validation` in {mixture}"
