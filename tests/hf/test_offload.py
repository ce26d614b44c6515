"""An export whose weights lie elsewhere until needed: accelerate's hooks bring them to the module that is called.

A weight that is read past its module is still on the meta device then, and the forward fails.
"""

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megatron_blackmamba.hf.cache_blackmamba import CACHE
from tests.reference import forward

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

TOKENS = [int(t) for t in np.random.default_rng(2).integers(1, 64, size=24)]
SPLIT = {  # a layer of each kind on either side; the output layer lies where the embedding does, being the same weight
    "model.embedding": "disk",
    "model.decoder.layers.0": "disk",
    "model.decoder.layers.1": "cpu",
    "model.decoder.layers.2": "cpu",
    "model.decoder.layers.3": "disk",
    "model.decoder.final_layernorm": "disk",
    "lm_head": "disk",
}


# Before 5.0, from_pretrained looks for a tied weight that lies on the disk under the output layer's name.
MAPPED = (
    SPLIT if int(transformers.__version__.split(".")[0]) >= 5 else {**SPLIT, "model.embedding": "cpu", "lm_head": "cpu"}
)


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def offloaded(model, tmp_path):
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def dispatched(model, tmp_path):
    return accelerate.dispatch_model(model, SPLIT, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)


def answers(model):
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        output = model(tokens, attention_mask=mask, labels=tokens, output_router_choices=True)
        more = model(tokens, cache=model(tokens, use_cache=True).get(CACHE)).logits
    generated = model.generate(tokens[:1], max_new_tokens=8, num_beams=2, do_sample=False, eos_token_id=None)
    return [output.loss, output.logits, *output.router_choices, more, generated]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("place", [offloaded, dispatched])
def test_offloaded_model_is_bitwise_equal(export, silu, place, kernels, tmp_path):
    model = load(export(silu), kernels=kernels)
    expected = answers(model)
    moved = place(model, tmp_path)
    assert all(p.device.type == "meta" for p in moved.model.decoder.layers[0].parameters())
    got = answers(moved)
    assert len(got) == len(expected) == 6 and all(map(torch.equal, got, expected))


def test_from_pretrained_places_weights_by_device_map(export, resetting, tmp_path):
    folder, tokens = export(resetting), [*TOKENS[:6], 0, *TOKENS[7:]]
    model = load(folder, device_map=MAPPED, offload_folder=tmp_path, kernels="torch")
    assert all(p.device.type == "meta" for p in model.model.decoder.layers[3].parameters())
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    expected = torch.from_numpy(forward(resetting.weights, resetting.config, tokens).logits_SV)
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=3e-5)
