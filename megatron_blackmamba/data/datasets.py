"""The windows of one source each, computed when they are read: no index of documents to build, cache or load.

As in megatron-core's GPTDataset, a sample is a window of sequence_length inputs and their labels; each label is the
next token. Consecutive windows share one token: the last label of one is the first input of the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_blackmamba.data.order import WindowOrder
from megatron_blackmamba.data.stream import TokenStream
from megatron_blackmamba.formats.reads import Read, SourceEpochs

Sample = Mapping[str, Any]


class DataError(ValueError):
    """Data that cannot be served as asked; the message says which source and what to do."""


class WindowDataset:
    """Base of the sources: numbered windows of tokens, each a dict of tensors [S]."""

    def __init__(self, name: str, fingerprint: str, samples: int, sequence_length: int) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.samples = samples
        self.sequence_length = sequence_length
        self.masked_after: int | None = None
        """A token whose label does not count in the loss."""

    def __len__(self) -> int:
        return self.samples

    def window(self, index: int) -> np.ndarray:
        """Return the tokens of sample `index`: one more than its labels, at most sequence_length + 1."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.sequence_length
        window = torch.from_numpy(self.window(int(index)))
        labels = len(window) - 1
        if labels < length:  # the tail of a held-out set
            window = torch.nn.functional.pad(window, (0, length - labels))
        if labels == length and self.masked_after is None:
            mask = torch.ones(length)
        else:
            counts = torch.arange(length) < labels
            if self.masked_after is not None:
                counts &= window[:-1] != self.masked_after
            mask = counts.float()
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": mask}


class EpochDataset(WindowDataset):
    """A source in training: in every epoch each window once (`WindowOrder`).

    Everything follows from (seed, content, epoch, reads): nothing is stored, and there is no last epoch.
    """

    def __init__(
        self,
        name: str,
        stream: TokenStream,
        fingerprint: str,
        sequence_length: int,
        *,
        seed: int,
        samples: int,
        max_epochs: float | None = None,
        reads: Sequence[Read] = (),
    ) -> None:
        """Serve a source.

        Args:
            samples: Number of samples that the run reads.
            max_epochs: Refuse a run that plans to read more. One that passes over samples after a spike reads on past
                the plan, and none more often.
            reads: What earlier runs with other sequence lengths have read.
        """
        super().__init__(name, fingerprint, samples, sequence_length)
        self.stream = stream
        if stream.tokens < sequence_length:
            raise DataError(
                f"source {name!r}: {stream.tokens} tokens are less than one sample of {sequence_length}; "
                "give it more data, or train on shorter sequences"
            )
        self._epochs = SourceEpochs(stream.tokens, sequence_length, reads)
        self.order = WindowOrder(self._epochs, f"{seed} {fingerprint}")
        if max_epochs is not None and samples > self._epochs.most_samples(max_epochs):
            raise DataError(
                f"source {name!r}: the plan reads {samples} samples, {self.epochs(samples):.4f} epochs of "
                f"{stream.tokens} tokens, and its max_epochs is {max_epochs}: lower its weight, train on fewer tokens, "
                "or raise max_epochs"
            )

    @property
    def windows(self) -> int:
        return self.order.windows

    def epochs(self, samples: int) -> float:
        """Return how often this number of samples and the earlier runs read each token, on average."""
        return self._epochs.epochs(samples)

    def read_again(self, samples: int) -> float:
        """Return about how many tokens of these samples earlier runs have read in an epoch that they did not end."""
        return self._epochs.read_again(samples)

    def place(self, index: int) -> int:
        """Return the position of the first token of sample `index`."""
        if index < 0:
            raise IndexError(f"sample {index} of source {self.name!r}")
        return self.order.place(index)

    def window(self, index: int) -> np.ndarray:
        return self.stream.read(self.place(index), self.sequence_length + 1)


class HeldOutDataset(WindowDataset):
    """A source in validation: its held-out tokens once, in order; every label counts once, the last window is short."""

    def __init__(self, name: str, stream: TokenStream, fingerprint: str, sequence_length: int) -> None:
        if stream.tokens < 2:
            raise DataError(
                f"source {name!r}: its validation shards hold {stream.tokens} tokens, nothing to predict. Hold out more"
                " text (`data tokenize --hold-out`), or leave out its `validation`"
            )
        super().__init__(name, fingerprint, -(-(stream.tokens - 1) // sequence_length), sequence_length)
        self.stream = stream

    def window(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} held-out samples of {self.name!r}")
        start = index * self.sequence_length
        return self.stream.read(start, min(self.sequence_length + 1, self.stream.tokens - start))
