"""Check a checkpoint before reading it: loading must not run code from it, and must fail with a clear error.

torch's checkpoint format keeps its table of contents (`.metadata`) as a pickle, and torch reads it as one. We read it
first, allowing only the names such a table is made of; a file that asks for anything else is refused before torch sees
it. The other files must be what their readers expect.
"""

import enum
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_blackmamba.checkpoint import common
from megatron_blackmamba.checkpoint.manifest import TABLE as METADATA
from megatron_blackmamba.checkpoint.manifest import CheckpointError, DamagedCheckpoint, unreadable

ALLOWED = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "slice", "list", "dict", "tuple"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
              "strided", "contiguous_format", "preserve_format"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}  # fmt: skip


def _member(kind: Any, name: str) -> enum.Enum:
    """Stand in for `getattr`, for members of enums alone. Python before 3.11.4 pickles a member as a call of it."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it takes {name} from {kind!r}, which no checkpoint needs")


class _TableOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13 alone
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_table(folder: Path) -> Any:
    """Return the checkpoint's table of contents, read without running anything."""
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / METADATA
    try:
        table = _TableOnly(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # a pickle can fail in any way; whether it is as it was written, its sha256 says
        raise CheckpointError(f"{path}: refused: {error}") from None
    if not isinstance(table, Metadata) or not isinstance(table.state_dict_metadata, dict):
        raise CheckpointError(f"{path}: refused: it is not a table of contents")
    return table


def refuse_code(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless every file can be read as numbers and plain values.

    files: the manifest's entries. The table of contents may point at no other files.
    """
    table = read_table(folder)
    _check_table(folder, table, files)
    _check_common(folder)


def _check_table(folder: Path, table: Any, files: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path, entries = folder / METADATA, table.state_dict_metadata
    objects = [str(name) for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
    if objects:
        raise CheckpointError(f"{folder}: holds objects that are not tensors ({', '.join(objects[:3])}): refused")
    if not isinstance(table.storage_data, dict):
        raise CheckpointError(f"{path}: refused: it does not say where its tensors are")
    for index, place in table.storage_data.items():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or name not in files:
            raise DamagedCheckpoint(
                f"{path}: {getattr(index, 'fqn', index)} is in {name!r}, which is not in the manifest"
            )
    stored = {getattr(index, "fqn", None) for index in table.storage_data}
    lost = [str(name) for name in entries if name not in stored]
    if lost:
        raise CheckpointError(f"{path}: refused: it does not say where {', '.join(lost[:3])} is")


def _check_common(folder: Path) -> None:
    """Refuse plain values that are none, and a format that megatron-core would read in another way."""
    import torch

    path = folder / common.VALUES
    try:
        values = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        path = folder / common.FORMAT_FILE
        form = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # torch, pickle and zip files fail in their own ways
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: refused: {first}") from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{folder / common.VALUES}: refused: it holds a {type(values).__name__}, not named values"
        )
    if form != common.FORMAT:
        raise CheckpointError(f"{path}: refused: its format is not {common.FORMAT['sharded_backend']}")
