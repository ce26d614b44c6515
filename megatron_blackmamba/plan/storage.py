"""The disk space of a run: its checkpoints, and the tokenized corpus it reads."""

from dataclasses import dataclass

from megatron_blackmamba.config import ParallelConfig, RunConfig
from megatron_blackmamba.formats.shards import token_dtype


@dataclass(frozen=True)
class Storage:
    """Bytes on disk, and steps between writing them."""

    checkpoint: int
    kept: int
    """Checkpoints at the end of the run."""
    every: int
    """Steps between checkpoints; 0: only one at the end."""
    corpus: int
    """The whole tokenized corpus; 0 if its size is not known."""
    read_per_step: int

    @property
    def checkpoints(self) -> int:
        """Bytes of all checkpoints at the end, and of one more that is being written."""
        return (self.kept + 1) * self.checkpoint


def of_run(config: RunConfig, corpus_tokens: float, first: int = 0, steps: int | None = None) -> Storage:
    """Return the space that a run needs, for a corpus of so many tokens.

    first, steps: The step that a branch begins after, and the number of its own steps.
    """
    width = token_dtype(config.model.vocab_size).itemsize
    every = config.checkpoint.every
    read = width * config.tokens_per_step if config.data.kind == "mixture" else 0
    corpus = round(width * corpus_tokens)
    return Storage(checkpoint_bytes(config), len(kept_steps(config, first, steps)), every, corpus, read)


def kept_steps(config: RunConfig, first: int = 0, steps: int | None = None) -> set[int]:
    """Return the steps whose checkpoints are on disk when a run of so many steps ends that begins after `first`."""
    settings, end = config.checkpoint, first + (config.steps if steps is None else steps)
    saved = [*filter(settings.is_due, range(first + 1, end)), end]
    return {*filter(settings.is_kept, saved), *saved[-settings.keep_last :]}


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the size of the weights, and of the optimizer's state, main and averaged weights in full precision."""
    from megatron_blackmamba.plan import memory, parameters

    whole = memory.state_of(config.model_copy(update={"parallel": ParallelConfig()}), world_size=1, rank=0)
    full = 8 if config.training.precision == "fp64" else 4
    copies = config.optimizer.distributed + bool(config.training.ema)
    return whole.weights + full * (whole.numbers + copies * parameters.count(config).total)
