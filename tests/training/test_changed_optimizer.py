"""A resumed run obeys every optimizer key of its config, as if the key had been changed while it ran."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.checkpoint import Checkpoints
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.config.run import OptimizerConfig
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.optimizer import make_trainable
from megatron_blackmamba.training.resume import ResumeError, refuse_changes
from megatron_blackmamba.training.schedule import Schedule
from megatron_blackmamba.training.step import Step

SMALL = [
    *("model.pattern=ME", "model.hidden_size=16", "model.expert_hidden_size=16", "model.vocab_size=32"),
    *("model.experts=2", "data.sequence_length=16", "training.global_batch=2", "training.micro_batch=2"),
    *("training.tokens=320", "optimizer.weight_decay=0.1", "optimizer.clip=100"),  # 10 steps
]
CHANGES = {
    "learning_rate": 0.03,
    "min_learning_rate": 0.002,
    "warmup_fraction": 0.9,
    "decay": "constant",
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 0.1,
    "momentum": 0.5,
    "weight_decay": 0.5,
    "clip": 0.01,
}
REFUSED = {"distributed": False, "kind": "sgd"}
BEFORE, AFTER = 3, 3
WHOLE = ["training.precision=fp32", "optimizer.distributed=false"]
KINDS = {"bf16": ["training.precision=bf16"], "whole": WHOLE, "sgd": [*WHOLE, "optimizer.kind=sgd"]}
OF_SGD = ("momentum", "learning_rate", "weight_decay")
EACH = [*(("bf16", key) for key in CHANGES if key != "momentum")]
EACH += [*(("whole", key) for key in ("beta1", "beta2", "eps")), *(("sgd", key) for key in OF_SGD)]


class Run:
    """A few steps on the same numbers, from random weights or from a checkpoint."""

    def __init__(self, place, folder, kind, *overrides):
        self.config = load("tiny", [*SMALL, *KINDS[kind], *overrides])
        self.trainable = make_trainable(self.config, model.build(self.config, place), place)
        self.step = Step(self.config, place, self.trainable, sources=1)
        self.schedule = Schedule(self.config, self.trainable.optimizer)
        self.taken = 0
        self.checkpoints = Checkpoints(
            RunFolder(folder), self.config, place, self.trainable.model, self.trainable.optimizer
        )

    def train(self, steps):
        for _ in range(steps):
            self.schedule.set(self.taken * self.config.training.global_batch)
            self.taken += 1
            self.step.gradients(self.batches())
            assert self.step.update().applied
        return self

    def batches(self):
        random = torch.Generator().manual_seed(self.taken)
        tokens_BS = torch.randint(32, (2, 16), generator=random)
        labels_BS = tokens_BS.roll(-1, 1)
        yield {
            "tokens": tokens_BS,
            "labels": labels_BS,
            "loss_mask": torch.ones(2, 16),
            "source_ids": torch.zeros(2, dtype=torch.int64),
            "sample_ids": torch.arange(2),
        }

    def resumed(self):
        self.checkpoints.load(BEFORE)
        self.taken = BEFORE
        return self

    def change(self, config):
        """Give the running optimizer other settings, without any checkpoint."""
        settings = config.optimizer
        for part in getattr(self.trainable.optimizer, "chained_optimizers", [self.trainable.optimizer]):
            part.config.clip_grad = settings.clip
            for group in part.param_groups:
                if settings.kind == "sgd":
                    group["momentum"] = settings.momentum
                else:
                    group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.eps
        self.schedule = Schedule(config, self.trainable.optimizer)
        return self

    def weights(self):
        return torch.cat([parameter.detach().float().flatten() for parameter in self.trainable.model.parameters()])


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


def test_every_optimizer_key_is_tried_or_refused():
    assert set(CHANGES) | set(REFUSED) == set(OptimizerConfig.model_fields)
    before = load("tiny").model_dump(mode="json", by_alias=True)
    for key, value in REFUSED.items():
        with pytest.raises(ResumeError, match=rf"optimizer\.{key}"):
            changed = [f"optimizer.{key}={value}", "optimizer.distributed=false", "resume.allow=[optimizer]"]
            refuse_changes(before, load("tiny", changed), step=5)
