"""Read and write `torch.save` files of a state dict one tensor at a time, and refuse anything but tensors.

`torch.load(mmap=True, weights_only=True)` reads the file. That alone would check no checksum, count every page read as
this process's memory until the end, and name neither the file nor a remedy in its errors.

`torch.save` needs the whole model in memory, so it writes a file without the tensors' bytes. Each tensor is then
written to its offset, and the checksums of the zip archive are corrected.
"""

import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_blackmamba.formats.atomic import atomic_file
from megatron_blackmamba.interchange.canonical import Entry, InterchangeError
from megatron_blackmamba.interchange.safetensors_io import raw_bytes

MAPPED_BYTES = 2**29
"""Maximum number of bytes read from one mapping: its pages count as this process's memory until it is reopened."""

_LOCAL, _CENTRAL, _DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"


def write(path: Path, entries: Mapping[str, Entry]) -> None:
    with FakeTensorMode():
        model = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    with atomic_file(path) as file:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save({"model": model}, file)
        file.flush()
        with open(file.name, "r+b") as archive:
            places = _storages(archive)
            if [size for _, size in places] != [entry.bytes for entry in entries.values()]:
                raise RuntimeError(f"torch {torch.__version__} lays out saved storages in an unknown way")
            checksums = []
            for (offset, _), entry in zip(places, entries.values(), strict=True):
                content = raw_bytes(entry.load())
                archive.seek(offset)
                archive.write(content)
                checksums.append(zlib.crc32(content))
            _set_checksums(archive, places, checksums)


def read(path: Path) -> dict[str, Entry]:
    """Return the entries of a state dict, or of one under "model", after checking the archive's checksums."""
    file = _File(path)
    model = file.open()
    _check_archive(path)
    for name, tensor in model.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InterchangeError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise InterchangeError(f"{path}: {name} is sparse or has no values: save it as an ordinary tensor")
    return {
        name: Entry(tuple(tensor.shape), tensor.dtype, lambda name=name: file.tensor(name))  # type: ignore[misc]
        for name, tensor in model.items()
    }


def _check_archive(path: Path) -> None:
    """Read the whole archive once and check it: torch.load maps the file and ignores its checksums."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        try:
            damaged = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise InterchangeError(f"{path}: damaged: {error}. Fetch the file again") from None
    if damaged:
        raise InterchangeError(f"{path}: damaged: {damaged} does not match its checksum (CRC32). Fetch the file again")


class _File:
    """A memory-mapped saved file, reopened after every MAPPED_BYTES read."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()
        self.model: dict[Any, Any] = {}
        self.used = 0

    def open(self) -> dict[Any, Any]:
        """Map the file (again) and return its state dict."""
        if not self.path.is_file():
            raise InterchangeError(f"{self.path}: no such file")
        try:
            mapped = zipfile.is_zipfile(self.path)  # files of torch before 1.6 are not, and cannot be mapped
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
            if not mapped and not _begins_as_pickle(self.path):
                raise InterchangeError(f"{self.path}: not a torch file") from None
            raise InterchangeError(
                f"{self.path}: refused: it holds more than tensors, and reading it could run code ({reason})"
            ) from None
        except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
            raise InterchangeError(
                f"{self.path}: not a complete torch file ({str(error).splitlines()[0] if str(error) else error!r})"
            ) from None
        self.used = 0
        self.model = self._state_dict(content)
        return self.model

    def _state_dict(self, content: Any) -> dict[Any, Any]:
        inside = content.get("model", content) if isinstance(content, dict) else None
        if not isinstance(inside, dict) or not any(isinstance(value, Tensor) for value in inside.values()):
            found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
            raise InterchangeError(f'{self.path}: holds no state dict, neither itself nor under "model"; found {found}')
        return inside

    def tensor(self, name: str) -> Tensor:
        with self.lock:
            if self.used > MAPPED_BYTES:
                self.open()
            tensor = self.model[name].clone()
            self.used += tensor.nbytes
        return tensor


def _begins_as_pickle(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"


def _storages(archive: BinaryIO) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each storage, in the order of the file."""
    places = {}
    with zipfile.ZipFile(archive) as directory:
        for record in directory.infolist():
            folder, _, number = record.filename.rpartition("/data/")
            if folder and number.isdecimal():
                archive.seek(record.header_offset)
                header = archive.read(30)
                assert header[:4] == _LOCAL
                name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
                places[int(number)] = (record.header_offset + 30 + name_bytes + extra_bytes, record.file_size)
    return [places[i] for i in range(len(places))]


def _set_checksums(archive: BinaryIO, places: list[tuple[int, int]], checksums: list[int]) -> None:
    for (offset, size), checksum in zip(places, checksums, strict=True):
        archive.seek(offset + size)
        if archive.read(4) != _DESCRIPTOR:
            raise RuntimeError(f"torch {torch.__version__} lays out saved storages in an unknown way")
        archive.write(struct.pack("<I", checksum))
    with zipfile.ZipFile(archive) as directory:
        position, records = directory.start_dir, directory.infolist()
    for record in records:  # the central directory has them in this very order
        archive.seek(position)
        header = archive.read(46)
        assert header[:4] == _CENTRAL
        folder, _, number = record.filename.rpartition("/data/")
        if folder and number.isdecimal():
            archive.seek(position + 16)
            archive.write(struct.pack("<I", checksums[int(number)]))
        position += 46 + sum(struct.unpack("<HHH", header[28:34]))
