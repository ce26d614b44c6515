"""Recurrent decoding against the float64 reference, and what is special about it: constant memory, batches, resets."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
import torch

from megatron_blackmamba.config import load
from megatron_blackmamba.inference import Decoder, weights
from megatron_blackmamba.inference.captured import Captured
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange.canonical import Canonical, Entry, cast, shapes
from megatron_blackmamba.layers.experts.decode import chosen, gathered
from megatron_blackmamba.runtime.process import default_float32
from tests.reference import forward, tiny
from tests.reference.canonical import canonical

TOKENS = [int(t) for t in np.random.default_rng(3).integers(1, 64, size=30)]
TOKENS[11] = TOKENS[12] = 0  # ends of documents, for the model that restarts after them


def reference(model, tokens=TOKENS):
    return torch.from_numpy(forward(model.weights, model.config, tokens).logits_SV)


def assert_close(logits, expected, tolerance=5e-5):
    torch.testing.assert_close(logits.double(), expected, atol=tolerance, rtol=tolerance)


def test_stepping_agrees_with_the_reference(model, decoder):
    state = decoder.start(1)
    assert_close(torch.cat([decoder.step(state, torch.tensor([token])) for token in TOKENS]), reference(model))


def test_steps_without_compiled_blocks_agree_with_reference(model, decoder, monkeypatch):
    """A GPU, or a machine without a compiler, runs each layer's own step."""
    monkeypatch.setattr("megatron_blackmamba.ops.decoding.why_not", lambda _: "not compiled")
    state = decoder.start(1)
    assert_close(torch.cat([decoder.step(state, torch.tensor([token])) for token in TOKENS]), reference(model))


def test_weights_do_not_depend_on_the_default_dtype():
    weights_of = canonical(tiny("silu", router_bias=False))
    with default_float32():  # afterwards it is as before
        torch.set_default_dtype(torch.float64)
        decoder = Decoder(pack(weights_of, torch.float32))
        assert decoder.step(decoder.start(1), torch.tensor([3])).isfinite().all()


def test_tokens_of_another_shape_are_refused(decoder):
    state = decoder.start(2)
    for shape in ((3, 4), (2, 0), (2,)):
        with pytest.raises(ValueError, match=r"the state holds 2 sequences: give \[2, L\]"):
            decoder.read(state, torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \(1,\): give one for each sequence of the state, \(2,\)"):
        decoder.step(state, torch.tensor([1]))


@pytest.mark.parametrize("cut", [1, 2, 11, 12, 13, 29])
def test_reading_goes_on_where_reading_or_stepping_ended(model, decoder, cut):
    state = decoder.start(1)
    decoder.read(state, torch.tensor([TOKENS[:cut]]))
    decoder.step(state, torch.tensor(TOKENS[cut : cut + 1]))
    if TOKENS[cut + 1 :]:
        assert_close(decoder.read(state, torch.tensor([TOKENS[cut + 1 :]])), reference(model)[-1:])


def test_rows_of_different_lengths_decode_as_alone(model, decoder):
    lengths = [30, 1, 17, 4]
    padded = torch.tensor([[0] * (30 - n) + TOKENS[:n] for n in lengths])
    state = decoder.start(4)
    logits = [decoder.read(state, padded, torch.tensor(lengths))]
    logits += [decoder.step(state, torch.tensor([5, 6, 7, 8])), decoder.step(state, torch.tensor([0, 1, 0, 1]))]
    for row, (n, token) in enumerate(zip(lengths, [5, 6, 7, 8], strict=True)):
        expected = reference(model, [*TOKENS[:n], token, row % 2])[-3:]
        assert_close(torch.stack([step[row] for step in logits]), expected)


def test_padding_behind_read_tokens_is_refused(decoder):
    state = decoder.start(3)
    decoder.read(state, torch.tensor([[0, 0], [0, 4], [3, 4]]), torch.tensor([0, 1, 2]))
    assert state.last_B.tolist() == [-1, 4, 4]
    before = state.rows(torch.arange(3))
    with pytest.raises(ValueError, match=r"lengths \[1, 1, 2\] of 2: padding behind tokens .* Read such sequences one"):
        decoder.read(state, torch.tensor([[0, 1], [0, 1], [1, 2]]), torch.tensor([1, 1, 2]))
    assert all(map(torch.equal, state._tensors(), before._tensors()))
    decoder.read(state, torch.tensor([[0, 1], [1, 2], [1, 2]]), torch.tensor([1, 2, 2]))  # the first has read nothing


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9, 20])
def test_any_batch_size_gives_each_row_the_same(model, decoder, batch):
    tokens = torch.tensor(TOKENS[:batch])
    state = decoder.start(batch)
    decoder.step(state, tokens)
    logits = decoder.step(state, tokens.flip(0))
    for row in {0, batch - 1}:
        assert_close(logits[row : row + 1], reference(model, [TOKENS[row], TOKENS[batch - 1 - row]])[-1:])


def test_state_rows_can_be_selected_and_repeated(model, decoder):
    state = decoder.start(2)
    decoder.read(state, torch.tensor([TOKENS[:9], TOKENS[9:18]]))
    twice = state.rows(torch.tensor([1, 1, 0]))
    logits = decoder.step(twice, torch.tensor([4, 5, 6]))
    assert_close(logits[1:2], reference(model, [*TOKENS[9:18], 5])[-1:])
    assert_close(logits[2:3], reference(model, [*TOKENS[:9], 6])[-1:])


def test_the_state_does_not_grow(decoder):
    state = decoder.start(1)
    before = state.bytes
    decoder.read(state, torch.tensor([TOKENS * 10]))
    for _ in range(50):
        decoder.step(state, torch.tensor([3]))
    assert state.bytes == before


def test_a_step_touches_no_expert_but_the_chosen(model):
    """The others are poisoned, so that reading one of them would show."""
    decoder = Decoder(pack(canonical(model), torch.float32))
    routes = forward(model.weights, model.config, TOKENS[:1]).routes
    experts = [layer for layer in decoder.weights.layers if hasattr(layer, "fc1_EGD")]
    for layer, (expert,) in zip(experts, routes.values(), strict=True):
        for e in range(4):
            if e != expert:
                layer.fc1_EGD[e] = layer.fc2_EDF[e] = float("nan")
    assert_close(decoder.step(decoder.start(1), torch.tensor(TOKENS[:1])), reference(model, TOKENS[:1]))


@pytest.mark.parametrize("batch", [1, 3, 4, 9])
def test_captured_step_equals_step_without_host_wait(decoder, batch):
    layer = next(layer for layer in decoder.weights.layers if hasattr(layer, "fc1_EGD"))
    x_BD = torch.randn(batch, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    choice_B = torch.arange(batch) * 3 % 4
    expected = chosen(decoder, layer, x_BD, choice_B.tolist())
    torch.testing.assert_close(gathered(decoder, layer, x_BD, choice_B), expected)

    meta = {name: vars(layer)[name].to("meta") for name in ("fc1_EGD", "fc2_EDF")}
    elsewhere = SimpleNamespace(**{**vars(layer), **meta})
    gathered(decoder, elsewhere, x_BD.to("meta"), choice_B.to("meta"))  # which has no values to tell


def test_a_captured_step_keeps_what_its_graph_reads(decoder, monkeypatch):
    """A graph knows addresses alone. Here nothing is captured; tests/gpu/test_decoding.py replays one."""
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    state = decoder.start(2)
    tensors = [weakref.ref(tensor) for tensor in state._tensors()]
    step = Captured(decoder, state)
    del state
    gc.collect()
    assert all(tensor() is not None for tensor in tensors)
    assert step(torch.tensor(TOKENS[:2])).shape == (2, decoder.config.vocab_size)


def test_step_is_captured_on_the_models_device(decoder, monkeypatch):
    """A capture on the current device, where another GPU has the weights, would be empty.

    The GPUs are pretended: the tensors are said to be on number 1, and 0 is current.
    """
    current, used = [0], []

    @contextmanager
    def device_of(tensor):
        current.append(1)
        yield
        current.pop()

    def noted(name):
        return lambda *_, **__: used.append((name, current[-1])) or MagicMock()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, noted(name))
    monkeypatch.setattr(decoder, "graphs", None)  # those of other tests
    step = Captured(decoder, decoder.start(2))
    step.graph.cuda_graph.replay = noted("replay")
    step(torch.tensor(TOKENS[:2]))
    assert {name for name, _ in used} == {"Stream", "current_stream", "stream", "CUDAGraph", "graph", "replay"}
    assert {number for _, number in used} == {1}
    assert current == [0]


def test_bytes_per_token_count_the_weights_read():
    model = canonical(tiny())
    idle = sum(
        entry.bytes for name, entry in model.entries.items() if "local_experts" in name and "experts.0" not in name
    )
    assert pack(model, torch.float32).bytes_a_token == model.bytes - idle


def test_bf16_weights_follow_fp32_ones_closely(model):
    rounded = cast(canonical(model), torch.bfloat16)
    exact = Decoder(pack(rounded, torch.float32))
    decoder = Decoder(pack(rounded, torch.bfloat16))
    states = exact.start(1), decoder.start(1)
    for token in TOKENS[:6]:  # stepping multiplies bf16 weights in fp32: only what is stored is rounded
        logits = [d.step(s, torch.tensor([token])) for d, s in zip((exact, decoder), states, strict=True)]
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


def test_bf16_prompt_follows_fp32_one_closely(model):
    rounded, tokens_BL = cast(canonical(model), torch.bfloat16), torch.tensor([TOKENS[:6]])
    decoders = [Decoder(pack(rounded, dtype)) for dtype in (torch.float32, torch.bfloat16)]
    exact, actual = (decoder.read_all(decoder.start(1), tokens_BL) for decoder in decoders)
    torch.testing.assert_close(actual, exact, atol=5e-2, rtol=5e-2)


def test_read_norms_only_the_last_row(decoder):
    """And gives the same logits bit for bit as the norm of all rows."""
    tokens_BL, weights = torch.tensor([TOKENS * 20, TOKENS[::-1] * 20]), decoder.weights
    stream_BLD = decoder.stream(decoder.start(2), tokens_BL)
    normed_BLD = decoder.final_norm.apply(stream_BLD, weights.final_norm_parameters, decoder.config.norm_eps)
    shapes, kind = [], decoder.final_norm

    class Watched:
        def apply(self, x, *more):
            shapes.append(tuple(x.shape))
            return kind.apply(x, *more)

    try:
        decoder.final_norm = Watched()
        logits_BV = decoder.read(decoder.start(2), tokens_BL)
    finally:
        decoder.final_norm = kind
    assert torch.equal(logits_BV, decoder.logits(normed_BLD[:, -1]))
    assert shapes == [(2, decoder.config.hidden_size)]


def test_decoding_keeps_no_graph(decoder):
    state = decoder.start(1)
    tokens = torch.tensor([TOKENS[:4]])
    logits = [decoder.read(state, tokens), decoder.read_all(state, tokens), decoder.step(state, tokens[:, 0])]
    assert [each.is_inference() for each in logits] == [True, True, True]


# The precision of the weights that decoding keeps in memory.

CPU = torch.device("cpu")


def stored_in(dtype):
    config = load("tiny").model
    return Canonical(
        config, {name: Entry(shape, dtype, lambda: None) for name, shape in shapes(config).items()}, "here"
    )


def test_free_memory_is_what_the_system_says():
    assert weights.free_bytes(CPU) == pytest.approx(psutil.virtual_memory().available, rel=0.5)


@pytest.mark.parametrize(
    ("stored", "free_over_weights", "kept"),
    [
        (torch.float32, 2.1, torch.float32),
        (torch.float32, 1.9, torch.bfloat16),
        (torch.bfloat16, 100.0, torch.bfloat16),
        (torch.float16, 2.1, torch.float32),
        (torch.float16, 1.9, torch.bfloat16),
    ],
)
def test_large_fp32_weights_are_kept_in_bf16(stored, free_over_weights, kept, monkeypatch):
    model = stored_in(stored)
    monkeypatch.setattr(weights, "free_bytes", lambda device: int(4 * model.parameters * free_over_weights))
    assert weights.fitting_dtype(model, CPU) == kept
