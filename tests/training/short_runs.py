"""A few steps of a small model with a given optimizer, in this process, and its checkpoint."""

import torch

from megatron_blackmamba import model
from megatron_blackmamba.checkpoint import Checkpoints
from megatron_blackmamba.config import load
from megatron_blackmamba.engine.muon import Muon
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step

SMALL = [
    *("model.pattern=ME", "model.hidden_size=16", "model.expert_hidden_size=16", "model.vocab_size=32"),
    *("model.experts=2", "data.sequence_length=16", "training.global_batch=2", "training.micro_batch=2"),
    *("training.tokens=320", "optimizer.weight_decay=0.1", "optimizer.clip=100"),  # 10 steps
]
WHOLE = ["training.precision=fp32", "optimizer.distributed=false"]
KINDS = {
    "bf16": ["training.precision=bf16"],
    "whole": WHOLE,
    "sgd": [*WHOLE, "optimizer.kind=sgd"],
    "narrow": ["training.precision=bf16", "optimizer.moments=bf16", "optimizer.gradients=bf16"],
    "whole_narrow": [*WHOLE, "optimizer.moments=bf16"],
    "muon": ["training.precision=bf16", "optimizer.kind=muon"],
}
BEFORE = 3


class Run:
    """A few steps on the same numbers, from random weights or from a checkpoint."""

    def __init__(self, place, folder, kind, *overrides, skip=frozenset()):
        self.config = load("tiny", [*SMALL, *KINDS[kind], *overrides])
        self.trainable = make_trainable(self.config, model.build(self.config, place), place, skip)
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
            part.optimizer.moments = torch.bfloat16 if settings.moments == "bf16" else None
            if isinstance(part.optimizer, Muon):
                part.optimizer.momentum, part.optimizer.steps = settings.momentum, settings.newton_schulz
            for group in part.param_groups:
                if "momentum" in group:
                    group["momentum"] = settings.momentum
                if "betas" in group:
                    group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.eps
        self.schedule = Schedule(config, self.trainable.optimizer)
        return self

    def weights(self):
        return torch.cat([parameter.detach().float().flatten() for parameter in self.trainable.model.parameters()])
