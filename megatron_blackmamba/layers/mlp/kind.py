"""Dense MLP, by default SwiGLU as in the paper's transformer baseline.

Shapes: B batch, L length, D model, F hidden units, G = 2F gate and up; without a gate, G = F.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


def weights(model: ModelConfig, hidden: int, width: int | None = None) -> dict[str, Weight]:
    """Return the two matrices of an MLP; width: of its input and output, by default the model's."""
    D, rows = width or model.hidden_size, {"gate": hidden, "up": hidden} if model.gated else {"up": hidden}
    return {"linear_fc1.weight": by_rows(D, **rows), "linear_fc2.weight": by_columns(hidden, out=D)}


def products(model: ModelConfig) -> int:
    """Return the matrix products of an MLP, each between the model's width and the hidden units."""
    return 3 if model.gated else 2


def kept(model: ModelConfig) -> int:
    """Return the numbers that megatron-core's MLP keeps for each hidden unit, on every device.

    Gate and up, the activated gate, the product, and a copy of up: megatron-core adds `glu_linear_offset` to it, even
    a 0. The squared ReLU keeps the ReLU alone; without a gate there are its input and its output.
    """
    if not model.gated:
        return 2
    return 4 if model.activation == "relu2" else 5


class MLP(LayerKind):
    letter, name = "-", "dense MLP"
    keys = ("mlp_hidden_size", "activation", "gated")
    cut = None
    widens = True
    mixer = "megatron_blackmamba.layers.mlp.mixer:DenseMLP"
    cost = "megatron_blackmamba.layers.mlp.cost:MLPCost"
    decode = "megatron_blackmamba.layers.mlp.decode:MLPDecoding"
    writes_to_residual = ("linear_fc2.weight",)
    part, entry = "mlp", "mlp"

    def problems(self, model: ModelConfig) -> list[str]:
        return [] if model.mlp_hidden_size else ["the pattern has - layers: set model.mlp_hidden_size"]

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [Division("model.mlp_hidden_size", model.mlp_hidden_size or 0, "tensor")]

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        return weights(model, model.mlp_hidden_size or 0)

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        return {"mlp_hidden_size": model.mlp_hidden_size, "gated": model.gated}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"mlp_hidden_size": content.get("mlp_hidden_size"), "gated": content.get("gated", True)}
