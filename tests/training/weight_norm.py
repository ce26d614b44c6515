"""A metric in a file of its own: the norm of all weights of this rank, every second step."""

from megatron_blackmamba.training.metrics import Taken, metric


def every_second_step(taken: Taken) -> bool:
    return taken.trainer.progress.step % 2 == 0


@metric("weights/norm", "Norm of the weights", format=".2f", label="weight norm", in_line=True, due=every_second_step)
def weight_norm(taken: Taken) -> float:
    weights = taken.trainer.trainable.model.parameters()
    return sum(weight.detach().double().square().sum().item() for weight in weights) ** 0.5
