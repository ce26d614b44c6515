"""Muon's update against float64: which weights it takes, and each matrix of a stack of experts by itself."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.engine import muon as engine
from megatron_blackmamba.ops import orthogonal as ops
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.schedule import Schedule

RATE, MOMENTUM, DECAY, BETAS, EPS = 0.01, 0.8, 0.1, (0.7, 0.9), 1e-6
RUN = [
    *('model.pattern="MES*-"', "model.hidden_size=16", "model.expert_hidden_size=24", "model.experts=3"),
    *("model.vocab_size=32", "model.mlp_hidden_size=20", "model.shared_expert_hidden_size=8"),
    *("model.attention.heads=4", "model.attention.kv_heads=2", "model.mamba2.head_dim=8", "model.state_size=8"),
    *("model.tie_embeddings=false", "optimizer.kind=muon", "optimizer.clip=0"),
    *(f"optimizer.learning_rate={RATE}", "optimizer.decay=constant", "optimizer.warmup_fraction=0"),
    *(f"optimizer.momentum={MOMENTUM}", f"optimizer.weight_decay={DECAY}", f"optimizer.eps={EPS}"),
    *(f"optimizer.beta1={BETAS[0]}", f"optimizer.beta2={BETAS[1]}"),
]
ORTHOGONAL = {  # and the rows of its parts
    "0.mixer.in_proj": [32, 32],
    "0.mixer.out_proj": [16],
    "1.mixer.experts.fc1": [],
    "1.mixer.experts.fc2": [],
    "1.mixer.shared_experts.linear_fc1": [8, 8],
    "1.mixer.shared_experts.linear_fc2": [16],
    "2.mixer.in_proj": [32, 32, 128, 128, 4],
    "2.mixer.out_proj": [16],
    "3.mixer.linear_qkv": [],
    "3.mixer.linear_proj": [16],
    "4.mixer.linear_fc1": [20, 20],
    "4.mixer.linear_fc2": [16],
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


def direction(name, momentum, whole):
    """Return the update of a momentum: one matrix for each part of a weight, and for each expert."""
    if whole:
        experts = momentum.flatten(1, -2) if ".experts." in name else momentum[None]
        return torch.stack([orthogonal(matrix) for matrix in experts]).view(momentum.shape)
    if ".experts." in name:
        matrices = momentum.flatten(0, -3)  # gate and up of an expert by themselves
        return torch.stack([orthogonal(matrix) for matrix in matrices]).view(momentum.shape)
    if name.endswith("linear_qkv"):
        groups = momentum.view(2, 4 * 4, 16).split([8, 4, 4], 1)  # two heads of four, then their key and value
        parts = [orthogonal(part.flatten(0, 1)).view(part.shape) for part in groups]
        return torch.cat(parts, 1).view(momentum.shape)
    return torch.cat([orthogonal(part) for part in momentum.split(ORTHOGONAL[name])])


def muon(name, weight, gradients, whole):
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        weight = weight * (1 - RATE * DECAY) - RATE * direction(name, ahead, whole)
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


@pytest.mark.parametrize(
    "precision, tolerance, matrices, at_once",
    [("fp64", 1e-12, "parts", 1000), ("fp64", 1e-12, "whole", 2**27), ("fp32", 2e-5, "parts", 2**27)],
)
def test_update_matches_float64_reference(place, monkeypatch, precision, tolerance, matrices, at_once):
    monkeypatch.setattr(engine, "AT_ONCE", at_once)
    config = load("tiny", [*RUN, f"training.precision={precision}", f"optimizer.matrices={matrices}"])
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
    assert set(weights) > ORTHOGONAL.keys()
    for name, p in weights.items():
        given = gradients[name].double()
        if name in ORTHOGONAL:
            expected = muon(name, before[name], given, matrices == "whole")
        else:
            expected = adam(before[name], given, 0.0 if getattr(p, "no_weight_decay", False) else DECAY)
        torch.testing.assert_close(
            p.detach().double(), expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("steps, off", [("quintic", 0.2), ("jordan", 0.35)])
@pytest.mark.parametrize("shape", [(3, 24, 64), (1, 64, 24), (2, 16, 16)])
def test_singular_values_end_near_one(steps, off, shape):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    values = torch.linspace(0.05, 1, min(shape[1:]), dtype=torch.float64)
    made = ops.orthogonal(u * values @ v, steps)
    assert (torch.linalg.svdvals(made) - 1).abs().max() < off
    assert torch.equal(ops.orthogonal(torch.zeros(shape), steps), torch.zeros(shape))


def test_matrices_go_to_the_ranks_with_least_work():
    matrix = engine.Matrix(((0, 64),), 8, None)
    halves, left = [[(0, 32)], [(32, 64)]], [[(0, 64)], []]
    pieces = engine.assigned([engine.Piece(n, matrix, by) for n, by in enumerate([halves, left, halves, halves])], 2)
    assert [piece.owner for piece in pieces] == [1, 0, 0, 1]


def test_runs_that_stay_neighbours_move_as_one():
    a, b, c, d = (0, 0, 2), (0, 2, 3), (1, 0, 4), (1, 4, 5)
    order, flat = engine.Order.between([a, b, c, d], [c, d, a, b]), torch.arange(8)
    assert order.sizes == [3, 5]
    assert order.there(flat).tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    mixed = engine.Order.between([a, b, c, d], [b, d, a, c])
    assert mixed.there(flat).tolist() == [2, 7, 0, 1, 3, 4, 5, 6]
    assert mixed.back(mixed.there(flat)).tolist() == flat.tolist()
