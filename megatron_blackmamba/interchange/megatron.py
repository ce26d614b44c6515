"""Our own checkpoints, in and out: whatever layout wrote them, and for any layout to start from.

The names are the canonical ones but for the experts, which a checkpoint stacks: `mixer.experts.fc1` [E, 2, F, D] holds
the gate and up halves of every `linear_fc1`, `mixer.experts.fc2` [E, D, F] every `linear_fc2`.

Shapes: E experts, F expert hidden, D model.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba import __version__
from megatron_blackmamba.checkpoint import CheckpointReader, common, manifest
from megatron_blackmamba.checkpoint.reading import STATE
from megatron_blackmamba.config import RunConfig, to_saved, to_yaml
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.interchange.canonical import Canonical, Entry, tokenizer_of

_ONE_EXPERT = re.compile(r"(.*\.mixer)\.local_experts\.(\d+)\.linear_(fc[12])\.weight")


def read(path: Path, *, verify: bool = False) -> Canonical:
    """The weights of a checkpoint, or of the newest one of a run. `verify` first reads all of it for damage."""
    reader = CheckpointReader(path)
    if verify:
        reader.verify()
    run = reader.config
    return Canonical(
        run.model,
        _entries(reader),
        str(reader.folder),
        reader.tokenizer,
        run.data.sequence_length,
        _facts(reader, run),
    )


def write(model: Canonical, folder: Path) -> None:
    """A checkpoint of weights alone, in one file: `start.from` starts any layout from it."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(_stacked(model), folder)
    common.write(folder, {})
    run = run_config(model)
    atomic.write_json(folder / STATE, {"config": to_saved(run)})
    atomic.write_text(folder / "config.yaml", to_yaml(run))
    tokenizer = tokenizer_of(model)
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    files = {path.name: manifest.describe(path) for path in folder.iterdir()}
    manifest.write(folder, 0, files, {"version": __version__, "torch": torch.__version__, "from": model.source})


def run_config(model: Canonical) -> RunConfig:
    """The least run that describes these weights."""
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
    whole = lru_cache(maxsize=2)(_quietly(reader.tensor))  # the two stacks that a layer's experts are cut from
    entries: dict[str, Entry] = {}
    for name, shape in shapes.items():
        stack = re.fullmatch(r"(.*\.mixer)\.experts\.(fc[12])", name)
        if stack is None:
            entries[name] = Entry(tuple(shape), dtypes[name], partial(_quietly(reader.tensor), name))
            continue
        for e in range(shape[0]):
            one = torch.empty(shape, device="meta")[e]
            entries[f"{stack[1]}.local_experts.{e}.linear_{stack[2]}.weight"] = Entry(
                tuple(_matrix(one).shape), dtypes[name], partial(_cut, whole, name, e)
            )
    return entries


def _cut(whole: Callable[[str], Tensor], stack: str, expert: int) -> Tensor:
    return _matrix(whole(stack)[expert]).clone()


def _matrix(weight: Tensor) -> Tensor:
    """fc1's gate and up halves [2, F, D] as one [2F, D]; fc2 as it is."""
    return weight.flatten(0, 1) if weight.dim() == 3 else weight


def _stacked(model: Canonical) -> dict[str, Entry]:
    """The canonical entries under a checkpoint's names."""
    entries: dict[str, Entry] = {}
    for name, entry in model.entries.items():
        expert = _ONE_EXPERT.fullmatch(name)
        if expert is None:
            entries[name] = entry
        elif expert[2] == "0":
            stack, one = f"{expert[1]}.experts.{expert[3]}", entry.shape
            halves = (2, one[0] // 2, one[1]) if expert[3] == "fc1" else one
            shape = (model.config.experts, *halves)
            entries[stack] = Entry(shape, entry.dtype, partial(_stack, model, name, shape))
    return entries


def _stack(model: Canonical, first: str, shape: tuple[int, ...]) -> Tensor:
    stack = torch.empty(shape, dtype=model.entries[first].dtype)
    for e in range(shape[0]):
        name = first.replace(".local_experts.0.", f".local_experts.{e}.")
        stack[e] = model.entries[name].load().view(shape[1:])
    return stack


def _save(entries: Mapping[str, Entry], folder: Path) -> None:
    """torch's checkpoint format, each tensor loaded when its turn to be written comes."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    class Placeless(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            """Without this machine's path, which some Pythons cannot read from the pickle of another."""
            return StorageMeta()

    class Streaming(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Tensor:
            return entries[index.fqn].load()

    planned = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    writer = Placeless(str(folder))
    _quietly(save)(planned, storage_writer=writer, planner=Streaming(flatten_state_dict=False), no_dist=True)


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without torch's remark that there is no process group, which is as it should be."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return function(*args, **kwargs)

    return call


def _facts(reader: CheckpointReader, run: RunConfig) -> dict[str, Any]:
    """What the model card tells of the run."""
    data = reader.state.get("data", {})
    sources = ", ".join(source["name"] for source in data.get("sources", []))
    samples = reader.state.get("progress", {}).get("consumed_samples", 0)
    batch, tokens = run.training.global_batch, samples * run.data.sequence_length
    facts: dict[str, Any] = {"Run": run.name}
    if tokens:
        of = " of" if samples == reader.step * batch else ", the last one of"
        facts["Trained on"] = f"{tokens:,} tokens in {reader.step:,} steps{of} {batch} sequences"
        facts["Sequence length"] = f"{run.data.sequence_length:,}"
        facts["Learning rate"] = (
            f"{run.optimizer.learning_rate:g} to {run.optimizer.min_learning_rate:g}, {run.optimizer.decay}"
        )
    if sources:
        facts["Sources"] = sources
    return facts | {"Made with": f"megatron-blackmamba {reader.manifest.get('version', '')}".strip()}
