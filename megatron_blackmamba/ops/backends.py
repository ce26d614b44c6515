"""Choose the implementation of an op: the best one that this machine can run and that supports the call.

A backend is a module in the op's package, named as the backend, with
    unavailable() -> str | None        why this machine cannot use it at all
    unsupported(*call) -> str | None   why it does not support this call
    smallest(device) -> None           optional: run the smallest call, or raise
and the function that does the work, named as its package (or `scan`, `convolve`, ...: the op says which).
"""

import importlib
import os
import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

FOR_CPU = "cpp"
OLD_NAMES = {"cpu": FOR_CPU}
SUPPORT = "triton_support"
TRIAL_DEVICE = "cuda"
"""Where the smallest call of a backend is tried."""
FUSED_ADAM = ("transformer_engine.pytorch.optimizers", "apex.optimizers")
"""Where megatron-core looks for FusedAdam, which it prefers to this project's Adam."""


def choose(package: str, names: tuple[str, ...], wanted: str, *call: object) -> ModuleType:
    """Return the module of the backend `wanted`, or for "auto" of the first in `names` that can do the call."""
    wanted = OLD_NAMES.get(wanted, wanted)
    if wanted != "auto" and wanted not in names:
        raise ValueError(f"backend must be one of auto, {', '.join(names)}; not {wanted!r}")
    reasons = {}
    for name in names if wanted == "auto" else (wanted,):
        reasons[name] = why_not(package, name) or _load(package, name).unsupported(*call)
        if reasons[name] is None:
            return _load(package, name)
    op = package.rpartition(".")[2]
    raise ValueError(f"{op} cannot run here: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def available(package: str, names: tuple[str, ...]) -> dict[str, str | None]:
    """Name -> None where this machine can use the backend, else the reason why not."""
    return {name: why_not(package, name) for name in names}


def of_this_machine() -> dict[str, dict[str, str | None]]:
    """Return for each op its backends, best first, each with None or the reason why it is not used here.

    With a GPU, the kernels for CPUs are left out: they take no CUDA tensors.
    """
    from megatron_blackmamba import ops

    found = {}
    for module in pkgutil.iter_modules(ops.__path__):
        op = importlib.import_module(f"{ops.__name__}.{module.name}") if module.ispkg else None
        if hasattr(op, "available_backends"):
            names = op.available_backends()
            found[module.name] = {name: why for name, why in names.items() if not (has_gpu() and name == FOR_CPU)}
    found["attention"] = {"scaled_dot_product_attention": None}
    found["adam"] = {
        "fused_adam": _why_no_fused_adam(),
        "triton": why_not(f"{ops.__name__}.adam", "triton"),
        "pytorch": None,
    }
    return found


def _why_no_fused_adam() -> str | None:
    reasons = []
    for name in FUSED_ADAM:
        try:
            importlib.import_module(name)
            return None
        except Exception as error:  # a package built for another torch fails in ways of its own
            reasons.append(str(error))
    return ", ".join(reasons)


def in_use() -> list[str]:
    """Return a line for each op: the backend that "auto" chooses here, and why not a better one."""
    lines = []
    for op, names in of_this_machine().items():
        better: dict[str, str] = {}
        for name, why in names.items():
            if why is None:
                reasons = "".join(f"; not {other}: {reason}" for other, reason in better.items())
                lines.append(f"{op}: {name}{reasons}")
                break
            better[name] = why
    return lines


def has_gpu() -> bool:
    return torch.cuda.is_available()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many a GPU has; elsewhere, where kernels are interpreted or only compiled, as many as an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def why_no_triton() -> str | None:
    """Return why a machine with a GPU runs none of this project's Triton kernels; None if it does, or has no GPU."""
    return why_not("megatron_blackmamba.ops", SUPPORT) if has_gpu() else None


def lost() -> dict[str, str]:
    """Return the operations that lose this project's GPU kernel on this machine, each with the reason."""
    ours = {
        op: why
        for op, names in of_this_machine().items()
        for name, why in names.items()
        if name.startswith("triton") and why
    }
    return ours if has_gpu() else {}


def trial(smallest: Callable[[str], None]) -> str | None:
    """Return why the smallest call fails on this machine's GPU, or None. Without a GPU, nothing is tried."""
    return _tried(smallest, TRIAL_DEVICE) if has_gpu() else None


@cache
def _tried(smallest: Callable[[str], None], device: str) -> str | None:
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the first call may be one without gradients
            smallest(device)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return f"its smallest call fails: {type(error).__name__}: {first_line}"
    return None


def triton_of(name: str, *call: Any) -> ModuleType | None:
    """Return the module `ops.<name>.triton` if it can do the call, of which the first argument is a tensor."""
    package = f"megatron_blackmamba.ops.{name}"
    if not (call[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1") or why_not(package, "triton"):
        return None
    found = _load(package, "triton")
    return None if found.unsupported(*call) else found


def fused(name: str) -> dict[str, str | None]:
    """Return the backends of an op that is one kernel of Triton or C++, else PyTorch's operations."""
    from megatron_blackmamba.ops import library

    return {
        "triton": why_not(f"megatron_blackmamba.ops.{name}", "triton"),
        "cpp": library.unavailable(),
        "pytorch": None,
    }


@cache
def why_not(package: str, name: str) -> str | None:
    """Return why this machine cannot use the backend, or None.

    Kernels of Triton are loaded only where Triton itself can run: the decorators that read them take a while.
    """
    try:
        if name.startswith("triton") and name != SUPPORT and (reason := why_not("megatron_blackmamba.ops", SUPPORT)):
            return reason
        module = _load(package, name)
        return module.unavailable() or (trial(module.smallest) if hasattr(module, "smallest") else None)
    except ImportError as error:
        return str(error)
    except Exception as error:  # a package built for another torch or Triton fails in ways of its own
        return f"it fails to load: {type(error).__name__}: {error}"


@cache
def _load(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"{package}.{name}")
