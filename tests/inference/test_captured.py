"""Captured steps: graphs live with the decoder, and sequences that share one keep their own state."""

import dataclasses

import pytest
import torch

from megatron_blackmamba.inference import Decoder, Generator, Sampling
from megatron_blackmamba.inference.captured import Captured, graphs_of, stepper
from megatron_blackmamba.inference.weights import pack
from tests.inference.replayed import graphs
from tests.reference import tiny
from tests.reference.canonical import canonical

PROMPTS = [[5, 17, 3], [8, 1, 33, 21], [42, 2]]


@pytest.fixture
def captured():
    with graphs():
        yield Decoder(pack(canonical(tiny()), torch.float32))


def tokens_of(decoder, prompts, **sampling):
    steps = Generator(decoder).tokens(prompts, max_new_tokens=12, sampling=Sampling(**sampling))
    return [list(row) for row in zip(*steps, strict=True)]


def test_texts_on_one_graph_take_turns(captured):
    alone = [tokens_of(Decoder(captured.weights, fused=False), [prompt])[0] for prompt in PROMPTS]
    generator = Generator(captured)
    first, second = (generator.tokens([prompt], max_new_tokens=12) for prompt in PROMPTS[:2])
    turns = [(next(first)[0], next(second)[0]) for _ in range(6)]
    both = tokens_of(captured, PROMPTS)
    turns += [(a[0], b[0]) for a, b in zip(first, second, strict=True)]
    assert [list(each) for each in zip(*turns, strict=True)] == alone[:2]
    assert both == alone
    assert set(captured.graphs.by_size) == {1, 3}


def test_graphs_live_with_the_decoder(captured):
    tokens_of(captured, PROMPTS[:2])
    kept = captured.graphs.by_size[2]
    assert tokens_of(captured, PROMPTS[1:], temperature=1.0) == tokens_of(captured, PROMPTS[1:], temperature=1.0)
    assert captured.graphs.by_size[2] is kept


def test_moved_weights_are_captured_anew(captured):
    before = tokens_of(captured, PROMPTS[:1])
    old = captured.graphs
    weights = captured.weights
    captured.weights = dataclasses.replace(weights, head_VD=weights.head_VD.flip(0))
    after = tokens_of(captured, PROMPTS[:1])
    assert captured.graphs is not old
    assert after == tokens_of(Decoder(captured.weights), PROMPTS[:1]) != before


def test_settled_state_goes_on_without_a_graph(captured):
    state = captured.start(2)
    step = stepper(captured, state)
    assert isinstance(step, Captured)
    tokens = torch.tensor([[5, 17, 3], [8, 1, 33]])
    for place in range(2):
        step(tokens[:, place])
    exact = captured.start(2)
    for place in range(2):
        captured.step(exact, tokens[:, place])
    expected = captured.step(exact, tokens[:, 2])
    assert torch.equal(captured.step(step.settled(), tokens[:, 2]), expected)


def test_larger_batches_outlive_all_earlier_graphs(captured):
    tokens_of(captured, PROMPTS[:1])
    assert tokens_of(captured, PROMPTS * 3) == tokens_of(captured, PROMPTS) * 3


def test_larger_batches_make_room_and_smaller_ones_stay(captured):
    held = stepper(captured, captured.start(1))
    held(torch.tensor([5]))
    tokens_of(captured, PROMPTS * 3)
    assert len(graphs_of(captured).state.last_B) == 16
    exact = captured.start(1)
    captured.step(exact, torch.tensor([5]))
    assert torch.equal(held(torch.tensor([17])), captured.step(exact, torch.tensor([17])))
