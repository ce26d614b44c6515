"""A metric in a file of its own: the norm of all weights of the model, every second step."""

from megatron_blackmamba.training.metrics import Taken, metric

SHOWN = {"title": "Norm of the weights", "format": ".2f", "label": "weight norm", "in_line": True}


def every_second_step(taken: Taken) -> bool:
    return taken.step % 2 == 0


@metric("weights/norm", **SHOWN, due=every_second_step, reduce="norm")
def weight_norm(taken: Taken) -> float:
    return sum(weight.double().square().sum().item() for weight in taken.own_weights) ** 0.5
