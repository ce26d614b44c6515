"""Our modules against the forward pass written from the released format's description, in float64."""

import numpy as np
import pytest
import torch

from tests.reference.checkpoint import tiny
from tests.reference.forward import forward

TOKENS = [5, 0, 17, 33, 0, 2, 8, 60, 41, 0, 7]
FP32 = 3e-5
"""Tolerance in fp32, for logits up to 15; the order of summation depends on the processor."""


def load_released(model, weights):
    """Put released weights into a model, by nothing but the two formats' descriptions."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                layer, which = name.split(".experts.")
                for expert in range(len(parameter)):
                    released = weights[f"{layer}.local_experts.{expert}.linear_{which}.weight"]
                    parameter[expert].copy_(released.view(parameter[expert].shape))
            else:
                parameter.copy_(weights[name])
    return model.eval()


def as_overrides(config):
    pattern = "".join("M" if kind == "r" else "E" for kind in config["mamba_moe_layers"])
    eod = config["eod_reset"]
    return [
        f"model.pattern={pattern}",
        f"model.vocab_size={config['vocab_size']}",
        f"model.hidden_size={config['hidden_size']}",
        f"model.expert_hidden_size={config['ffn_hidden_size']}",
        f"model.state_size={config['state_size']}",
        "model.experts=4",
        f"model.activation={config['activation']}",
        f"model.eod_reset={'null' if eod is None else eod}",
    ]


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].double().numpy()


def furthest(a, b):
    return np.abs(a - b).max()


@pytest.mark.parametrize("precision, tolerance", [("fp32", FP32), ("fp64", 1e-10)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("eod_reset", [None, 0])
def test_agrees_with_the_reference(build, activation, eod_reset, precision, tolerance):
    released = tiny(activation, eod_reset=eod_reset)
    overrides = [*as_overrides(released.config), f"training.precision={precision}"]
    model = load_released(build(*overrides), released.weights)
    expected = forward(released.weights, released.config, TOKENS)
    assert furthest(logits(model, TOKENS), expected.logits_SV) < tolerance


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_every_scan_gives_the_same_model(build, backend):
    released = tiny(eod_reset=0)
    model = load_released(build(*as_overrides(released.config), f"kernels.scan={backend}"), released.weights)
    assert furthest(logits(model, TOKENS), forward(released.weights, released.config, TOKENS).logits_SV) < FP32


def test_sequence_part_begins_anew_only_after_document_end(build):
    model = build("model.eod_reset=7")
    tokens_BS = torch.tensor([[1, 7, 3], [7, 2, 3]])
    reset_BS = model._layer_inputs(tokens_BS, before_B=torch.tensor([5, 7])).reset_BS
    assert reset_BS.tolist() == [[False, False, True], [True, True, False]]
    assert not model._layer_inputs(tokens_BS).reset_BS[:, 0].any()


def test_the_future_does_not_reach_the_past(build):
    released = tiny()
    model = load_released(build(*as_overrides(released.config)), released.weights)
    changed = [*TOKENS[:6], 1, 1, 1, 1, 1]
    assert furthest(logits(model, TOKENS)[:6], logits(model, changed)[:6]) < FP32
    assert furthest(logits(model, TOKENS)[6:], logits(model, changed)[6:]) > 1e-2


def test_loss_is_cross_entropy_of_next_token(build):
    model = build().eval()
    tokens = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
        assert torch.allclose(model(tokens, labels), expected.view(3, 20), atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 16), (1, 17), (17, 2), (34,), (2, 17, 1)])
def test_labels_of_another_shape_are_refused(build, shape):
    model, tokens = build().eval(), torch.zeros(2, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"labels has shape .* Pass \(2, 17\)"):
        model(tokens, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        (512, 0, "tokens: the largest id is 512, but model.vocab_size is 512"),
        (-1, 0, "tokens: id -1 is negative"),
        (0, 600, "labels: the largest id is 600"),
        (0, -100, "labels: id -100 is negative. -100 does not mask a label here"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(build, tokens, labels, message):
    with pytest.raises(ValueError, match=message):
        build().eval()(torch.full((1, 4), tokens), torch.full((1, 4), labels))
