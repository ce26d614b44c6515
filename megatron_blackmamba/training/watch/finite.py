"""Locate the first non-finite value of a step: its rank and its micro-batch.

A good step needs no communication and no wait for the device. All ranks know when the loss or the gradient norm is not
finite; only then do they exchange more.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.runtime.world import World, gathered
from megatron_blackmamba.training.watch.ranks import Ranks


@dataclass(frozen=True)
class Sighting:
    """A micro-batch of a rank with a value that is not finite."""

    rank: int
    samples: tuple[int, int]
    what: str


class FirstSeen:
    """The loss of each micro-batch of a step, and the gradient at the input of this rank's first layer."""

    def __init__(self, world: World, model: LanguageModel) -> None:
        self.world, self.model = world, model
        self.begin()
        model.decoder.register_forward_pre_hook(self._before_layers)

    def begin(self) -> None:
        """Forget the step before."""
        self.samples: list[Tensor] = []
        self.losses: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def batch(self, sample_ids: Tensor) -> None:
        """Note the samples of the micro-batch that comes next."""
        self.samples.append(sample_ids)

    def loss(self, loss: Tensor) -> None:
        """Note the loss of the current micro-batch."""
        self.losses[len(self.samples) - 1] = loss.detach()

    def latest(self) -> dict[str, Tensor]:
        """Return what was noted of the current micro-batch."""
        number = len(self.samples) - 1
        noted = {"loss": self.losses, "gradient": self.gradients}
        return {name: seen[number] for name, seen in noted.items() if number in seen}

    def take(self, found: dict[str, Tensor]) -> Tensor:
        """Note what `latest` returned when a micro-batch was captured, as it is of the current one; return the loss."""
        number = len(self.samples) - 1
        self.losses[number], self.gradients[number] = (found.pop(name) for name in ("loss", "gradient"))
        return self.losses[number]

    def gather(self) -> list[Sighting]:
        """Return what all ranks saw. Every rank calls this."""
        here = []
        for number, samples in enumerate(self.samples):
            for what, seen in (("loss", self.losses), ("gradient", self.gradients)):
                if number in seen and not math.isfinite(seen[number]):
                    here.append(Sighting(self.world.rank, (int(samples.min()), int(samples.max())), what))
                    break
        return [sighting for of_rank in gathered(here) for sighting in of_rank]

    def _before_layers(self, decoder: Any, inputs: tuple[Tensor | None, ...]) -> None:
        x = inputs[0] if decoder.pre_process else decoder.received_SBD
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            number = len(self.samples) - 1

            def add_up(gradient: Tensor) -> None:
                self.gradients[number] = gradient.sum()  # a maximum norm takes 100 times as long

            x.register_hook(add_up)


def described(sightings: list[Sighting], ranks: Ranks) -> str:
    """Name the ranks and the samples of each."""
    if not sightings:
        return "no single micro-batch shows it"
    parts = []
    for rank in sorted({sighting.rank for sighting in sightings}):
        found = [sighting for sighting in sightings if sighting.rank == rank]
        samples = ", ".join(f"{first}–{last}" for first, last in (sighting.samples for sighting in found))
        parts.append(f"{ranks.named([rank])} in the {found[0].what} of samples {samples}")
    return "; ".join(parts)
