"""Facts that must be equal on every node of a run: versions, the code itself, network settings, the GPU."""

import hashlib
import os
import platform
import sys
from pathlib import Path

from megatron_blackmamba.registry import extensions
from megatron_blackmamba.version import installed

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".yaml")
COMPILED = (".so", ".cpp", ".cu")
SETTINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME")

NUMBERS = (
    *("ATEN_CPU_CAPABILITY", "BLACKMAMBA_IMPORT", "BLACKMAMBA_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    *("NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET"),
)
"""Environment variables that decide which numbers a rank computes."""


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
    """Return all that decides the numbers besides the config: versions, code, and variables of the environment.

    suffixes: Which of our files, and of those of BLACKMAMBA_IMPORT, count.
    """
    import torch

    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": installed("megatron-core") or "missing",
        "our code": fingerprint(suffixes),
        **{name: os.environ[name] for name in NUMBERS if name in os.environ},
        **code_of_extensions(suffixes),
    }


def code_of_extensions(suffixes: tuple[str, ...] = SOURCES) -> dict[str, str]:
    """Return a short hash of each module that BLACKMAMBA_IMPORT names, by "code of NAME"."""
    return {f"code of {name}": _code_of(name, suffixes) for name in extensions()}


def fingerprint(suffixes: tuple[str, ...], folder: Path = PACKAGE) -> str:
    """Return a short hash of the files of the package with these suffixes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _code_of(module: str, suffixes: tuple[str, ...]) -> str:
    """Return a short hash of a module's file, or of all files of a package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return "not imported"
    if Path(file).name == "__init__.py":
        return fingerprint(suffixes, Path(file).parent)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return "unknown"
