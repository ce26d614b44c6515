"""The smallest and largest values that keys accept: the last good value loads, the first bad one is refused by name."""

from typing import get_args

import pytest

from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.config.load import walk

ABOVE_ZERO = [
    "model.router.temperature",
    "model.logit_softcap",
    "model.mtp.loss",
    *(f"model.multipliers.{name}" for name in ("embedding", "residual", "attention", "logits")),
    "model.router.bias_update_rate",
    "model.init.std",
    "model.init.dt_min",
    "model.init.dt_max",
    "model.init.dt_floor",
    "model.norm_eps",
    "optimizer.learning_rate",
    "optimizer.eps",
    "optimizer.momentum",
    "optimizer.qk_clip",
    "training.guard.spike_deviations",
]
FROM_ZERO = [
    "model.router.iterations",
    "model.router.aux_loss",
    "model.router.z_loss",
    "model.z_loss",
    "model.eod_reset",
    "data.workers",
    "data.verify_rate",
    "optimizer.min_learning_rate",
    "optimizer.warmup_fraction",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.weight_decay",
    "optimizer.clip",
    "training.evaluate_every",
    "checkpoint.every",
    "checkpoint.keep_every",
]
FROM_ONE = [
    "model.mup.base_width",
    "model.mup.base_heads",
    "model.vocab_size",
    "model.hidden_size",
    "model.state_size",
    "model.expand",
    "model.dt_rank",
    "model.experts",
    "model.top_k",
    "model.expert_hidden_size",
    "model.mlp_hidden_size",
    "model.attention.heads",
    "model.attention.kv_heads",
    "model.attention.rotary_base",
    "model.mamba2.head_dim",
    "model.mamba2.state_size",
    "model.mamba2.groups",
    "model.mamba3.head_dim",
    "model.mamba3.state_size",
    "model.mamba3.groups",
    "model.mamba3.rank",
    "model.delta.key_dim",
    "model.delta.head_dim",
    "model.shared_expert_hidden_size",
    "model.latent_size",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.context",
    "parallel.expert",
    "parallel.expert_tensor",
    "data.sequence_length",
    "data.synthetic.sources",
    "data.synthetic.order",
    "training.tokens",
    "training.global_batch",
    "training.micro_batch",
    "training.bucket_size",
    "training.evaluate_batches",
    "training.router_every",
    "training.stop_after_steps",
    "training.guard.max_bad_steps",
    "training.guard.hang_seconds",
    "training.guard.rewind_batches",
    "checkpoint.keep_last",
    "checkpoint.retry_every",
]
BOUNDS = [
    *((key, 1e-12, 0) for key in ABOVE_ZERO),
    *((key, 0, -1) for key in FROM_ZERO),
    *((key, 1, 0) for key in FROM_ONE),
    ("model.state_size", 64, 65),
    ("data.workers", 1024, 1025),
    ("model.conv_kernel", 2, 1),
    ("model.conv_kernel", 8, 9),
    ("model.eod_reset", 511, 512),
    *((f"model.{key}", 2**24, 2**24 + 1) for key in ("hidden_size", "dt_rank", "expert_hidden_size", "latent_size")),
    ("model.vocab_size", 2**31, 2**31 + 1),
    ("model.expand", 1024, 1025),
    ("model.experts", 2**16, 2**16 + 1),
    ("optimizer.warmup_fraction", 0.999, 1),
    ("optimizer.beta1", 0.999, 1),
    ("optimizer.momentum", 0.999, 1),
    ("optimizer.beta2", 0.999, 1),
    ("training.guard.spike_window", 8, 7),
    ("training.guard.max_spikes", 2, 1),
    ("training.profile", "[1, 1]", "[0, 1]"),
    ("training.profile", "[2, 2]", "[2, 1]"),
]


UNFIT = [
    ("model.attention.kv_heads=3", "heads=4 is not divisible by model.attention.kv_heads=3"),
    ("model.attention.kv_heads=8", "heads=4 is not divisible by model.attention.kv_heads=8"),
    ("model.attention.heads=64", "leaves 1 channels a head"),
    ("model.attention.heads=5", "model.hidden_size=64 is not divisible by model.attention.heads=5"),
    ("model.init.dt_min=0.2", "dt_min=0.2 is above model.init.dt_max=0.1"),
]


@pytest.mark.parametrize("override, told", UNFIT)
def test_values_that_contradict_each_other_are_refused(override, told):
    attention = ["model.pattern=M*", "model.attention.heads=4"]
    load("tiny", attention)
    with pytest.raises(ConfigError, match=told):
        load("tiny", [*attention, override])


FLOATS = [path for path, field, _ in walk() if float in (field.annotation, *get_args(field.annotation))]


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("key", FLOATS)
def test_numbers_that_are_not_finite_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"{key}=-?(inf|nan): input should be a finite number"):
        load("tiny", [f"{key}={value}"])


@pytest.mark.parametrize("name", ["2024", "0123", "12:30", "1e3", "true", "null", "~", "[a]", "2024-01-01", "0x10"])
def test_texts_stay_as_they_were_typed(name):
    assert load("tiny", [f"name={name}", f"logging.wandb_project={name}"]).name == name
    assert load("tiny", [f"name='{name}'"]).name == name
    if name not in ("null", "~"):
        assert load("tiny", [f"start.from={name}"]).start.from_ == name


def test_a_pattern_of_dashes_is_a_pattern():
    for pattern in ("-", "--", "---"):
        run = load("tiny", [f"model.pattern={pattern}", "model.mlp_hidden_size=64"])
        assert run.model.pattern == pattern


@pytest.mark.parametrize("steps", ["1000", "1e3", "1K", "1_000"])
def test_steps_are_read_as_tokens_are(steps):
    run = load("tiny", ["training.global_batch=1e1", "training.micro_batch=1", f"training.steps={steps}"])
    assert run.training.tokens == 1000 * 10 * run.data.sequence_length


READER = {  # a kind that reads the key
    "model.multipliers.attention": ["model.pattern=M*"],
    "model.mup.base_heads": ["model.pattern=M*", "model.mup.base_width=16"],
    "optimizer.momentum": ["optimizer.kind=sgd", "optimizer.distributed=false"],
    "optimizer.qk_clip": ["optimizer.kind=muon", "model.pattern=M*"],
    "model.init.dt_max": ["model.init.dt_min=1e-12"],
    "model.router.aux_loss": ["model.router.kind=softmax"],
    "model.router.bias_update_rate": ["model.router.kind=expert_bias"],
}


@pytest.mark.parametrize("key, good, bad", BOUNDS, ids=[f"{key}={bad}" for key, _, bad in BOUNDS])
def test_first_value_out_of_bounds_is_refused(key, good, bad):
    fitting = ["optimizer.min_learning_rate=0", "training.micro_batch=1"]
    fitting += READER.get(key, [])
    load("tiny", [*fitting, f"{key}={good}"])
    with pytest.raises(ConfigError, match=rf"{key}={bad}".replace("[", r"\[")):
        load("tiny", [*fitting, f"{key}={bad}"])


@pytest.mark.parametrize("letter", ["x", "ü"])
def test_a_name_has_at_most_200_bytes(letter):
    longest = letter * (200 // len(letter.encode()))
    assert load("tiny", [f"name={longest}"]).name == longest
    with pytest.raises(ConfigError, match="at most 200 bytes"):
        load("tiny", [f"name={longest}y"])


def test_constant_learning_rate_is_accepted():
    rates = load("tiny", ["optimizer.learning_rate=0.002", "optimizer.min_learning_rate=0.002"]).optimizer
    assert rates.learning_rate == rates.min_learning_rate == 0.002
