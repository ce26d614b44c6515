"""The gated delta rule between two projections: a layer erases what its state holds under a key, then writes there.

`model.delta.variant` names the gates and decays of a token. All have short convolutions of q, k and v, keys of
length 1, and a norm of each head's output in front of the gate: SiLU of z, or the sigmoid in kda.

    gdn    Gated DeltaNet (arXiv 2412.06464): one gate and one decay a head
    kda    Kimi Delta Attention (arXiv 2510.26692): one gate a head, a decay for each key channel
    gdn2   Gated DeltaNet-2 (arXiv 2605.22791): a gate for each key and value channel, a decay for each key channel

Shapes: D model, H heads, G key heads, K key channels of a head, V value channels, I = HV inner, R rank of decays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.recurrent import RecurrentKind
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class Delta(RecurrentKind, LayerKind):
    letter, name = "G", "delta rule"
    keys = ("delta", "expand", "conv_kernel", "init.dt_min", "init.dt_max", "init.dt_floor")
    mixer = "megatron_blackmamba.layers.delta.mixer:DeltaMixer"
    cost = "megatron_blackmamba.layers.delta.cost:DeltaCost"
    decode = "megatron_blackmamba.layers.delta.decode:DeltaDecoding"
    by_adam = ("decay_proj.weight",)
    kept_in_fp32 = ("A_log", "dt_bias")
    part, entry = "delta", "delta"
    exports = ("variant", "heads", "key_heads", "key_dim", "head_dim", "decay_rank", "negative_eigenvalues")

    def derived_fields(self, model: ModelConfig) -> dict[str, Any]:
        heads, key_heads = sizes(model)[:2]
        decays = rank(model) if by_channel(model) else None
        return {"delta_heads": heads, "delta_key_heads": key_heads, "delta_decay_rank": decays}

    def problems(self, model: ModelConfig) -> list[str]:
        delta = model.delta
        if delta.heads is None and model.inner_size % delta.head_dim:
            inner = f"model.expand × model.hidden_size = {model.inner_size}"
            return [f"{inner} is not divisible by model.delta.head_dim={delta.head_dim}: set model.delta.heads"]
        H, G = sizes(model)[:2]
        found = [f"the {H} heads of the delta rule are not divisible by model.delta.key_heads={G}"] if H % G else []
        if delta.variant == "gdn" and delta.decay_rank is not None:
            found.append("model.delta.decay_rank needs model.delta.variant=kda or gdn2: gdn has one decay a head")
        return found

    def divisions(self, model: ModelConfig) -> list[Division]:
        H, G = sizes(model)[:2]
        what = (
            "the number of heads of the delta rule (model.delta.heads, or model.expand × model.hidden_size / head_dim)"
        )
        found = [Division(what, H, "tensor")]
        if model.delta.key_heads is not None:
            found.append(Division("model.delta.key_heads", G, "tensor"))
        if by_channel(model):
            found.append(Division("model.delta.decay_rank (by default key_dim)", rank(model), "tensor"))
        return found

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        H, G, K, V = sizes(model)
        decays = H * K if by_channel(model) else H
        return {
            "in_proj.weight": in_proj(model),
            "conv1d.weight": by_rows(1, model.conv_kernel, q=G * K, k=G * K, v=H * V),
            **({"decay_proj.weight": by_rows(rank(model), decay=decays)} if by_channel(model) else {}),
            "dt_bias": by_rows(decay=decays),
            "A_log": by_rows(heads=H),
            "norm.weight": whole(channels=V),
            "out_proj.weight": by_columns(H * V, out=model.hidden_size),
        }


def sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return H, G, K, V."""
    delta = model.delta
    heads = delta.heads or model.inner_size // delta.head_dim
    return heads, delta.key_heads or heads, delta.key_dim, delta.head_dim


def by_channel(model: ModelConfig) -> bool:
    """Return whether each key channel has a decay."""
    return model.delta.variant != "gdn"


def rank(model: ModelConfig) -> int:
    """Return R, through which a token chooses the decays of key channels."""
    return model.delta.decay_rank or model.delta.key_dim


def in_proj(model: ModelConfig) -> Weight:
    """Return the matrix in front of the rule: gates behind z, q, k and v, and the decays or what they follow from."""
    H, G, K, V = sizes(model)
    gates = {"erase": H * K, "write": H * V} if model.delta.variant == "gdn2" else {"erase": H}
    decay = rank(model) if by_channel(model) else H
    return by_rows(model.hidden_size, z=H * V, q=G * K, k=G * K, v=H * V, **gates, decay=decay)
