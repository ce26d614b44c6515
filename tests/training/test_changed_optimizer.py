"""A resumed run obeys every optimizer key of its config, as if the key had been changed while it ran."""

import pytest
import torch

from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.runtime import world
from megatron_blackmamba.settings import OptimizerConfig
from megatron_blackmamba.training.start.resume import ResumeError, refuse_changes
from tests.training.short_runs import BEFORE, KINDS, Run

pytestmark = pytest.mark.xdist_group("short_runs")  # its checkpoints are saved once, not once a worker
CHANGES = {
    "learning_rate": 0.03,
    "min_learning_rate": 0.002,
    "warmup_fraction": 0.9,
    "decay": "constant",
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 0.1,
    "moments": "bf16",
    "gradients": "bf16",
    "momentum": 0.5,
    "weight_decay": 0.5,
    "clip": 0.01,
    "newton_schulz": "jordan",
}
REFUSED = {"distributed": False, "kind": "sgd"}
ELSEWHERE = {
    "groups": "test_ema.py",
    "extensions": "tests/config/test_extensions.py",
    "matrices": "tests/engine/test_muon.py",
    "qk_clip": "test_muon.py",
} | dict.fromkeys(
    ("warmup_tokens", "decay_fraction", "decay_tokens", "decay_shape"), "test_branches.py and test_learning_rates.py"
)
"""Keys that other tests change."""
AFTER = 3
OF_SGD = ("momentum", "learning_rate", "weight_decay")
OF_MUON = ("momentum", "newton_schulz")
EACH = [*(("bf16", key) for key in CHANGES if key not in ("gradients", *OF_MUON))]
EACH += [*(("whole", key) for key in ("beta1", "beta2", "eps", "moments")), *(("sgd", key) for key in OF_SGD)]
EACH += [*(("muon", key) for key in (*OF_MUON, "learning_rate", "weight_decay", "beta1", "eps", "moments"))]


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


@pytest.fixture(scope="module")
def saved(place, tmp_path_factory):
    """For each kind of optimizer, a checkpoint after three steps."""
    folders = {}
    for kind in KINDS:
        folders[kind] = tmp_path_factory.mktemp(kind)
        run = Run(place, folders[kind], kind).train(BEFORE)
        run.checkpoints.save(BEFORE, {})
        run.checkpoints.finish(wait=True)
    return folders


@pytest.fixture(scope="module")
def unchanged(place, saved):
    """The weights after a resume that changes nothing."""
    return {kind: Run(place, folder, kind).resumed().train(AFTER).weights() for kind, folder in saved.items()}


@pytest.mark.parametrize("kind, key", EACH)
def test_a_changed_key_acts_from_the_checkpoint_on(place, saved, unchanged, kind, key):
    changed = f"optimizer.{key}={CHANGES[key]}"
    resumed = Run(place, saved[kind], kind, changed).resumed().train(AFTER)
    live = Run(place, saved[kind], kind).train(BEFORE)
    expected = live.change(resumed.config).train(AFTER)
    assert torch.equal(resumed.weights(), expected.weights())
    assert not torch.equal(resumed.weights(), unchanged[kind])


@pytest.mark.parametrize("kind", ["narrow", "whole_narrow"])
def test_bf16_moments_continue_exactly(place, saved, unchanged, kind):
    expected = Run(place, saved[kind], kind).train(BEFORE + AFTER)
    assert torch.equal(unchanged[kind], expected.weights())
    assert dtypes_of(expected) == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["narrow", "whole_narrow"])
def test_bf16_moments_continue_in_fp32(place, saved, unchanged, kind):
    resumed = Run(place, saved[kind], kind, "optimizer.moments=fp32").resumed()
    before = Run(place, saved[kind], kind).train(BEFORE)
    for wide, narrow in zip(moments_of(resumed), moments_of(before), strict=True):
        assert wide.dtype == torch.float32 and torch.equal(wide, narrow.float())
    assert not torch.equal(resumed.train(AFTER).weights(), unchanged[kind])
    assert dtypes_of(resumed) == {torch.float32}


@pytest.mark.parametrize("kind, precision", [("bf16", "bf16"), ("narrow", "fp32")])
def test_changed_gradients_keep_weights_and_moments(place, saved, unchanged, kind, precision):
    resumed = Run(place, saved[kind], kind, f"optimizer.gradients={precision}").resumed()
    before = Run(place, saved[kind], kind).resumed()
    assert torch.equal(resumed.weights(), before.weights())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(moments_of(resumed), moments_of(before), strict=True))
    dtypes = {p.main_grad.dtype for p in resumed.trainable.model.parameters() if p.dtype == torch.bfloat16}
    assert dtypes == {torch.float32 if precision == "fp32" else torch.bfloat16}
    after = resumed.train(AFTER).weights()
    assert torch.equal(after, unchanged[kind])  # nothing is added to the gradient of the only micro-batch


def moments_of(run):
    parts = getattr(run.trainable.optimizer, "chained_optimizers", [run.trainable.optimizer])
    states = [part.optimizer.state[weight] for part in parts for g in part.param_groups for weight in g["params"]]
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def dtypes_of(run):
    return {moment.dtype for moment in moments_of(run)}


def test_every_optimizer_key_is_tried_or_refused():
    assert set(CHANGES) | set(REFUSED) | set(ELSEWHERE) == set(OptimizerConfig.model_fields)
    before = load("tiny").model_dump(mode="json", by_alias=True)
    for key, value in REFUSED.items():
        with pytest.raises(ResumeError, match=rf"optimizer\.{key}"):
            changed = [f"optimizer.{key}={value}", "optimizer.distributed=false", "resume.allow=[optimizer]"]
            refuse_changes(before, load("tiny", changed), step=5)
