"""The functions of the Python API that need more than one package (docs/python.md).

Shapes: B batch, S sequence.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.checkpoint.reading import find_checkpoint
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.runtime import device, world
from megatron_blackmamba.runtime.seeding import random_state_kept

if TYPE_CHECKING:
    import torch

    from megatron_blackmamba.data import Batch
    from megatron_blackmamba.formats.evaluations import Evaluation
    from megatron_blackmamba.interchange.canonical import Canonical
    from megatron_blackmamba.interchange.observation import Comparison
    from megatron_blackmamba.interchange.witness import Check
    from megatron_blackmamba.model import LanguageModel
    from megatron_blackmamba.training.loop import Outcome, Trainer


def build(config: RunConfig) -> "LanguageModel":
    """Return the model of a run with the weights that it starts with: those of `start.from`, or random ones.

    The model is a `torch.nn.Module`: `model(tokens_BS)` returns logits `[B, S, V]`, and `model(tokens_BS, labels_BS)`
    the loss of each token `[B, S]`. In training mode the router balances the experts; `model.eval()` routes each token
    by itself. The parallel sizes of the config must be 1; `train` supports the others. With a process group of yours,
    every rank must call this, and gets a replica for DistributedDataParallel.
    """
    from megatron_blackmamba import model
    from megatron_blackmamba.interchange.open import copy_into, weights_of
    from megatron_blackmamba.training.start.resume import refuse_start

    _require_config(config)
    if config.start.from_ is not None:
        refuse_start(config, resumes=False)
    place = world.of_replica(config.parallel)
    with random_state_kept():
        built = model.build(config, place)
    if config.start.from_ is not None:
        folder = find_checkpoint(config.start.from_)
        copy_into(built, weights_of(folder)[1], folder)
    model.remind_of_update(built)
    return built


def update_routers(model: "torch.nn.Module") -> None:
    """Change what routers keep, such as expert biases, by the tokens since the last call; call it after each step.

    model: a model of `build`, or a module around it. With a process group of yours, every rank must call this. Routers
    that keep nothing, such as `sinkhorn`, stay as they are.
    """
    from megatron_blackmamba import model as modelling

    modelling.update_routers(model)


def load_weights(model: "LanguageModel", folder: str | Path) -> None:
    """Overwrite the weights of a model of `build` with those of a run, a checkpoint, what `save` wrote, or an export.

    Weights of another model are refused. They are rounded to the model's precision where theirs differs.
    """
    from megatron_blackmamba.interchange.open import copy_into, weights_of
    from megatron_blackmamba.training.start.resume import ResumeError, other_function

    _require_model(model)
    theirs, entries = weights_of(Path(folder))
    changes, _ = other_function(theirs, model.config.described)
    if changes:
        old, new = (" ".join(f"{change[0]}={change[at]}" for change in changes) for at in (1, 2))
        raise ResumeError(f"{folder}: its weights have {old}, and this model has {new}. Build the model with {old}.")
    copy_into(model, entries, folder)


def batches(config: RunConfig, start_sample: int = 0) -> "Iterator[Batch]":
    """Yield the global batches of a run in their order, without end, on this process's device.

    start_sample: Samples of the batches before, by which `training.batch_ramp` sets the size of the next one.

    A batch is a dict: `tokens`, `labels` and `loss_mask` `[B, S]`, `source_ids` and `sample_ids` `[B]`.
    """
    from megatron_blackmamba import data

    _require_config(config)
    if start_sample < 0:
        raise ValueError(f"start_sample={start_sample}: give 0 or more.")
    model = config.model
    plan = data.build(config.data, vocab_size=model.vocab_size, total_samples=config.samples, eod_reset=model.eod_reset)
    with data.BatchStream(
        plan.train,
        start_sample=start_sample,
        global_batch=lambda served: config.batch_at(start_sample + served),
        micro_batch=None,
        workers=config.data.workers,
    ) as stream:
        yield from map(device.copied, stream)


def train(config: RunConfig, trainer: "type[Trainer] | None" = None) -> "Outcome":
    """Train a run, or resume it from its newest checkpoint; the outcome is the exit code of `blackmamba train`.

    Started by torchrun or srun, every process must call this. Otherwise the run uses this process alone.
    trainer: a subclass of `Trainer`, to replace parts of the run.
    """
    from megatron_blackmamba.training import loop

    _require_config(config)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("train handles signals, so call it in the main thread, or start `blackmamba train`.")
    if world.find_place().launcher != "alone":
        return loop.train(config, trainer)
    world.alone(config.parallel)  # shared with `build`, and kept for the next call
    with random_state_kept():
        return loop.train(config, trainer)


def save(
    model: "LanguageModel", folder: str | Path, tokenizer: str | Path | None = None, overwrite: bool = False
) -> None:
    """Write a model as a checkpoint of weights alone, for `start.from`, `load`, `evaluate` and `export_hf`.

    overwrite: replace what an earlier call wrote to the folder.
    """
    from megatron_blackmamba.interchange.convert import to_checkpoint

    to_checkpoint(_canonical(model, tokenizer), Path(folder), overwrite=overwrite)


def export_hf(
    model: "LanguageModel | str | Path",
    folder: str | Path,
    tokenizer: str | Path | None = None,
    check: "Check" = "full",
    native: bool = False,
    overwrite: bool = False,
) -> "Comparison | None":
    """Write a Hugging Face folder and return the comparison of its logits, routing and text with the model's.

    model: a model from `build`, a run, a checkpoint or another export.
    check: what the installed transformers loads to compare: "full", "short" (the first layers of each kind) or "none".
    native: write a model of transformers without our code, of a family in docs/conversion.md.
    overwrite: replace what an earlier call wrote to the folder.
    """
    from megatron_blackmamba.interchange.convert import to_hf

    return to_hf(_canonical(model, tokenizer), Path(folder), check=check, as_native=native, overwrite=overwrite)


def evaluate(
    model: str | Path, tasks: str | Sequence[str] = "paper", *, data: str | Path | None = None, **options: Any
) -> "Evaluation":
    """Return the scores of a run, checkpoint or export on tasks of lm-eval; `paper` is the paper's eight.

    data: folder with TASK.jsonl files. options: fields of `megatron_blackmamba.evaluation.evaluate.Options`, such as
    `text=[FILE, ...]`, for which `tasks` may be empty.
    """
    from megatron_blackmamba.evaluation.evaluate import Options
    from megatron_blackmamba.evaluation.evaluate import evaluate as score
    from megatron_blackmamba.evaluation.tasks import names_of

    if not isinstance(model, (str, Path)):
        raise TypeError(f"evaluate reads a folder, not a {type(model).__name__}: give the one that `save` wrote.")
    names = names_of(tasks if isinstance(tasks, str) else ",".join(tasks)) if tasks else ()
    return score(Path(model), Options(names, data=None if data is None else Path(data), **options))


def _require_config(config: object) -> None:
    if not isinstance(config, RunConfig):
        raise TypeError(f"{config!r} is no RunConfig: give load_config(...), such as load_config('tiny').")


def _canonical(model: "LanguageModel | str | Path", tokenizer: str | Path | None) -> "Canonical":
    from megatron_blackmamba.interchange import megatron
    from megatron_blackmamba.interchange.open import open_model

    file = None if tokenizer is None else Path(tokenizer)
    if isinstance(model, (str, Path)):
        return open_model(Path(model), file)
    _require_model(model, ", or the folder of a run or export")
    return megatron.of_module(model, file)


def _require_model(model: object, other: str = "") -> None:
    from megatron_blackmamba.model.config import MegatronConfig

    if not isinstance(getattr(model, "config", None), MegatronConfig):
        raise TypeError(
            f"a {type(model).__name__} is no model of `build`: give one{other}, without a module around it."
        )
