"""Width transfer: which parameters scale, initial values, refusals, and what an export is told."""

import pytest
import torch

from megatron_blackmamba import layers
from megatron_blackmamba.config import ConfigError, groups, load
from megatron_blackmamba.formats.atomic import write_json
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.model.initialise import draw
from tests.layers.running_mean.kind import RunningMean

SHAPE = ['model.pattern="MS*E-"', "model.mlp_hidden_size=96", "model.mamba2.head_dim=16", "model.attention.heads=4"]
WIDE = [*SHAPE, "model.hidden_size=256", "model.expert_hidden_size=512", "model.mlp_hidden_size=384"]


def wide(*more):
    return load("tiny", [*WIDE, "model.mup.base_width=64", *more])


def initial(run, name):
    kind = layers.kind_of(run.model.pattern[int(name.split(".")[2])])
    return draw(name, kind.shapes(run.model)[name.partition(".mixer.")[2]], run.model, seed=1)


@pytest.mark.parametrize(
    ("name", "rows", "falls"),
    [
        ("decoder.layers.0.mixer.in_proj.weight", slice(None), 2),
        ("decoder.layers.0.mixer.x_proj.weight", slice(0, 16), 2),  # dt
        ("decoder.layers.0.mixer.x_proj.weight", slice(16, None), 4),  # B and C
        ("decoder.layers.1.mixer.in_proj.weight", slice(0, 1024), 2),  # z and x
        ("decoder.layers.1.mixer.in_proj.weight", slice(1024, 1280), 4),  # B and C
        ("decoder.layers.1.mixer.in_proj.weight", slice(1280, None), 2),  # dt
        ("decoder.layers.2.mixer.linear_qkv.weight", slice(None), 2),
        ("decoder.layers.3.mixer.router.weight", slice(None), 4),
        ("decoder.layers.3.mixer.local_experts.2.linear_fc2.weight", slice(None), 2),
    ],
)
def test_initial_deviation_falls_with_width(name, rows, falls):
    scaled, fixed = initial(wide(), name), initial(load("tiny", WIDE), name)
    assert torch.equal(scaled[rows] * falls, fixed[rows])


@pytest.mark.parametrize("name", ["A_log", "D", "dt_proj.bias", "conv1d.weight", "dt_proj.weight"])
def test_values_of_channels_do_not_scale(name):
    name = f"decoder.layers.0.mixer.{name}"
    assert torch.equal(initial(wide(), name), initial(load("tiny", WIDE), name))


def test_rates_fall_with_inputs_of_matrices():
    run = wide("optimizer.groups.router.learning_rate=0.5", "model.dt_rank=4")
    expected = {"x_proj.weight": (1 / 4, 4.0), "dt_proj.weight": (1.0, 1.0), "A_log": (1.0, 1.0), "D": (1.0, 1.0)}
    assert {name: groups.factors(f"decoder.layers.0.mixer.{name}", run) for name in expected} == expected
    assert groups.factors("decoder.layers.3.mixer.router.weight", run) == (1 / 8, 4.0)
    assert groups.factors("decoder.layers.3.mixer.experts.fc2", run) == (1 / 4, 4.0)
    for name in (
        "embedding.word_embeddings.weight",
        "decoder.layers.1.norm.weight",
        "decoder.layers.3.mixer.router.bias",
    ):
        assert groups.factors(name, run)[1] == 1


def test_a_fixed_rank_of_dt_does_not_grow():
    name = "decoder.layers.0.mixer.x_proj.weight"
    scaled, fixed = (
        initial(load("tiny", [*WIDE, "model.dt_rank=4", *more]), name) for more in (["model.mup.base_width=64"], [])
    )
    assert torch.equal(scaled * 4, fixed)


def test_attention_scale_falls_with_channels_of_a_head():
    assert wide().model.attention_scale == pytest.approx(64**-0.5 * 2 / 4)  # 16 channels in the base model
    assert wide("model.mup.base_heads=1").model.attention_scale is None
    assert wide("model.multipliers.attention=0.3").model.attention_scale == pytest.approx(0.3 / 4)


def test_explicit_heads_do_not_grow_wider():
    given = ("model.attention.head_dim=16", "model.mup.base_heads=2")
    assert wide(given[0]).model.attention_scale is None
    assert wide(given[0], "model.multipliers.attention=0.3").model.attention_scale == 0.3
    name = "decoder.layers.2.mixer.linear_proj.weight"  # whose inputs are the channels of all heads
    growth = {more: groups.factors(name, wide(*more))[0] for more in ((), given[:1], given)}
    assert growth == {(): 1 / 4, given[:1]: 1.0, given: 1 / 2}


def test_an_export_stands_for_itself(tmp_path):
    model = wide("model.multipliers.logits=2", "model.multipliers.residual=0.5").model
    content = hf.to_json(model, 128, torch.float32)
    assert (content["logits_scaling"], content["residual_multiplier"]) == (8.0, 0.5)
    write_json(tmp_path / "config.json", content)
    imported, _ = hf.read_config(tmp_path / "config.json")
    assert imported.mup.base_width is None
    assert hf.function_of(imported) == hf.function_of(model)


@pytest.fixture
def a_kind_without_a_rule():
    layers.register(RunningMean)
    yield
    layers.unregister(RunningMean.letter)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.pattern=MA"], r"model\.mup: running mean layers \(A\) have no rule for growing widths\. Leave"),
        (
            ["optimizer.kind=sgd", "optimizer.distributed=false"],
            r"optimizer\.kind=sgd has no rule .* Use adamw or muon\.",
        ),
        (["model.mup.base_heads=2"], r"model\.mup\.base_heads: only attention layers \(\*\) have it"),
        (["model.multipliers.attention=2"], r"model\.multipliers\.attention: only attention layers"),
    ],
)
def test_what_has_no_rule_is_refused(overrides, told, a_kind_without_a_rule):
    with pytest.raises(ConfigError, match=told):
        load("tiny", ["model.mup.base_width=32", *overrides])


def test_heads_of_a_base_model_need_its_width():
    with pytest.raises(ConfigError, match=r"model\.mup\.base_heads needs model\.mup\.base_width"):
        load("tiny", [*SHAPE, "model.mup.base_heads=2"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.mtp.pattern=M*"], r"model\.mtp\.pattern='M\*' is made of letters of model\.pattern=MEME"),
        (["model.mtp.pattern=''"], r"model\.mtp\.pattern='' is made of letters"),
        (["model.mtp.reads=norm"], r"model\.mtp\.reads=norm needs an extra depth: set model\.mtp\.pattern"),
        (["model.mtp.pattern=M", "model.arrangement=parallel"], r"model\.mtp has no parallel arrangement"),
    ],
)
def test_multi_token_prediction_is_refused_before_a_run(overrides, told):
    with pytest.raises(ConfigError, match=told):
        load("tiny", overrides)
