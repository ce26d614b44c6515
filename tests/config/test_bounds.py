"""The smallest and largest values that keys accept: the last good value loads, the first bad one is refused by name."""

import pytest

from megatron_blackmamba.config import ConfigError, load

ABOVE_ZERO = [
    "model.router.temperature",
    "model.router.bias_update_rate",
    "model.init.std",
    "model.init.dt_min",
    "model.init.dt_max",
    "model.init.dt_floor",
    "model.norm_eps",
    "optimizer.learning_rate",
    "optimizer.eps",
    "optimizer.momentum",
    "training.guard.spike_deviations",
]
FROM_ZERO = [
    "model.router.aux_loss",
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
    "model.vocab_size",
    "model.hidden_size",
    "model.state_size",
    "model.expand",
    "model.dt_rank",
    "model.experts",
    "model.top_k",
    "model.expert_hidden_size",
    "model.mlp_hidden_size",
    "model.router.iterations",
    "model.attention.heads",
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
    ("optimizer.warmup_fraction", 0.999, 1),
    ("optimizer.beta1", 0.999, 1),
    ("optimizer.momentum", 0.999, 1),
    ("optimizer.beta2", 0.999, 1),
    ("training.guard.spike_window", 8, 7),
    ("training.guard.max_spikes", 2, 1),
    ("training.profile", "[1, 1]", "[0, 1]"),
    ("training.profile", "[2, 2]", "[2, 1]"),
]


READER = {  # a kind that reads the key
    "optimizer.momentum": ["optimizer.kind=sgd", "optimizer.distributed=false"],
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
