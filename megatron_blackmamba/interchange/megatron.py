"""Our own checkpoints, in and out: whatever layout wrote them, and for any layout to start from.

The names are the canonical ones but for parameters that a kind of layer stacks (`LayerKind.stacks`).
"""

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_blackmamba.checkpoint import CheckpointReader, common, manifest
from megatron_blackmamba.checkpoint.reading import STATE
from megatron_blackmamba.config import RunConfig, model_to_yaml, to_saved, to_yaml
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.evaluations import Evaluation, read_evaluation
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far
from megatron_blackmamba.interchange.canonical import Canonical, Entry, Past, in_memory, tokenizer_of
from megatron_blackmamba.interchange.canonical import shapes as canonical_shapes
from megatron_blackmamba.layers import Stack, stacks_of
from megatron_blackmamba.version import __version__

if TYPE_CHECKING:
    from megatron_blackmamba.model import LanguageModel


MODEL = "model.yaml"
"""The `model:` section of a converted checkpoint, to name after a run's file in `train`."""


def read(path: Path, *, verify: bool = False, ema: bool = False) -> Canonical:
    """Read the weights of a checkpoint, or of a run's newest one; `verify` first checks the files for damage.

    ema: Read the averaged weights instead, in the precision in which training keeps them.
    """
    reader = CheckpointReader(path, ema)
    if verify:
        reader.verify()
    run = reader.config
    return Canonical(
        run.model,
        _entries(reader),
        str(reader.folder),
        reader.tokenizer,
        run.data.sequence_length,
        lambda: past(run, reader.state, reader.step, _run_folder(reader), reader.manifest.get("version", ""), ema),
        ema=ema,
        eod_id=reader.eod_id,
    )


def stored(reader: CheckpointReader) -> dict[str, Entry]:
    """Return the weights of a checkpoint under its own names, which are those of the model's state dict."""
    dtypes, load = reader.dtypes(), _quietly(reader.tensor)
    return {name: Entry(tuple(shape), dtypes[name], partial(load, name)) for name, shape in reader.shapes().items()}


def of_module(model: "LanguageModel", tokenizer: Path | None = None) -> Canonical:
    """Return the canonical form of a model in memory that has all layers and experts in this process."""
    described = model.config.described
    stacks = stacks_of(described)
    weights: dict[str, Tensor] = {}
    parts = canonical_shapes(described)
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue  # megatron-core's extra state
        if name not in stacks:
            weights[name] = tensor.detach().cpu()
            continue
        stacked = tensor.detach().cpu().view(stacks[name].shape)
        weights |= {part: stacked[i].reshape(parts[part]) for i, part in enumerate(stacks[name].parts)}
    return in_memory(
        described, weights, "the model in memory", tokenizer=tokenizer, sequence_length=model.sequence_length
    )


def write(model: Canonical, folder: Path) -> None:
    """Write a checkpoint with weights only, in one file; `start.from` loads it into any layout."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(stacked(model), folder)
    common.write(folder, {})
    run = run_config(model)
    tokenizer = tokenizer_of(model)
    known = tokenizer and {"name": tokenizer.short_name, "sha256": tokenizer.sha256, "eod_id": tokenizer.eod_id}
    atomic.write_json(folder / STATE, {"config": to_saved(run), "data": {"tokenizer": known}})
    atomic.write_text(folder / "config.yaml", to_yaml(run))
    atomic.write_text(folder / MODEL, model_to_yaml(run.model))
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    files = {path.name: manifest.describe(path) for path in folder.iterdir()}
    manifest.write(folder, 0, files, {"version": __version__, "torch": torch.__version__, "from": model.source})


def run_config(model: Canonical) -> RunConfig:
    """Return a minimal run config that describes these weights."""
    precision = "bf16" if model.dtype == torch.bfloat16 else "fp32"
    return RunConfig.model_validate(
        {
            "name": "imported",
            "model": model.config.model_dump(),
            "data": {"sequence_length": model.sequence_length},
            "training": {"tokens": model.sequence_length, "global_batch": 1, "precision": precision},
        }
    )


def _entries(reader: CheckpointReader) -> dict[str, Entry]:
    shapes, dtypes = reader.shapes(), reader.dtypes()
    whole = lru_cache(maxsize=2)(_quietly(reader.tensor))  # the stacks that a layer's parameters are cut from
    entries: dict[str, Entry] = {}
    parts = canonical_shapes(reader.config.model)
    stacks = stacks_of(reader.config.model)
    for name, shape in shapes.items():
        if name not in stacks or tuple(shape) != stacks[name].shape:
            entries[name] = Entry(tuple(shape), dtypes[name], partial(_quietly(reader.tensor), name))
            continue
        for number, part in enumerate(stacks[name].parts):
            entries[part] = Entry(parts[part], dtypes[name], partial(_cut, whole, name, number, parts[part]))
    return entries


def _cut(whole: Callable[[str], Tensor], stack: str, number: int, shape: tuple[int, ...]) -> Tensor:
    return whole(stack)[number].reshape(shape).clone()


def stacked(model: Canonical) -> dict[str, Entry]:
    """Return the canonical entries under the names of a checkpoint."""
    stacks = {stack.parts[0]: (name, stack) for name, stack in stacks_of(model.config).items()}
    rest = {part for _, stack in stacks.values() for part in stack.parts[1:]}
    entries: dict[str, Entry] = {}
    for name, entry in model.entries.items():
        if name in stacks:
            stored, stack = stacks[name]
            entries[stored] = Entry(stack.shape, _widest(model, stack), partial(_stack, model, stack))
        elif name not in rest:
            entries[name] = entry
    return entries


def _stack(model: Canonical, stack: Stack) -> Tensor:
    stacked = torch.empty(stack.shape, dtype=_widest(model, stack))
    for number, part in enumerate(stack.parts):
        stacked[number] = model.entries[part].load().view(stack.shape[1:])
    return stacked


def _widest(model: Canonical, stack: Stack) -> torch.dtype:
    return reduce(torch.promote_types, (model.entries[part].dtype for part in stack.parts))


def _save(entries: Mapping[str, Entry], folder: Path) -> None:
    """Write torch's checkpoint format, loading each tensor just before it is written."""
    from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    class Placeless(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            """Leave out this machine's path, which some Python versions cannot unpickle if another version wrote it."""
            return StorageMeta()

    class Streaming(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Tensor:
            return entries[index.fqn].load()

    planned = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    writer = Placeless(str(folder))
    try:
        _quietly(save)(planned, storage_writer=writer, planner=Streaming(flatten_state_dict=False), no_dist=True)
    except CheckpointException as failed:  # its message is a traceback, of a tensor with NaN for example
        raise failed.failures[0][0] from None


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Silence torch's warning that there is no process group, which is intended here."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return function(*args, **kwargs)

    return call


def past(
    run: RunConfig, state: Mapping[str, Any], step: int, folder: RunFolder | None, version: str, ema: bool = False
) -> Past:
    """Return what the model card says about a run that has reached `step`.

    Args:
        state: What a checkpoint of that step holds beside tensors.
        folder: The run's; None for a checkpoint that was copied or imported.
        ema: Whether the model has the averaged weights.
    """
    sources = ", ".join(source["name"] for source in state.get("data", {}).get("sources", []))
    samples = state.get("progress", {}).get("consumed_samples", 0)
    batch, tokens = run.training.global_batch, samples * run.data.sequence_length
    facts: dict[str, Any] = {"Run": run.name}
    if run.start.from_:
        facts["Started from"] = f"the weights of {Path(run.start.from_).name}"
    if tokens:
        of = " of" if samples == step * batch else ", the last one of"
        facts["Trained on"] = f"{tokens:,} tokens in {step:,} steps{of} {batch} sequences"
        facts["Sequence length"] = f"{run.data.sequence_length:,}"
        facts["Learning rate"] = (
            f"{run.optimizer.learning_rate:g} to {run.optimizer.min_learning_rate:g}, {run.optimizer.decay}"
        )
    if ema:
        facts["Weights"] = f"a moving average with decay rate {run.training.ema:g}"
    if sources:
        facts["Sources"] = sources
    if folder is not None:
        facts |= _losses(folder, step, "validation/ema_loss" if ema else "validation/loss")
    facts["Made with"] = f"megatron-blackmamba {version}".strip()
    return Past(facts, _evaluation(folder, step, ema))


def _run_folder(reader: CheckpointReader) -> RunFolder | None:
    """Return the run that saved a checkpoint; None for one that was copied or imported."""
    run = reader.folder.parent.parent
    return RunFolder(run) if RunFolder(run).checkpoints == reader.folder.parent else None


def _losses(run: RunFolder, step: int, start: str) -> dict[str, str]:
    """Return the training loss of a step, and the last validation losses before or at it, named `start`."""
    losses: dict[str, str] = {}
    for record in metrics_so_far(run.metrics):
        at = record.get("step", step + 1)
        if at == step and isinstance(record.get("loss"), float):
            losses["Training loss"] = f"{record['loss']:.4f} at step {at:,}"
        if at <= step and isinstance(record.get(start), float):
            parts = {name.removeprefix(f"{start}/"): value for name, value in record.items() if f"{start}/" in name}
            told = ", ".join(f"{name} {value:.4f}" for name, value in parts.items() if isinstance(value, float))
            losses["Validation loss"] = f"{record[start]:.4f} at step {at:,}" + (f" ({told})" if told else "")
    return losses


def _evaluation(run: RunFolder | None, step: int, ema: bool) -> Evaluation | None:
    """Return the scores of a step."""
    path = None if run is None else run.evaluation(step, ema)
    return read_evaluation(path) if path is not None and path.exists() else None
