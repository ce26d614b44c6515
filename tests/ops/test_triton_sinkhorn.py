"""The Triton router, interpreted, against the definition in float64."""

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.interpreted import interpreter
from tests.ops.test_sinkhorn import exact_choice, needed, trained_router_logits

pytestmark = pytest.mark.xdist_group("triton")


def triton_choice(logits, iterations, start="balanced", one_program=True, count_E=None, temperature=2.0):
    from megatron_blackmamba.ops.sinkhorn import Inputs, triton

    triton.ONE_PROGRAM = logits.numel() if one_program else 0
    triton.PROGRAMS = 4  # few, so that each has several blocks of tokens
    return triton.choice(Inputs(logits, iterations, temperature, start), count_E), count_E


def triton_auto(logits, start, one_program):
    from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice, triton

    triton.ONE_PROGRAM = logits.numel() if one_program else 0
    triton.PROGRAMS = 4
    bias_E, tokens_E = torch.zeros(logits.shape[1]), torch.zeros(logits.shape[1], dtype=torch.int64)
    how = {"start": start, "bias_E": bias_E, "tokens_E": tokens_E, "backend": "triton"}
    return sinkhorn_choice(logits, iterations="auto", **how), bias_E, tokens_E


def triton_bias(logits, iterations, start, one_program):
    from megatron_blackmamba.ops.sinkhorn import Inputs, triton

    triton.ONE_PROGRAM = logits.numel() if one_program else 0
    triton.PROGRAMS = 4
    return triton.bias(Inputs(logits, iterations, start=start))


@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "std", "iterations", "start"),
    [
        (1000, 8, 1.0, 1, "balanced"),
        (700, 8, 2.0, 2, "uniform"),
        (300, 5, 1e4, 2, "balanced"),
        (130, 1, 1.0, 1, "balanced"),
        (1, 8, 1.0, 0, "uniform"),
        (1, 8, 1.0, 3, "uniform"),
        (600, 8, 16.0, 16, "balanced"),
        (1025, 3, 1.0, 1, "uniform"),
        (400, 8, 1.0, 0, "balanced"),
        (200, 40, 1.0, 2, "balanced"),
        (300, 256, 1.0, 2, "balanced"),
        (1000, 8, 1e4, 5, "uniform"),
        (500, 8, 90.0, 8, "balanced"),
    ],
)
def test_chooses_as_the_definition_does(interpreted, tokens, experts, std, iterations, start, one_program):
    logits = trained_router_logits(tokens, experts, std)
    exact = exact_choice(logits, iterations, start=start)
    choice, _ = interpreted(triton_choice, logits, iterations, start, one_program)
    assert choice.dtype == torch.int64
    assert (choice == exact).float().mean() > 0.995  # float32 may break a tie the other way


@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize("start", ["balanced", "uniform"])
@pytest.mark.parametrize("std", [1.0, 4.0, 100.0])
def test_auto_stops_where_the_definition_does(interpreted, std, start, one_program):
    logits = trained_router_logits(600, 8, std)
    iterations = needed(logits, start)
    choice, bias_E, tokens_E = interpreted(triton_auto, logits, start, one_program)
    same, _ = interpreted(triton_choice, logits, iterations, start, one_program)
    assert torch.equal(choice, same) and torch.equal(tokens_E, choice.bincount(minlength=8))
    assert ((logits + bias_E).argmax(1) == choice).float().mean() > 0.995


@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize(("iterations", "start"), [(1, "balanced"), (2, "uniform"), (0, "uniform")])
def test_plan_ranks_experts_as_the_definition(interpreted, iterations, start, one_program):
    logits = trained_router_logits(600, 8, 1.0)
    bias_E = interpreted(triton_bias, logits, iterations, start, one_program)
    assert ((logits + bias_E).argmax(1) == exact_choice(logits, iterations, start=start)).float().mean() > 0.995


@pytest.mark.parametrize("one_program", [True, False])
def test_the_temperature_scales_the_logits(interpreted, one_program):
    logits = trained_router_logits(600, 8, 1.0)
    choice, _ = interpreted(triton_choice, logits, 2, "balanced", one_program, None, 0.5)
    assert (choice == exact_choice(logits / 4, 2)).float().mean() > 0.995
    assert (choice == exact_choice(logits, 2)).float().mean() < 0.98  # else it would prove nothing


def test_two_ranks_balance_as_one_does(interpreted, tmp_path):
    logits = trained_router_logits(512, 8, 1.0)
    together, _ = interpreted(triton_choice, logits, 2)
    with interpreter() as other:
        halves = [
            run.start(choice_on_rank, rank, str(tmp_path / "store"), logits.chunk(2)[rank].clone())
            for rank, run in enumerate((interpreted, other))
        ]
        shared = torch.cat([half.result() for half in halves])
    alone, _ = interpreted(triton_choice, logits.chunk(2)[0].clone(), 2)
    assert (shared == together).float().mean() > 0.995
    assert (alone == together.chunk(2)[0]).float().mean() < 0.98  # else the exchange would prove nothing


def choice_on_rank(rank, store_file, logits):
    import torch.distributed as dist

    from megatron_blackmamba.ops.sinkhorn import Inputs, triton

    dist.init_process_group("gloo", store=dist.FileStore(store_file, 2), rank=rank, world_size=2)
    try:
        return triton.choice(Inputs(logits, 2, group=dist.group.WORLD))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("one_program", [True, False])
@pytest.mark.parametrize(("tokens", "experts"), [(1000, 8), (130, 5), (1, 8), (70, 200)])
def test_counts_the_tokens_of_each_expert(interpreted, tokens, experts, one_program):
    logits = trained_router_logits(tokens, experts, 1.0)
    choice, count_E = interpreted(triton_choice, logits, 1, "balanced", one_program, torch.full((experts,), 3))
    assert torch.equal(count_E, 3 + choice.bincount(minlength=experts))
