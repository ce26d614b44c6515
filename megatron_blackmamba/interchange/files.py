"""The weight files of a folder: whole or in shards with an index, in safetensors or as torch saves them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from megatron_blackmamba.formats import lfs
from megatron_blackmamba.interchange import safetensors_io, torch_file
from megatron_blackmamba.interchange.canonical import Entry, InterchangeError, as_fp32
from megatron_blackmamba.interchange.json_config import need, read_json

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
_READERS: Mapping[str, Callable[[Path], dict[str, Entry]]] = {
    ".safetensors": safetensors_io.read,
    ".bin": torch_file.read,
}


def index_of(name: str) -> str:
    """Return the name of the index beside the shards of a file that is cut into several."""
    return f"{name}.index.json"


def read(folder: Path, names: Sequence[str]) -> dict[str, Entry]:
    """Read the first of the named files that is there, or its shards; float64 is read as fp32."""
    for name in names:
        whole, index = folder / name, folder / index_of(name)
        if whole.is_file() and index.is_file() and set(_weight_map(index).values()) != {name}:
            raise InterchangeError(
                f"{folder}: has {name} and {index.name}, two sets of weights. Remove the one that is out of date: "
                "transformers reads the first"
            )
        if index.is_file():
            return as_fp32(_read_shards(index), torch.float64)
        if whole.is_file():
            return as_fp32(_read_one(whole), torch.float64)
    raise InterchangeError(f"{folder / names[0]}: no such file{', nor ' + ', '.join(names[1:]) if names[1:] else ''}")


def _read_shards(index: Path) -> dict[str, Entry]:
    weight_map = _weight_map(index)
    entries: dict[str, Entry] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise InterchangeError(f"{index}: weight_map names {file!r}; shards must be in the same folder")
        held = _read_one(index.parent / file)
        for name in (name for name, place in weight_map.items() if place == file):
            if name not in held:
                raise InterchangeError(f"{index.parent / file}: has no {name}, which {index.name} says is there")
            entries[name] = held[name]
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    found = need(read_json(index), "weight_map", index)
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise InterchangeError(f"{index}: weight_map is not an object that names a file for each tensor")
    return found


def _read_one(path: Path) -> dict[str, Entry]:
    if path.suffix not in _READERS:
        raise InterchangeError(f"{path.name}: weights must be in .safetensors or .bin files")
    if path.is_file():
        with open(path, "rb") as file:
            if lfs.is_pointer(file.read(200)):
                raise InterchangeError(f"{path}: a pointer of Git LFS, not the weights. Fetch them with git lfs pull")
    return _READERS[path.suffix](path)
