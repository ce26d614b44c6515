"""The mixture of experts for a few tokens.

Shapes: B batch, L length, T = B * L tokens, K experts of a token, P = T * K token-expert pairs, D model, E experts.
W width of an expert's input and output, F its hidden size, G = 2F gate and up; without a gate, G = F.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba import routers
from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.layers.experts.kind import expert_weight, is_simple, sizes, use_of
from megatron_blackmamba.layers.mlp import kind as mlp
from megatron_blackmamba.ops.decoding import Step, experts_step
from megatron_blackmamba.ops.experts import grouped_experts
from megatron_blackmamba.ops.order import order_of
from megatron_blackmamba.settings import ModelConfig


class ExpertsDecoding(Decoding):
    """No memory: each token finds its experts by itself, as its router kind says."""

    routes = True

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights; None if the layer has none, and D of the experts may be W.

        router: What the router learned, by name in its module, in fp32; empty if it learns nothing.
        state: What it keeps beside that, `[E]` each.
        """
        _, E, W, F = sizes(model)
        fc1_EGD, fc2_EDF = (
            torch.empty(E, *weight.shape, dtype=dtype, device=device) for weight in mlp.weights(model, F, W).values()
        )
        for e in range(E):
            fc1_EGD[e] = get(expert_weight(e, 1), dtype)
            fc2_EDF[e] = get(expert_weight(e, 2), dtype)
        kind = routers.kind_of(model.router.kind)
        router = {name: get(f"router.{name}") for name in (*kind.inside(model), *(["weight"] if kind.learned else []))}
        if kind.learned:
            none_E = torch.zeros(kind.choices(model), dtype=torch.float32, device=device)
            router["bias"] = get("router.bias") if model.router.bias else none_E
        shared, latent = bool(model.shared_expert_hidden_size), bool(model.latent_size)
        return SimpleNamespace(
            router=router,
            state={name: get(f"router.{name}") for name in kind.state},
            fc1_EGD=fc1_EGD,
            fc2_EDF=fc2_EDF,
            shared_fc1_GD=get("shared_experts.linear_fc1.weight", dtype) if shared else None,
            shared_fc2_DF=get("shared_experts.linear_fc2.weight", dtype) if shared else None,
            latent_down_WD=get("latent_down.weight", dtype) if latent else None,
            latent_up_DW=get("latent_up.weight", dtype) if latent else None,
        )

    def choice(self, layer: Any, x_TD: Tensor, inputs: Inputs, model: ModelConfig) -> Tensor:
        before = inputs.carried_TR
        chosen_TK = self.route(layer, x_TD, inputs, model).chosen
        inputs.carried_TR = before  # for `step` or `read`, which routes again
        return chosen_TK

    def route(self, layer: Any, x_TD: Tensor, inputs: Inputs, model: ModelConfig) -> routers.Routed:
        """Return the weights and the experts of each token, `[T, K]`; leave in `inputs` what the next router reads."""
        kind = routers.kind_of(model.router.kind)
        logits_TE, inputs.carried_TR = kind.logits(x_TD, layer.router, inputs.carried_TR, model)
        choice_TK = self.choose(kind, logits_TE, routers.Tokens(model, inputs.ids.flatten(), layer.state))
        return routers.Routed(model.experts, choice_TK, kind.use(model).weights(logits_TE, choice_TK), x_TD)

    def computed(self, layer: Any, x_TD: Tensor, inputs: Inputs, model: ModelConfig) -> routers.Routed:
        """Return `route`, with weight 0 of the first expert for a choice that skips."""
        routed = self.route(layer, x_TD, inputs, model)
        if not model.router.skip:
            return routed
        skips_TK = routed.chosen == model.experts
        chosen_TK, weights_TK = (each.masked_fill(skips_TK, 0) for each in (routed.chosen, routed.weights))
        return replace(routed, chosen=chosen_TK, weights=weights_TK)

    def choose(self, kind: routers.RouterKind, logits_TE: Tensor, at: routers.Tokens) -> Tensor:
        """Return the experts that each token finds by itself, `[T, K]`."""
        return routers.largest(kind.selecting(logits_TE, at), at.model.top_k)

    def compiled(self, layer: Any, norm_D: Tensor, model: ModelConfig) -> Step | None:
        use = use_of(model)
        if not is_simple(model) or use.scores != "sigmoid" or use.normalized or use.scale != 1:
            return None
        return experts_step(
            norm_D=norm_D, router_ED=layer.router["weight"], router_bias_E=layer.router["bias"],
            fc1_EGD=layer.fc1_EGD, fc2_EDF=layer.fc2_EDF, activation=model.activation, eps=model.norm_eps,
            choice_bias_E=layer.state["expert_bias"] if use.biased else None,
            bias_on_scores=use.biased and not use.bias_on_logits,
        )  # fmt: skip

    def bytes_a_token(self, layer: Any, model: ModelConfig) -> int:
        experts = layer.fc1_EGD.nbytes + layer.fc2_EDF.nbytes
        return super().bytes_a_token(layer, model) - experts + experts // model.experts * model.top_k

    def step(self, run: Runner, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        routed = self.computed(layer, x_BD, inputs, run.config)
        x_BW = x_BD
        if layer.latent_down_WD is not None:
            x_BW = run.times(x_BD, layer.latent_down_WD)
        choice_P, x_PW = routed.chosen.flatten(), x_BW.repeat_interleave(run.config.top_k, dim=0)
        y_PW = (
            chosen(run, layer, x_PW, choice_P.tolist())
            if x_BD.device.type == "cpu"
            else gathered(run, layer, x_PW, choice_P)
        )
        y_BD = (y_PW.unflatten(0, routed.weights.shape) * routed.weights[..., None]).sum(dim=1)
        if layer.latent_up_DW is not None:
            y_BD = run.times(y_BD, layer.latent_up_DW)
        if layer.shared_fc1_GD is None or layer.shared_fc2_DF is None:
            return y_BD
        return y_BD + run.times(run.activated(run.times(x_BD, layer.shared_fc1_GD)), layer.shared_fc2_DF)

    def read(self, run: Runner, layer: Any, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        routed = self.computed(layer, x_TD.float(), inputs, run.config)
        x_TW = x_TD
        if layer.latent_down_WD is not None:
            x_TW = F.linear(x_TD.to(layer.latent_down_WD.dtype), layer.latent_down_WD)
        y_TD = _grouped(run, layer, x_TW, routed)
        if layer.latent_up_DW is not None:
            y_TD = F.linear(y_TD.to(layer.latent_up_DW.dtype), layer.latent_up_DW).float()
        if layer.shared_fc1_GD is not None and layer.shared_fc2_DF is not None:
            hidden = run.activated(F.linear(x_TD.to(layer.shared_fc1_GD.dtype), layer.shared_fc1_GD))
            y_TD = y_TD + F.linear(hidden, layer.shared_fc2_DF).float()
        return y_TD.view_as(x_BLD)


def gathered(run: Runner, layer: Any, x_BW: Tensor, choice_B: Tensor) -> Tensor:
    """Compute the same as `chosen` without reading the choice on the host: a captured step must not wait."""
    E = len(layer.fc1_EGD)
    x = x_BW.to(layer.fc1_EGD.dtype)
    if len(x) < E:  # copy each row's expert
        x_B1D, fc1, fc2 = x[:, None], layer.fc1_EGD[choice_B], layer.fc2_EDF[choice_B]
    else:  # all experts for all rows read less than that
        x_B1D, fc1, fc2 = x.expand(E, *x.shape), layer.fc1_EGD, layer.fc2_EDF
    y = torch.bmm(run.activated(torch.bmm(x_B1D, fc1.mT).float()).to(x.dtype), fc2.mT).float()
    return y[:, 0] if len(x) < E else y[choice_B, torch.arange(len(x), device=x.device)]


def chosen(run: Runner, layer: Any, x_BW: Tensor, choice_B: list[int]) -> Tensor:
    """Return the output of each row's expert; no other expert's weights are read."""
    experts = sorted(set(choice_B))
    if len(experts) == 1:
        return _expert(run, layer, x_BW, experts[0])
    y_BW = x_BW.new_empty(x_BW.shape)
    for expert in experts:
        rows = [row for row, choice in enumerate(choice_B) if choice == expert]
        y_BW[rows] = _expert(run, layer, x_BW[rows], expert)
    return y_BW


def _expert(run: Runner, layer: Any, x_BW: Tensor, expert: int) -> Tensor:
    return run.times(run.activated(run.times(x_BW, layer.fc1_EGD[expert])), layer.fc2_EDF[expert])


def _grouped(run: Runner, layer: Any, x_TW: Tensor, routed: routers.Routed) -> Tensor:
    """Return the weighted sum of each token's experts, `[T, W]`, computed as in training."""
    (T, K), E = routed.chosen.shape, len(layer.fc1_EGD)
    order_P, place_P, pairs_E = order_of(routed.chosen.flatten(), E)
    x_PW = x_TW.to(layer.fc1_EGD.dtype).index_select(0, order_P if K == 1 else order_P // K)
    weights_P = routed.weights.flatten().index_select(0, order_P)
    activation, gate = run.config.activation, run.config.gated
    y_PW = grouped_experts(x_PW, pairs_E, layer.fc1_EGD, layer.fc2_EDF, weights_P, activation=activation, gate=gate)
    y_PW = y_PW.index_select(0, place_P)
    return y_PW if K == 1 else y_PW.view(T, K, -1).sum(dim=1, dtype=torch.float32)
