"""Every letter of the pattern trains, decodes, is exported and planned; docs/extending.md says how to test one letter.

The modules in BLACKMAMBA_IMPORT add their letters to those of the package.
"""

from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_blackmamba import layers
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import megatron, through_hf, through_megatron
from megatron_blackmamba.model import build, lookahead
from megatron_blackmamba.plan import flops, memory, parameters
from megatron_blackmamba.plan.activations import Activations
from megatron_blackmamba.registry import Cannot, import_extensions
from megatron_blackmamba.runtime import world
from tests.layers.rows_probe import HEADS
from tests.plan.memory_probe import counted_attention, saved_for_backward

import_extensions()
LETTERS = [kind.letter for kind in layers.all_kinds()]
EOD, SEQUENCE = 3, 32
every_letter = pytest.mark.parametrize("letter", LETTERS)


def run_of(letter, *overrides):
    return load("tiny", [*HEADS, f"model.pattern='{letter * 2}'", f"data.sequence_length={SEQUENCE}", *overrides])


def tokens(rows, length=SEQUENCE):
    tokens_BS = torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    tokens_BS[0, 4] = tokens_BS[-1, 6] = tokens_BS[-1, 9] = EOD
    return tokens_BS


@pytest.fixture
def alone():
    """A process without others, until the test builds what simulates its own."""
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as place:
        yield place


@every_letter
def test_every_parameter_gets_a_gradient(letter, alone):
    model = build(run_of(letter), alone)
    model(tokens(2), tokens(2).roll(-1, 1)).mean().backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []


@every_letter
def test_plan_counts_the_products_of_torch(letter, alone):
    """In float64, where experts are plain products, and the scan has none."""
    config = run_of(letter, "training.precision=fp64", "kernels.scan=reference", "model.router.kind=softmax")
    model = build(config, alone)
    with torch.no_grad(), counted_attention(), FlopCounterMode(display=False) as counter:
        model(tokens(1), tokens(1))
    parts = flops.forward_by_part(config.model, SEQUENCE)
    products = sum(count for part, count in parts.items() if part not in layers.kind_of(letter).costs.elementwise)
    assert counter.get_total_flops() == SEQUENCE * products


@every_letter
def test_plan_predicts_parameters_and_kept_bytes(letter):
    config = run_of(letter, "training.micro_batch=4")
    with world.fake(config.parallel, world_size=1, where="cpu") as alone:
        model = build(config, alone)
        saved = saved_for_backward(model, tokens(4))
    predicted = memory.kept(config, 0, "none", "cpu") + Activations(config, "cpu").logits()
    tensors = Counter((x.untyped_storage().nbytes(), tuple(x.shape)) for x in saved)
    kept = sum(nbytes * count for (nbytes, _), count in tensors.items())
    assert kept == pytest.approx(predicted, rel=0.05), f"torch keeps, by bytes and shape: {tensors}"
    assert parameters.count(config).total == sum(weight.numel() for weight in model.parameters())


@every_letter
def test_no_output_depends_on_later_tokens(letter):
    config = run_of(letter)
    layer, *_ = lookahead.parts_of(config.model)
    assert lookahead.problem_of(layer, config) is None


@every_letter
def test_documents_do_not_change_each_other(letter, alone):
    model = build(run_of(letter, f"model.eod_reset={EOD}", "training.precision=fp64"), alone).eval()
    with torch.no_grad():
        whole = tokens(1)
        other = torch.cat([whole[:, :4].flip(1), whole[:, 4:]], 1)
        first, second = (model(text, text.roll(-1, 1))[0] for text in (whole, other))
    assert not torch.equal(first[:4], second[:4])
    assert (first[5:-1] - second[5:-1]).abs().max() < 1e-12


@every_letter
@pytest.mark.parametrize("eod", [None, EOD], ids=["whole", "documents"])
def test_decoding_and_export_compute_as_training(letter, eod):
    config = run_of(letter, *([] if eod is None else [f"model.eod_reset={eod}"]))
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as alone:
        model = megatron.of_module(build(config, alone))
    tokens_BL = tokens(2, 14)
    trained = through_megatron.observe(model, tokens_BL).logits_BSV
    if not isinstance(layers.kind_of(letter).decoding(config.model), Cannot):
        decoder = Decoder(pack(model, torch.float32))
        state = decoder.start(2)
        stepped = torch.stack([decoder.step(state, tokens_B) for tokens_B in tokens_BL.unbind(1)], dim=1)
        state = decoder.start(2)
        read = torch.cat([decoder.read_all(state, piece_BL) for piece_BL in tokens_BL.split(7, dim=1)], dim=1)
        torch.testing.assert_close(stepped, trained, atol=1e-4, rtol=0)
        torch.testing.assert_close(read, trained, atol=1e-4, rtol=0)
    if not layers.obstacles(config.model):
        torch.testing.assert_close(through_hf.observe(model, tokens_BL).logits_BSV, trained, atol=1e-4, rtol=0)
