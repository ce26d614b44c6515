"""The decoder with fused Triton kernels, interpreted, against the reference and the decoder on CPUs."""

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from tests.reference import forward, tiny
from tests.reference.canonical import canonical

pytestmark = pytest.mark.xdist_group("triton")
PROMPT = [5, 17, 0, 42, 63]


def continued(activation, rows, new, eod=None):
    """Return the logits of a prompt's tokens, read one by one, and those of the likeliest tokens after it."""
    decoder = Decoder(pack(canonical(tiny(activation, eod_reset=eod)), torch.float32))
    state, logits = decoder.start(rows), []
    for place in range(len(PROMPT) + new):
        last = torch.full((rows,), PROMPT[place]) if place < len(PROMPT) else logits[-1].argmax(dim=-1)
        logits.append(decoder.step(state, last))
    steps = [type(step).__module__.rpartition("ops.")[2] for step in decoder.compiled]
    return torch.stack(logits, dim=1).clone(), steps


@pytest.mark.parametrize(("activation", "rows", "eod"), [("silu", 1, 0), ("gelu", 3, None)])
def test_fused_steps_continue_as_on_cpus(interpreted, activation, rows, eod):
    actual_BLV, steps = interpreted(continued, activation, rows, 5, eod)
    assert set(steps) == {"decoding.triton"}
    model = tiny(activation, eod_reset=eod)
    exact = torch.from_numpy(forward(model.weights, model.config, PROMPT).logits_SV)
    torch.testing.assert_close(actual_BLV[0, : len(PROMPT)].double(), exact, atol=1e-5, rtol=1e-5)
    on_cpus_BLV, _ = continued(activation, rows, 5, eod)
    assert torch.equal(actual_BLV.argmax(dim=-1), on_cpus_BLV.argmax(dim=-1))
