"""Model and optimizer as megatron-core's sharded state: saved by any layout, loaded by any other.

The files are the same under every version of megatron-core: tensors here, plain values in `common.py`.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_blackmamba import routers
from megatron_blackmamba.checkpoint import safety
from megatron_blackmamba.checkpoint.manifest import CheckpointError
from megatron_blackmamba.checkpoint.reading import AVERAGED
from megatron_blackmamba.checkpoint.writing import Write
from megatron_blackmamba.engine.parts import saving
from megatron_blackmamba.engine.parts.ema import Ema
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.runtime.world import World, gathered

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}

MOST_NAMED = 3
"""Tensors that an error names; the rest are counted."""
OTHER = (
    "No layout is to blame: the model or its optimizer is another one. "
    "A branch has another config.yaml than its trunk, or code has changed, "
    "of this package or of a module in BLACKMAMBA_IMPORT"
)


def state_to_save(
    model: LanguageModel, optimizer: MegatronOptimizer, ema: Ema | None = None
) -> tuple[dict, dict[str, Any]]:
    """Return this rank's sharded state, and the plain values that are equal on all ranks."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is not None and not part.optimizer.state:  # no step was applied yet
            part.init_state_fn(part.optimizer, part.config)
    return save_preprocess(_state(model, optimizer, ema, is_loading=False))


def begin_save(folder: Path, world: World, state: dict) -> Write:
    """Plan how the ranks share the writing of the state; `Write.start` takes a copy of it and begins."""
    replicas = None
    if world.data_context_size > 1:  # they share the writing
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return Write(*saving.plan_save(state, str(folder), replicas))


def load(folder: Path, model: LanguageModel, optimizer: MegatronOptimizer, ema: Ema | None = None) -> None:
    """Load weights, optimizer state and averaged weights, written by any layout.

    An average that is not saved begins with the weights. One that is saved and no longer wanted is not read.
    """
    table = safety.read_table(folder).state_dict_metadata
    saved = set(table)
    is_saved = any(name.startswith(AVERAGED) for name in saved)
    wanted = _state(model, optimizer, ema if is_saved else None, is_loading=True)
    shapes = _shapes(wanted)
    names = set(shapes)
    _refuse_lacking(folder, names - saved)
    if more := [name for name in saved - names if not name.startswith(AVERAGED)]:
        raise CheckpointError(
            f"{folder}: refused: holds {_some(more)}, which the model and its optimizer do not have. {OTHER}"
        )
    _refuse_other_shapes(folder, shapes, table)
    state = _read(folder, wanted)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if ema is not None:
        ema.load(state["ema"]) if is_saved else ema.restart()


def _shapes(wanted: dict) -> dict[str, tuple[int, ...] | None]:
    """Return the whole shapes of the tensors that any rank wants, by name; None: any shape will do."""
    entries = [entry for entry in nested_values(load_preprocess(wanted)[0]) if isinstance(entry, ShardedTensor)]
    here = {entry.key: None if entry.allow_shape_mismatch else tuple(entry.global_shape) for entry in entries}
    found: dict[str, tuple[int, ...] | None] = {}
    for of_rank in gathered(here):
        found |= of_rank
    return found


def _refuse_other_shapes(folder: Path, wanted: dict[str, tuple[int, ...] | None], saved: dict[str, Any]) -> None:
    other = [
        f"{name} as {list(size)} instead of {list(shape)}"
        for name, shape in sorted(wanted.items())
        if shape is not None and (size := tuple(getattr(saved[name], "size", shape))) != shape
    ]
    if other:
        raise CheckpointError(f"{folder}: refused: holds {_some(other)}. {OTHER}")


def _refuse_lacking(folder: Path, lacking: set[str]) -> None:
    if lacking:
        raise CheckpointError(f"{folder}: refused: lacks {_some(lacking)} of the model and its optimizer. {OTHER}")


def _some(names: Collection[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _read(folder: Path, wanted: dict) -> dict:
    """Read what is wanted, all of which the checkpoint holds."""
    return dist_checkpointing.load(wanted, str(folder), _reader(folder), strict=StrictHandling.ASSUME_OK_UNEXPECTED)


def load_weights(folder: Path, model: LanguageModel, optimizer: MegatronOptimizer, ema: Ema | None = None) -> None:
    """Load the weights only; the optimizer starts fresh, and an average begins with them.

    What a router keeps beside weights begins at zero if the saved kind does not keep it.
    """
    saved, wanted = safety.read_table(folder).state_dict_metadata, weights(model)
    states, own = routers.states(), model.state_dict()
    begun = {name: own[name] for name in wanted if name.endswith(states) and wanted[name].key not in saved}
    kept = {name: entry for name, entry in wanted.items() if name not in begun}
    shapes = _shapes(kept)
    _refuse_lacking(folder, shapes.keys() - saved.keys())
    _refuse_other_shapes(folder, shapes, saved)
    state = _read(folder, {"model": kept})
    model.load_state_dict(state["model"] | begun)
    optimizer.reload_model_params()
    if ema is not None:
        ema.restart()


def _reader(folder: Path) -> FullyParallelLoadStrategyWrapper:
    """Share the reading among replicas; otherwise each would read its group's whole optimizer state."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), group)


def _state(model: LanguageModel, optimizer: MegatronOptimizer, ema: Ema | None = None, *, is_loading: bool) -> dict:
    sharded_weights = weights(model)
    state = {
        "model": sharded_weights,
        "optimizer": optimizer.sharded_state_dict(sharded_weights, is_loading=is_loading, metadata=_metadata()),
    }
    return state if ema is None else state | {"ema": ema.sharded(sharded_weights, is_loading)}


def weights(model: LanguageModel) -> dict:
    """Return the weights of the unwrapped model, without the empty objects that megatron-core adds for TE.

    Wrappers would prefix the names.
    """
    state = model.sharded_state_dict(metadata=_metadata())
    return {name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)}


def _metadata() -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**FORMAT, "dp_cp_group": group}
