"""Every letter of the pattern trains, decodes, is exported and planned; docs/extending.md says how to test one letter.

The modules in BLACKMAMBA_IMPORT add their letters to those of the package, and the example is here too.
"""

from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_blackmamba import layers
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import through_megatron
from megatron_blackmamba.model import build, lookahead
from megatron_blackmamba.plan import flops, memory, parameters
from megatron_blackmamba.plan.activations import Activations
from megatron_blackmamba.registry import Cannot
from megatron_blackmamba.runtime import world
from tests.interchange.loading import EOD, PADDING, assert_loads_as_trained, close, moved, padded, texts
from tests.layers.rows_probe import HEADS
from tests.layers.running_mean.kind import RunningMean
from tests.layers.sizes import LETTERS
from tests.plan.memory_probe import counted_attention, saved_for_backward

EXAMPLES = {} if RunningMean.letter in LETTERS else {RunningMean.letter: RunningMean}
SEQUENCE = 32
every_letter = pytest.mark.parametrize("letter", [*LETTERS, *EXAMPLES])
every_text = pytest.mark.parametrize("eod", [[], [f"model.eod_reset={EOD}"]], ids=["whole", "documents"])


@pytest.fixture(autouse=True)
def example(letter):
    if letter in EXAMPLES:
        layers.register(EXAMPLES[letter])
    yield
    if letter in EXAMPLES:
        layers.unregister(letter)


def run_of(letter, *overrides):
    return load("tiny", [*HEADS, f"model.pattern='{letter * 2}'", f"data.sequence_length={SEQUENCE}", *overrides])


@pytest.fixture
def alone():
    """A process without others, until the test builds what simulates its own."""
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as place:
        yield place


@every_letter
def test_every_parameter_gets_a_gradient(letter, alone):
    model = build(run_of(letter), alone)
    model(texts(2, SEQUENCE), texts(2, SEQUENCE).roll(-1, 1)).mean().backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []


@every_letter
def test_plan_counts_the_products_of_torch(letter, alone):
    """In float64, where experts are plain products, and the scan has none."""
    config = run_of(letter, "training.precision=fp64", "kernels.scan=reference", "model.router.kind=softmax")
    model = build(config, alone)
    with torch.no_grad(), counted_attention(), FlopCounterMode(display=False) as counter:
        model(texts(1, SEQUENCE), texts(1, SEQUENCE))
    parts = flops.forward_by_part(config.model, SEQUENCE)
    products = sum(count for part, count in parts.items() if part not in layers.kind_of(letter).costs.elementwise)
    assert counter.get_total_flops() == SEQUENCE * products


@every_letter
def test_plan_predicts_parameters_and_kept_bytes(letter):
    config = run_of(letter, "training.micro_batch=4")
    with world.fake(config.parallel, world_size=1, where="cpu") as alone:
        model = build(config, alone)
        saved = saved_for_backward(model, texts(4, SEQUENCE))
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
        whole = texts(1, SEQUENCE)
        other = torch.cat([whole[:, :4].flip(1), whole[:, 4:]], 1)
        first, second = (model(text, text.roll(-1, 1))[0] for text in (whole, other))
    assert not torch.equal(first[:4], second[:4])
    assert (first[5:-1] - second[5:-1]).abs().max() < 1e-12


@every_letter
@every_text
def test_decoding_computes_as_training(letter, eod):
    config = run_of(letter, *eod)
    if isinstance(layers.kind_of(letter).decoding(config.model), Cannot):
        pytest.skip("it does not decode")
    model, tokens_BL = moved(config), texts(2, 14)
    decoder, trained = Decoder(pack(model, torch.float32)), through_megatron.observe(model, tokens_BL).logits_BSV
    state = decoder.start(2)
    stepped = [decoder.step(state, tokens_B) for tokens_B in tokens_BL.unbind(1)]
    state, lengths_B = decoder.start(2), torch.full((2,), 9 - PADDING)
    first = decoder.read_all(state, padded(tokens_BL)[:, :9], lengths_B)[:, PADDING:]
    second = decoder.read_all(state, tokens_BL[:, 9 - PADDING :])
    close(torch.stack(stepped, dim=1), trained)
    close(torch.cat((first, second), dim=1), trained)


@every_letter
@every_text
def test_transformers_compute_as_training(letter, eod, tmp_path):
    config = run_of(letter, *eod)
    if layers.obstacles(config.model):
        pytest.skip("it is not exported")
    assert_loads_as_trained(config, tmp_path)
