"""Muon in plain PyTorch and float64, for the model of `training.py`; it shares no code with the package."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.training import Plain

QUINTIC = [
    *((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)),
    *((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
]
MATRICES = (
    "in_proj.weight",
    "out_proj.weight",
    "linear_qkv.weight",
    "linear_proj.weight",
    "experts.fc1",
    "experts.fc2",
)


def orthogonal(matrix: Tensor) -> Tensor:
    """Take five Newton-Schulz steps, and give the result the size of Adam's updates."""
    x = matrix / matrix.norm()
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return 0.2 * max(matrix.shape) ** 0.5 * x


@dataclass
class PlainMuon(Plain):
    rows: dict[str, list[int]] = field(default_factory=dict)
    """By layer and name, such as "0.in_proj", the rows of parts."""
    whole: bool = False
    momentum: float = 0.9
    cap: float | None = None
    scales: dict[str, list[float]] = field(default_factory=dict)
    """By layer and name, factors of the updates of its parts, if they are not 1."""
    largest: list[float] = field(default_factory=list)
    """By head the largest score of the last step."""

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        if not name.endswith(MATRICES):
            return super()._direction(name, gradient)
        (kept,) = self.moments.get(name, (torch.zeros_like(gradient),))  # type: ignore[misc]
        kept = self.momentum * kept + (1 - self.momentum) * gradient
        self.moments[name] = (kept,)  # type: ignore[assignment]
        ahead = self.momentum * kept + (1 - self.momentum) * gradient
        layer, *_, last = name.removesuffix(".weight").removeprefix("decoder.layers.").split(".")
        short = f"{layer}.{last}"
        scales = self.scales.get(short, [1.0])
        if last in ("fc1", "fc2"):  # each expert's, gate and up by themselves
            stacked = ahead.flatten(1, -2) if self.whole else ahead.flatten(0, -3)
            return scales[0] * torch.stack([orthogonal(matrix) for matrix in stacked]).view(ahead.shape)
        if self.whole:
            return orthogonal(ahead)
        if last == "linear_qkv":
            groups, channels = self.recipe.kv_heads, ahead.shape[1] // self.recipe.heads
            each = self.recipe.heads // groups * channels
            parts = ahead.view(groups, -1, ahead.shape[1]).split([each, channels, channels], 1)
            made = [scales[0] * orthogonal(part.flatten(0, 1)).view(part.shape) for part in parts]
            return torch.cat(made, 1).view(ahead.shape)
        parts = ahead.split(self.rows.get(short, [len(ahead)]))
        scales = scales * len(parts) if len(scales) == 1 else scales
        return torch.cat([scale * orthogonal(part) for scale, part in zip(scales, parts, strict=True)])

    @torch.no_grad()
    def _update(self) -> None:
        super()._update()
        heads, found = self.recipe.heads, self.recipe.scores
        self.largest = [max(score for each, score in found if each == head) for head in range(heads)]
        found.clear()
        if self.cap is None:
            return
        (weight,) = (w for name, w in self.weights.items() if name.endswith("linear_qkv.weight"))
        groups = self.recipe.kv_heads
        shared, channels = heads // groups, weight.shape[1] // heads
        rows = weight.view(groups, shared + 2, channels, weight.shape[1])
        for head, largest in enumerate(self.largest):
            if largest > self.cap:
                factor = self.cap / largest
                rows[head // shared, head % shared] *= factor if shared > 1 else factor**0.5
                if shared == 1:
                    rows[head, 1] *= factor**0.5
