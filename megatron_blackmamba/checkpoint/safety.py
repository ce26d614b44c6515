"""Reading a checkpoint must not run what is in it.

torch's checkpoint format keeps its table of contents (`.metadata`) as a pickle, and torch reads it as one. We read it
first, allowing only the names such a table is made of; a file that asks for anything else is refused before torch sees
it.
"""

import enum
import io
import pickle
from pathlib import Path
from typing import Any

from megatron_blackmamba.checkpoint.manifest import CheckpointError, DamagedCheckpoint, unreadable

METADATA = ".metadata"
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
    """All that `getattr` may do here: Python before 3.11.4 (Debian 12) pickles an enum member as a call of it."""
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
    """The checkpoint's table of contents, read without running anything."""
    path = folder / METADATA
    try:
        return _TableOnly(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # a pickle can fail in any way; whether it is as it was written, its sha256 says
        raise CheckpointError(f"{path}: refused: {error}") from None


def refuse_code(folder: Path) -> None:
    """Raise CheckpointError unless everything in the folder can be read as numbers and plain values."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    table = read_table(folder)
    objects = [name for name, entry in table.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    if objects:
        raise CheckpointError(f"{folder}: holds objects that are not tensors ({', '.join(objects[:3])}): refused")
