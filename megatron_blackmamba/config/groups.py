"""The kinds of parameters that `optimizer.groups` gives factors of learning rate and weight decay."""

from collections.abc import Iterator

from megatron_blackmamba import layers
from megatron_blackmamba.config import mup
from megatron_blackmamba.settings import GroupConfig, ModelConfig, OptimizerConfig, RunConfig

WITHOUT_DECAY = ("norms", "recurrence")
"""Groups of which no parameter has a weight decay."""


def chosen(settings: OptimizerConfig) -> dict[str, GroupConfig]:
    """Return the groups with a factor other than 1, by name."""
    groups = {name: getattr(settings.groups, name) for name in type(settings.groups).model_fields}
    return {name: group for name, group in groups.items() if group != GroupConfig()}


def group_of(parameter: str, model: ModelConfig) -> str:
    """Return the group of a parameter of the model, by its global name such as decoder.layers.7.mixer.D."""
    if "norm" in parameter.rpartition(".")[0]:
        return "norms"
    if parameter == mup.MTP_PROJECTION:
        return "mixers"
    mixer = layers.mixer_of(parameter, model)
    if mixer is None and parameter.endswith(layers.SCALINGS):
        return "norms"
    if mixer is None:
        is_head = parameter.startswith("output_layer.") and not model.tie_embeddings
        return "head" if is_head else "embedding"
    kind, inner = mixer
    if inner.startswith("router."):
        return "router"
    if inner in kind.kept_in_fp32:
        return "recurrence"
    return "experts" if kind.routed else "mixers"


def factors(parameter: str, run: RunConfig, by_matrix: bool = False) -> tuple[float, float]:
    """Return the factors of learning rate and weight decay of a parameter.

    A width transfer divides the rate by the growth of the inputs. The decay is multiplied by it, so that each step
    shrinks a weight by as much as in the base model. by_matrix: updates are scaled instead (`mup.update_scales`).
    """
    group: GroupConfig = getattr(run.optimizer.groups, group_of(parameter, run.model))
    growth = 1.0 if by_matrix else mup.growth(parameter, run.model)
    return group.learning_rate / growth, group.weight_decay * growth


def problems(run: RunConfig) -> Iterator[str]:
    """Refuse factors without effect."""
    settings, model = run.optimizer, run.model
    there = {"embedding", "norms", *([] if model.tie_embeddings else ["head"])}
    for layer, kind in layers.named_layers(model):
        there |= {group_of(f"{layer}.mixer.{name}", model) for name in kind.shapes(model)}
    for name, group in chosen(settings).items():
        if name not in there:
            yield f"optimizer.groups.{name}: this model has no such parameters, only {', '.join(sorted(there))}"
        if name in WITHOUT_DECAY and group.weight_decay != 1:
            yield (
                f"optimizer.groups.{name}.weight_decay={group.weight_decay} has no effect: {name} have no weight decay."
                " Leave it out."
            )
