"""Config keys that kinds bring along: `model.extensions.NAME.KEY` and `optimizer.extensions.NAME.KEY`.

`settings` only knows that each is a mapping, so a config is read without the modules that define its kinds.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megatron_blackmamba import layers, norms, optimizers, routers
from megatron_blackmamba.registry import Kind, KindError
from megatron_blackmamba.settings import ModelConfig, OptimizerConfig, RunConfig, Section

MODEL, OPTIMIZER = "model.extensions", "optimizer.extensions"


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of all registered kinds, with their full names."""
    of_models: tuple[Kind, ...] = (*layers.all_kinds(), *routers.all_kinds(), *norms.all_kinds())
    held = [(MODEL, kind) for kind in of_models] + [(OPTIMIZER, kind) for kind in optimizers.all_kinds()]
    for holder, kind in held:
        if kind.settings is None:
            continue
        if not issubclass(kind.settings, Section):
            raise KindError(f"{type(kind).__name__}.settings is no subclass of Section (docs/extending.md)")
        yield f"{holder}.{kind.section}", kind.settings


def problems_of_model(model: ModelConfig) -> Iterator[str]:
    """Refuse keys that no kind of the model reads, and values that its kinds refuse."""
    return _problems(MODEL, model.extensions, _of_model(model))


def problems_of_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    """Refuse keys that the optimizer does not read, and values that it refuses."""
    return _problems(OPTIMIZER, optimizer.extensions, [optimizers.kind_of(optimizer.kind)])


def complete(run: RunConfig) -> RunConfig:
    """Return the run with a value for every key of its kinds, as a saved config has them."""
    kinds: dict[str, list[Kind]] = {
        "model": _of_model(run.model),
        "optimizer": [optimizers.kind_of(run.optimizer.kind)],
    }
    changed = {}
    for name, used in kinds.items():
        holder = getattr(run, name)
        found = {kind.section: kind.settings_in(holder).model_dump(mode="json") for kind in used if kind.settings}
        if found != holder.extensions:
            changed[name] = holder.model_copy(update={"extensions": found})
    return run.model_copy(update=changed) if changed else run


def _of_model(model: ModelConfig) -> list[Kind]:
    return [
        *layers.kinds_in(model.trained_pattern),
        routers.kind_of(model.router.kind),
        norms.kind_of(model.final_norm),
    ]


def _problems(holder: str, content: Mapping[str, Any], used: Iterable[Kind]) -> Iterator[str]:
    known = {kind.section: kind.settings for kind in used if kind.settings}
    for name, keys in content.items():
        if name not in known:
            named = f"reads {', '.join(known)}" if known else "has no such sections"
            yield f"{holder}.{name}: this run {named}. Correct the name, remove it, or choose the kind that reads it."
            continue
        try:
            known[name].model_validate(keys)
        except ValidationError as error:
            for problem in error.errors():
                path = ".".join((holder, name, *map(str, problem["loc"])))
                message = problem["msg"].removeprefix("Value error, ")
                yield (
                    f"unknown key {path!r}; {name} has: {', '.join(known[name].model_fields)}"
                    if problem["type"] == "extra_forbidden"
                    else f"{path}={problem['input']!r}: {message[0].lower()}{message[1:]}"
                )
