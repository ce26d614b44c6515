"""The parameters of the model: exact counts, precisions, and exceptions from weight decay."""

import pytest
import torch

from megatron_blackmamba import layers, model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.layers import by_rows, whole
from megatron_blackmamba.model.linears import column, row
from megatron_blackmamba.model.sharding import empty
from megatron_blackmamba.optimizers.base import NO_DECAY
from megatron_blackmamba.registry import KindError
from megatron_blackmamba.runtime import world
from tests.layers.running_mean.kind import RunningMean

from megatron.core.transformer.module import MegatronModule

ALWAYS_FP32 = ("A_log", ".D", "dt_proj.bias", "dt_bias")


@pytest.mark.parametrize("name, total", [("blackmamba_1.5b", 1_458_462_072), ("blackmamba_2.8b", 2_783_213_584)])
def test_the_papers_models_have_exactly_their_parameters(name, total):
    config = load(name, ["parallel.expert=1"])
    with world.fake(ParallelConfig(), world_size=1) as place:
        built = model.build(config, place)
        assert sum(parameter.numel() for parameter in built.parameters()) == total


class FixedMixer(MegatronModule):
    """The parameters of the running mean, whatever its kind declares."""

    def __init__(self, config, layer_number, pg_collection):
        super().__init__(config)
        D, tp_group = config.hidden_size, pg_collection.tp
        self.gain = empty(D // tp_group.size(), dtype=config.params_dtype)
        self.in_proj, self.out_proj = column(D, D, config, tp_group), row(D, D, config, tp_group)


class Fixed(RunningMean):
    letter, mixer = "W", f"{__name__}:FixedMixer"


class Misshapen(Fixed):
    def weights(self, model):
        return super().weights(model) | {"gain": by_rows(x=128)}


class Shaped(Fixed):
    def weights(self, model):
        return super().weights(model) | {"gain": (64,)}


class Silent(Fixed):
    def weights(self, model):
        return {name: weight for name, weight in super().weights(model).items() if name != "gain"}


class Turned(Fixed):
    def weights(self, model):
        return super().weights(model) | {"out_proj.weight": by_rows(64, out=64)}


class Imagined(Fixed):
    def weights(self, model):
        return super().weights(model) | {"bias": whole(x=64)}


class Mixerless(Fixed):
    mixer = "tests.layers.running_mean.mixer:Mixture"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Misshapen, r"layers\.1\.mixer\.gain: .* \(64,\), and Misshapen.weights says \(128,\)"),
        (Shaped, r"Shaped\.weights says \(64,\) of gain, but not how tensor parallelism spreads it"),
        (Silent, r"layers\.1\.mixer\.gain: Silent\.weights does not declare its rows, nor how they are spread"),
        (Turned, r"layers\.1\.mixer\.out_proj\.weight: its module splits axis 1, and Turned\.weights says 0"),
        (Imagined, r"layers\.1\.mixer\.bias: Imagined\.weights declares it, but the mixer has no such parameter"),
        (Mixerless, r"Mixerless.mixer='tests.layers.running_mean.mixer:Mixture' cannot be imported"),
    ],
)
def test_wrong_kind_is_named_when_layer_is_built(build, kind, said):
    layers.register(kind)
    try:
        with pytest.raises(KindError, match=said):
            build("model.pattern=MW")
    finally:
        layers.unregister("W")


def test_bf16_keeps_sensitive_parameters_in_fp32(build):
    for name, parameter in build("training.precision=bf16", "model.pattern=MSE").named_parameters():
        expected = torch.float32 if name.endswith(ALWAYS_FP32) else torch.bfloat16
        assert parameter.dtype == expected, name


def test_weight_decay_spares_vectors_and_A_log(build):
    for name, parameter in build("model.pattern=MSE").named_parameters():
        spared = getattr(parameter, NO_DECAY, False)
        assert spared == (parameter.dim() == 1 or name.endswith("A_log")), name


def test_the_residual_stream_is_fp32_between_all_layers(build):
    built = build("training.precision=bf16")
    streams, normed = [], []
    for block in built.decoder.layers:
        block.register_forward_hook(lambda _module, inputs, output: streams.extend([inputs[0].dtype, output[0].dtype]))
        block.norm.register_forward_hook(lambda _module, _inputs, output: normed.append(output[0].dtype))
    built(torch.randint(0, 512, (1, 16)))
    assert set(streams) == {torch.float32}
    assert set(normed) == {torch.bfloat16}


def test_weights_depend_only_on_the_seed(build):
    first, again, other = build(), build(), build("training.seed=7")
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        drawn = not name.endswith(("norm.weight", "norm.bias", "router.bias", "A_log", ".D"))
        assert torch.equal(a, c) != drawn, name


@pytest.mark.parametrize("kind", layers.all_kinds(), ids=lambda kind: kind.name)
def test_layers_draw_from_the_given_generator(kind):
    config = load("tiny").model
    for name, shape in kind.shapes(config).items():
        one, again = (kind.initial(name, shape, config, torch.Generator().manual_seed(3)) for _ in range(2))
        assert (one is None and again is None) or torch.equal(one, again), name


def test_initial_step_sizes_lie_between_the_configured_bounds(build):
    for name, parameter in build().named_parameters():
        if name.endswith("dt_proj.bias"):
            dt = torch.nn.functional.softplus(parameter)
            assert 0.00099 < dt.min() < 0.003 < 0.03 < dt.max() < 0.101
