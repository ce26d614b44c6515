"""Choose the implementation of an op: the best one that this machine can run and that supports the call.

An op with several implementations is a folder. Its `__init__` has the function that users call, and BACKENDS, the names
of the implementations, best first. Each is a module of that name with the function that does the work, and where it has
limits
    TAKES                              the device and dtypes of a call's first tensor
    unsupported(*call) -> str | None   why it does not support this call, beside TAKES
    unavailable() -> str | None        why this machine cannot use it at all, beside its language
    smallest(device) -> None           run the smallest call, or raise
A module is named by its language (LANGUAGES), and a second one of a language by that and more: `triton_narrow`.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = __package__
LANGUAGES = {"triton": "triton_support", "cpp": "library", "cuda": "nvrtc"}
"""Backend → the module of `ops` that says whether its language runs here."""
FOR_CPU = "cpp"
OLD_NAMES = {"cpu": FOR_CPU}
TRIAL_DEVICE = "cuda"
"""Where the smallest call of a backend is tried."""
UP_TO_FP32 = (torch.float32, torch.bfloat16, torch.float16)
FP32_OR_BF16 = (torch.float32, torch.bfloat16)


class Takes(NamedTuple):
    """What the first tensor of a call must be."""

    device: str | None = None
    """"cpu", "cuda" or any. Triton's interpreter runs kernels for "cuda" on CPU tensors."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Empty: any."""

    def why_not(self, x: Tensor, interpreted: bool) -> str | None:
        if self.device == "cuda" and not x.is_cuda and not interpreted:
            return "the tensors are not on a CUDA device"
        if self.device == "cpu" and not x.is_cpu:  # faster than to ask for the device
            return "the tensors are not on the CPU"
        if self.dtypes and x.dtype not in self.dtypes:
            *takes, given = (str(dtype).removeprefix("torch.") for dtype in (*self.dtypes, x.dtype))
            return f"takes {', '.join(takes)}; the input is {given}"
        return None


def choose(package: str, names: tuple[str, ...], wanted: str, *call: Any) -> ModuleType:
    """Return the module of the backend `wanted`, or for "auto" of the first in `names` that can do the call."""
    wanted = OLD_NAMES.get(wanted, wanted)
    if wanted != "auto" and wanted not in names:
        raise ValueError(f"backend must be one of auto, {', '.join(names)}; not {wanted!r}")
    reasons = {}
    for name in names if wanted == "auto" else (wanted,):
        reasons[name] = refusal(package, name, *call)
        if reasons[name] is None:
            return _load(package, name)
    op = package.rpartition(".")[2]
    raise ValueError(f"{op} cannot run here: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def find(package: str, name: str, *call: Any) -> ModuleType | None:
    """Return the module of a backend, or None if it cannot do the call here."""
    return None if refusal(package, name, *call) else _load(package, name)


def refusal(package: str, name: str, *call: Any) -> str | None:
    """Return why a backend cannot do a call here, or None. The call begins with a tensor, or inputs that do."""
    return why_not(package, name) or unsupported(_load(package, name), *call)


def unsupported(backend: ModuleType, *call: Any) -> str | None:
    """Return why a backend does not support a call, or None."""
    takes, more, on_cpu = _limits(backend)
    first = call[0] if isinstance(call[0], Tensor) else next(iter(call[0]))
    return takes.why_not(first, on_cpu and interpreted()) or (more(*call) if more else None)


@cache
def _limits(backend: ModuleType) -> tuple[Takes, Callable[..., str | None] | None, bool]:
    """Return what a backend declares, and whether an interpreter may run it on CPU tensors."""
    on_cpu = _language(backend.__name__.rpartition(".")[2]) == "triton"
    return getattr(backend, "TAKES", Takes()), getattr(backend, "unsupported", None), on_cpu


def available(package: str, names: tuple[str, ...]) -> dict[str, str | None]:
    """Name -> None where this machine can use the backend, else the reason why not."""
    return {name: why_not(package, name) for name in names}


def exact(package: str) -> list[str]:
    """Return the backends of an op that say they take float64; one that cannot be imported here says nothing."""
    return [name for name in importlib.import_module(package).BACKENDS if _takes_float64(package, name)]


def _takes_float64(package: str, name: str) -> bool:
    try:
        dtypes = _limits(_load(package, name))[0].dtypes
    except ImportError:
        return False
    return not dtypes or torch.float64 in dtypes


def of_this_machine() -> dict[str, dict[str, str | None]]:
    """Return for each op its backends, best first, each with None or the reason why it is not used here.

    With a GPU, the kernels for CPUs are left out: they take no CUDA tensors.
    """
    found = {}
    for module in pkgutil.iter_modules(importlib.import_module(ROOT).__path__):
        if module.ispkg:
            names = importlib.import_module(f"{ROOT}.{module.name}").available_backends()
            found[module.name] = {name: why for name, why in names.items() if not (has_gpu() and name == FOR_CPU)}
    found["attention"] = {"scaled_dot_product_attention": None}
    return found


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


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on CPU tensors, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many a GPU has; elsewhere, where kernels are interpreted or only compiled, as many as an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def why_no_triton() -> str | None:
    """Return why a machine with a GPU runs none of this project's Triton kernels; None if it does, or has no GPU."""
    return why_not(ROOT, LANGUAGES["triton"]) if has_gpu() else None


def lost() -> dict[str, str]:
    """Return the operations that lose this project's GPU kernel on this machine, each with the reason."""
    ours = {op: why for op, names in of_this_machine().items() if (why := names.get("triton"))}
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


@cache
def why_not(package: str, name: str) -> str | None:
    """Return why this machine cannot use the backend, or None.

    Its language is asked first. Triton's decorators take a while, so kernels are loaded only where they can run.
    """
    try:
        language = LANGUAGES.get(_language(name)) if package != ROOT else None
        if language and (reason := why_not(ROOT, language)):
            return reason
        module = _load(package, name)
        reason = module.unavailable() if hasattr(module, "unavailable") else None
        return reason or (trial(module.smallest) if hasattr(module, "smallest") else None)
    except ImportError as error:
        return str(error)
    except Exception as error:  # a package built for another torch or Triton fails in ways of its own
        return f"it fails to load: {type(error).__name__}: {error}"


def _language(name: str) -> str:
    return name.partition("_")[0]


@cache
def _load(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"{package}.{name}")
