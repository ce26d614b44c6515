"""Generation on a GPU: reading in parallel and captured steps, against the float64 reference."""

import pytest
import torch

from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.captured import stepper
from megatron_blackmamba.inference.weights import pack
from tests.reference import forward, tiny
from tests.reference.canonical import canonical

pytestmark = pytest.mark.gpu
PROMPT, NEXT = [5, 17, 0, 42, 63, 8, 1, 33, 0, 21], [7, 0, 12, 50, 3]


@pytest.mark.parametrize("eod", [None, 0])
@pytest.mark.parametrize("rows", [1, 3, 6])  # fewer and more than the model has experts
def test_captured_steps_match_the_reference_logits(rows, eod):
    model = tiny("silu", eod_reset=eod)
    decoder = Decoder(pack(canonical(model), torch.float32, "cuda"))
    state = decoder.start(rows)
    logits = [decoder.read(state, torch.tensor([PROMPT] * rows, device="cuda"))]
    step = stepper(decoder, state)
    for token in NEXT:
        logits.append(step(torch.full((rows,), token, device="cuda")).clone())  # the next replay overwrites it
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
