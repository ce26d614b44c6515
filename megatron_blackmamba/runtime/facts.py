"""Facts that must be equal on every node of a run: versions, the code itself, network settings, the GPU."""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".yaml")
COMPILED = (".so", ".cpp", ".cu")
SETTINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME")


def facts(gpu: int | None) -> dict[str, str]:
    """Return name → value for this process; `gpu` is the index of its GPU."""
    import torch

    found = versions((*SOURCES, *COMPILED))
    found |= {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    if gpu is not None:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = torch.cuda.get_device_name(gpu)
        found["driver"] = _driver()
    return found


def versions(suffixes: tuple[str, ...] = SOURCES) -> dict[str, str]:
    """Return the versions of this process's software; `suffixes` says which of our files count."""
    import torch

    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": _version("megatron-core"),
        "our code": fingerprint(suffixes),
    }


def fingerprint(suffixes: tuple[str, ...], folder: Path = PACKAGE) -> str:
    """Return a short hash of the files of the package with these suffixes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return "unknown"
