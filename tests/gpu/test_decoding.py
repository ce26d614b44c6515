"""Generation on a GPU: reading in parallel and captured steps, against the float64 reference."""

import pytest
import torch

from megatron_blackmamba.inference import Decoder, Generator
from megatron_blackmamba.inference.captured import likeliest, stepper
from megatron_blackmamba.inference.weights import pack
from tests.ops import test_decoding as definition
from tests.ops.implementations import assert_close
from tests.ops.test_triton_decoding import rounding
from tests.reference import forward, tiny
from tests.reference.canonical import canonical

pytestmark = pytest.mark.gpu
PROMPT, NEXT = [5, 17, 0, 42, 63, 8, 1, 33, 0, 21], [7, 0, 12, 50, 3]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("eod", [None, 0])
@pytest.mark.parametrize("rows", [1, 3, 6])  # fewer and more than the model has experts
def test_captured_steps_match_the_reference_logits(rows, eod, fused):
    model = tiny("silu", eod_reset=eod)
    decoder = Decoder(pack(canonical(model), torch.float32, "cuda"), fused=fused)
    state = decoder.start(rows)
    logits = [decoder.read(state, torch.tensor([PROMPT] * rows, device="cuda"))]
    step = stepper(decoder, state)
    for token in NEXT:
        logits.append(step(torch.full((rows,), token, device="cuda")).clone())  # the next replay overwrites it
        assert torch.equal(likeliest(step), logits[-1].argmax(dim=-1))
    exact = torch.from_numpy(forward(model.weights, model.config, PROMPT + NEXT).logits_SV)[len(PROMPT) - 1 :]
    for row in range(rows):
        actual = torch.stack([step_BV[row] for step_BV in logits]).double().cpu()
        torch.testing.assert_close(actual, exact, atol=1e-4, rtol=1e-4)


def test_bf16_reads_and_steps_alike():
    """Each token's logits, read in parallel or stepped to, up to the rounding of bf16; nothing else has the state."""
    decoder = Decoder(pack(canonical(tiny()), torch.bfloat16, "cuda"))
    read = decoder.read_all(decoder.start(1), torch.tensor([PROMPT], device="cuda"))[0]
    step = stepper(decoder, decoder.start(1))
    stepped = torch.cat([step(torch.tensor([token], device="cuda")).clone() for token in PROMPT])
    error = (stepped - read).norm(dim=1) / read.norm(dim=1)
    assert error.max() < 0.05, error


def on_gpu(tensors):
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def run_captured(step, moving):
    """Run a block eagerly and as a graph, often; all must give the same, whichever thread or kernel is faster."""
    eager = {name: tensor.clone() for name, tensor in moving.items()}
    step(*eager.values())
    held = {name: tensor.clone() for name, tensor in moving.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*held.values())
    for _ in range(20):
        for name, tensor in moving.items():
            held[name].copy_(tensor)
        graph.replay()
        assert all(torch.equal(held[name], eager[name]) for name in moving)
    return held


SHAPES = [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.bfloat16, 40), (torch.bfloat16, 200), (torch.float32, 1),
          (torch.float32, 5)]  # fmt: skip
"""Each form of the kernels, by dtype and sequences."""


@pytest.mark.parametrize(("dtype", "sequences"), SHAPES)
def test_mamba_block_at_the_paper_s_width(dtype, sequences):
    from megatron_blackmamba.ops.decoding import mamba_step

    weights = on_gpu(definition.mamba_weights(D=1152, I=2304, N=16, R=72, K=4, seed=0, dtype=dtype))
    shapes = {"residual": (sequences, 1152), "window": (sequences, 3, 2304), "state": (sequences, 2304, 16)}
    moving = on_gpu(definition.draw(1, **shapes))
    rounded, tolerance = rounding(sequences, dtype)
    exact = definition.mamba_in_float64(weights, **moving, rounded=rounded)
    actual = run_captured(mamba_step(**weights, eps=definition.EPS), moving)
    assert_close(actual, exact, 3 * tolerance)


@pytest.mark.parametrize(("dtype", "sequences"), SHAPES)
def test_experts_block_at_the_paper_s_width(dtype, sequences):
    from megatron_blackmamba.ops.decoding import experts_step

    weights = on_gpu(definition.experts_weights(D=1152, E=8, F=3072, seed=0, dtype=dtype))
    moving = on_gpu(definition.draw(1, residual=(sequences, 1152)))
    rounded, tolerance = rounding(sequences, dtype)
    how = {"activation": "silu", "bias_on_scores": False}
    exact = definition.experts_in_float64(weights, **moving, **how, rounded=rounded)
    actual = run_captured(experts_step(**weights, eps=definition.EPS, **how), moving)
    assert_close(actual, exact, 3 * tolerance)


def test_larger_batches_outlive_all_earlier_graphs():
    decoder = Decoder(pack(canonical(tiny()), torch.float32, "cuda"))
    one, many = (list(Generator(decoder).tokens([[5, 17, 3]] * rows, max_new_tokens=6)) for rows in (1, 9))
    assert many == [step * 9 for step in one]


def test_generators_share_graphs_without_mixing_states():
    """Two texts take turns on the same graph, and a third has another batch size."""
    weights = pack(canonical(tiny()), torch.float32, "cuda")
    generator = Generator(Decoder(weights))
    prompts = [[5, 17, 3], [8, 1, 33, 21], [42, 2]]
    alone = [list(Generator(Decoder(weights)).tokens([p], max_new_tokens=12)) for p in prompts]
    first, second = (generator.tokens([p], max_new_tokens=12) for p in prompts[:2])
    turns = [(next(first), next(second)) for _ in range(6)]
    both = list(generator.tokens(prompts, max_new_tokens=12))
    turns += list(zip(first, second, strict=True))
    assert [[a for a, _ in turns], [b for _, b in turns]] == alone[:2]
    assert [[[step[row]] for step in both] for row in range(3)] == alone
    assert set(generator.decoder.graphs.by_size) == {1, 3}
