"""Muon's update against float64: which weights it takes, and each matrix of a stack of experts by itself."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.optimizers.muon import Muon
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.schedule import Schedule

pytestmark = pytest.mark.skipif(bool(Muon().missing()), reason="megatron-core's Muon cannot run here")

RATE, MOMENTUM, DECAY, BETAS, EPS = 0.01, 0.8, 0.1, (0.7, 0.9), 1e-6
RUN = [
    *('model.pattern="MES*-"', "model.hidden_size=16", "model.expert_hidden_size=24", "model.experts=3"),
    *("model.vocab_size=32", "model.mlp_hidden_size=20", "model.shared_expert_hidden_size=8"),
    *("model.attention.heads=4", "model.attention.kv_heads=2", "model.mamba2.head_dim=8", "model.state_size=8"),
    *("model.tie_embeddings=false", "optimizer.kind=muon", "optimizer.distributed=false", "optimizer.clip=0"),
    *(f"optimizer.learning_rate={RATE}", "optimizer.decay=constant", "optimizer.warmup_fraction=0"),
    *(f"optimizer.momentum={MOMENTUM}", f"optimizer.weight_decay={DECAY}", f"optimizer.eps={EPS}"),
    *(f"optimizer.beta1={BETAS[0]}", f"optimizer.beta2={BETAS[1]}"),
]
ORTHOGONAL = {
    *("0.mixer.in_proj", "0.mixer.x_proj", "0.mixer.dt_proj", "0.mixer.out_proj"),
    *("1.mixer.router", "1.mixer.experts.fc1", "1.mixer.experts.fc2"),
    *("1.mixer.shared_experts.linear_fc1", "1.mixer.shared_experts.linear_fc2"),
    *("2.mixer.in_proj", "2.mixer.out_proj", "3.mixer.linear_qkv", "3.mixer.linear_proj"),
    *("4.mixer.linear_fc1", "4.mixer.linear_fc2"),
}
QUINTIC = [
    *((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)),
    *((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
]


def short(name):
    return name.removeprefix("decoder.layers.").removesuffix(".weight")


def orthogonal(matrix):
    """Five Newton-Schulz steps in float64, with the step of Adam's size."""
    x = matrix / matrix.norm()
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return 0.2 * max(matrix.shape) ** 0.5 * x


def direction(name, momentum):
    """Return the update of a momentum: one matrix for each expert, and one each for queries, keys and values."""
    if name.endswith(("fc1", "fc2")) and ".experts." in name:
        return torch.stack([orthogonal(expert.flatten(0, -2)).view(expert.shape) for expert in momentum])
    if name.endswith("linear_qkv"):
        groups = momentum.view(2, 4 * 4, 16).split([8, 4, 4], 1)  # two heads of four, then their key and value
        parts = [orthogonal(part.flatten(0, 1)).view(part.shape) for part in groups]
        return torch.cat(parts, 1).view(momentum.shape)
    return orthogonal(momentum)


def muon(name, weight, gradients):
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        weight = weight * (1 - RATE * DECAY) - RATE * direction(name, ahead)
    return weight


def adam(weight, gradients, decay):
    weight = weight.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=RATE, betas=BETAS, eps=EPS, weight_decay=decay)
    for weight.grad in gradients:
        optimizer.step()
    return weight.detach()


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


@pytest.mark.parametrize("precision, tolerance", [("fp64", 1e-12), ("fp32", 2e-5)])
def test_update_matches_float64_reference(place, precision, tolerance):
    config = load("tiny", [*RUN, f"training.precision={precision}"])
    trainable = make_trainable(config, model.build(config, place), place)
    weights = {short(name): p for name, p in trainable.model.named_parameters()}
    random = torch.Generator().manual_seed(5)
    gradients = {name: torch.randn(2, *p.shape, generator=random).to(p.dtype) for name, p in weights.items()}
    before = {name: p.detach().double().clone() for name, p in weights.items()}
    for step in range(2):
        Schedule(config, trainable.optimizer).set(0)
        for name, p in weights.items():
            p.main_grad.copy_(gradients[name][step])
        trainable.optimizer.step()
    assert set(weights) > ORTHOGONAL
    for name, p in weights.items():
        given = gradients[name].double()
        if name in ORTHOGONAL:
            expected = muon(name, before[name], given)
        else:
            expected = adam(before[name], given, 0.0 if getattr(p, "no_weight_decay", False) else DECAY)
        torch.testing.assert_close(
            p.detach().double(), expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
