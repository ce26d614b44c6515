"""safetensors, a tensor at a time: files written as their tensors arrive, and read without keeping them mapped.

A file: the length of its header (8 bytes, little endian), the header (JSON: name → dtype, shape, bytes), the bytes.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_blackmamba.formats.atomic import atomic_file
from megatron_blackmamba.interchange.canonical import Entry, InterchangeError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
Files = Mapping[Path, Mapping[str, Entry]]


def write_files(files: Files) -> None:
    for path, entries in files.items():
        write(path, entries)


def write(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write the entries, loading one at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in entries.items():
            tensor = entry.load()
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                raise InterchangeError(f"{name}: loaded as {tensor.dtype} {tuple(tensor.shape)}, announced {entry}")
            file.write(raw_bytes(tensor))


def read(path: Path) -> dict[str, Entry]:
    """Return the entries of the file; each tensor is read on request, and the file closed afterwards."""
    try:
        with safe_open(path, "pt") as file:
            infos = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            known = {name: (tuple(info.get_shape()), info.get_dtype()) for name, info in infos.items()}
    except FileNotFoundError:
        raise InterchangeError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise InterchangeError(f"{path}: not a complete safetensors file: {error}") from None

    def load(name: str) -> Tensor:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name).clone()

    for name, (_, dtype) in known.items():
        if dtype not in _TYPES:
            raise InterchangeError(f"{path}: {name} is {dtype}; weights are F32, BF16, F16 or F64")
    return {
        name: Entry(shape, _TYPES[dtype], lambda name=name: load(name))  # type: ignore[misc]
        for name, (shape, dtype) in known.items()
    }


def shards(entries: Mapping[str, Entry], most_bytes: int) -> list[dict[str, Entry]]:
    """Split the entries, in order, into files of at most `most_bytes`; a larger tensor gets its own file."""
    result: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if result[-1] and size + entry.bytes > most_bytes:
            result.append({})
            size = 0
        result[-1][name] = entry
        size += entry.bytes
    return result


def raw_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
