"""Replace a part of the training run: stop as soon as the validation loss no longer falls.

python examples/own_trainer.py training.steps=200 training.evaluate_every=20

On several processes: torchrun --nproc-per-node 2 examples/own_trainer.py parallel.expert=2
"""

import sys

from megatron_blackmamba import Trainer, load_config, train


class EarlyStopping(Trainer):
    """A run that saves and stops when a validation improves on the best one by less than 0.01."""

    best = float("inf")

    def validate(self, routed_as_trained: bool = False) -> dict[str, float]:
        losses = super().validate(routed_as_trained)
        mean = sum(losses.values()) / len(losses)
        self.asked_to_stop |= mean > self.best - 0.01
        self.best = min(self.best, mean)
        return losses


if __name__ == "__main__":
    sys.exit(train(load_config("tiny", ["name=early_stopping", *sys.argv[1:]]), trainer=EarlyStopping))
