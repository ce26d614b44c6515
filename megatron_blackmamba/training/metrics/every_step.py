"""Loss, gradient norm, learning rate and progress of the run."""

from megatron_blackmamba.config.groups import chosen
from megatron_blackmamba.training.metrics.base import Taken, metric


@metric("loss", "Loss", label="loss", in_line=True, order=1)
def loss(taken: Taken) -> float:
    """Return the mean loss of the batch's tokens."""
    return taken.losses.loss


@metric("z_loss", "Z-loss", format=".3f", in_table=True, order=31)
def z_loss(taken: Taken) -> float | None:
    """Return the mean squared log-sum of the batch's output logits, without its weight; None without model.z_loss."""
    return taken.losses.z_loss


@metric("mtp_loss", "Loss of the token after the next", format=".4f", in_table=True, order=31)
def mtp_loss(taken: Taken) -> float | None:
    """Return the mean loss of the extra depth (model.mtp), without its weight; None without it."""
    return taken.losses.mtp_loss


@metric("grad_norm", "Gradient norm", format=".3f", label="gradient norm", in_line=True, from_zero=True, order=3)
def grad_norm(taken: Taken) -> float:
    """Return the norm of all gradients before clipping; NaN if no update was tried."""
    return taken.update.grad_norm


@metric("learning_rate", "Learning rate", format=".3e", label="lr", in_line=True, from_zero=True, order=2)
def learning_rate(taken: Taken) -> float:
    """Return the learning rate of the step."""
    return taken.learning_rate


@metric("learning_rate/*", "Learning rate by group of parameters", format=".3e", from_zero=True, order=2,
        due=lambda taken: bool(chosen(taken.config.optimizer)))  # fmt: skip
def learning_rate_by_group(taken: Taken) -> dict[str, float]:
    """Return the learning rate of each group that has factors of its own (optimizer.groups)."""
    groups = chosen(taken.config.optimizer)
    return {name: taken.learning_rate * group.learning_rate for name, group in groups.items()}


def _skipped(value: float) -> str:
    return "skipped" if value else ""


@metric("skipped", "Skipped", format=_skipped, in_line=True, in_report=False, order=30)
def skipped(taken: Taken) -> int:
    """Return 1 if the weights were left as they are, else 0."""
    return int(not taken.update.applied)


@metric("consumed_samples", "Samples", in_report=False, order=40)
def consumed_samples(taken: Taken) -> int:
    """Return the samples in the batches of all steps."""
    return taken.progress.consumed_samples


@metric("next_sample", "Next sample", in_report=False, order=40)
def next_sample(taken: Taken) -> int:
    """Return the first sample that the step after this one reads, in the order of the data."""
    return taken.progress.next_sample


@metric("consumed_tokens", "Tokens", in_report=False, order=41)
def consumed_tokens(taken: Taken) -> int:
    """Return the tokens in the batches of all steps."""
    return taken.progress.consumed_samples * taken.config.data.sequence_length


@metric("consumed_flops", "Training FLOPs", format=".3e", in_table=True, in_report=False, order=42)
def consumed_flops(taken: Taken) -> float:
    """Return the model's FLOPs for all consumed tokens, without recomputation."""
    return taken.utilisation.flops_per_token * consumed_tokens(taken)
