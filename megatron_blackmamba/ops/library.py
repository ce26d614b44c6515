"""Finds the compiled C++ kernels (csrc/) and the version of them that this machine's processor runs best.

BLACKMAMBA_ISA=avx512|avx2|plain takes another version, for tests and comparisons.
"""

import ctypes
import hashlib
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).parent / "libblackmamba.so"
SOURCES = Path(__file__).parents[2] / "csrc"
"""Where the package runs from its source tree; an installed one has none, and its library fits it."""
ISAS = ("plain", "avx2", "avx512")  # each machine that runs one runs those before it


@cache
def unavailable() -> str | None:
    """Return why the C++ kernels cannot be used here, or None."""
    if not LIBRARY.exists():
        return "the C++ kernels are not built: install a C++ compiler, then `pip install --force-reinstall --no-deps .`"
    try:
        _load()
    except OSError as error:
        return f"the C++ kernels do not load: {error}"
    if SOURCES.is_dir() and _built_from() != _digest():
        reason = "the C++ kernels were built from other sources than csrc/ holds now: run `make install`"
        warnings.warn(f"{reason}. Until then PyTorch does their work, several times slower.", stacklevel=2)
        return reason
    return None


def _built_from() -> str | None:
    """Return the source digest stored in the library, if it is recent enough to have one."""
    try:
        built_from = _load().blackmamba_built_from
    except AttributeError:
        return None
    built_from.restype = ctypes.c_char_p
    return built_from().decode()


def _digest() -> str:
    """Return the digest of the C++ sources, computed as in setup.py."""
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@cache
def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.blackmamba_best_isa.restype = ctypes.c_char_p
    return library


def runnable_isas() -> tuple[str, ...]:
    """Return the instruction sets that this machine runs, the best one last."""
    best = _load().blackmamba_best_isa().decode()
    return ISAS[: ISAS.index(best) + 1]


def isa() -> str:
    """Return the instruction set that the kernels run with."""
    runnable = runnable_isas()
    wanted = os.environ.get("BLACKMAMBA_ISA", runnable[-1])
    if wanted not in runnable:
        raise ValueError(f"BLACKMAMBA_ISA={wanted}: this machine runs {', '.join(runnable)}")
    return wanted


class Matrix(ctypes.Structure):
    """struct Matrix of csrc/dots.h. Whoever makes one keeps its tensor alive."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "is_bf16")),
    )

    @staticmethod
    def of(weight_OI: Tensor) -> "Matrix":
        is_bf16 = weight_OI.dtype == torch.bfloat16
        return Matrix(weight_OI.data_ptr(), *weight_OI.shape, weight_OI.stride(0), is_bf16)


TYPES = {
    "int64": ctypes.c_int64,
    "float": ctypes.c_float,
    "pointer": ctypes.c_void_p,
    "strides": ctypes.c_int64 * 2,
    "matrix": Matrix,
}


def fields(described: str) -> list[tuple[str, Any]]:
    """Return the fields of a C structure: `int64 B L; pointer x; strides x` for B, L, x and x_strides."""
    found = []
    for part in described.split(";"):
        kind, *names = part.split()
        found += [(f"{name}_strides" if kind == "strides" else name, TYPES[kind]) for name in names]
    return found


class Arguments(ctypes.Structure):
    """A C structure that takes tensors: their addresses, and their strides where it has a `_strides` field for them."""

    def __init__(self, **values: object) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []  # alive for as long as C may look at them
        self.threads = torch.get_num_threads()
        self.set(**values)

    def set(self, **values: object) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                if not value.is_cpu:  # its address would end the process
                    raise ValueError(f"{name} is on {value.device}, and the C++ kernels compute on the CPU")
                self.tensors.append(value)
                if hasattr(self, f"{name}_strides"):
                    getattr(self, f"{name}_strides")[:] = value.stride()[:2]
                value = value.data_ptr()
            setattr(self, name, value)

    def copy(self) -> "Arguments":
        """Copy the arguments; the copy does not keep tensors of the original alive, so keep the original."""
        other = type(self).from_buffer_copy(self)
        other.tensors = []
        return other


class Probe(ctypes.Structure):
    """struct Probe of csrc/probe.cpp: how many exponentials to compute."""

    _fields_ = (("exponentials", ctypes.c_int64), ("result", ctypes.c_float))


def call(name: str, arguments: ctypes.Structure, version: str | None = None) -> None:
    """Run a kernel for this machine's instruction set, or for another `version`."""
    getattr(_load(), f"{name}_{version or isa()}")(ctypes.byref(arguments))


def with_channels_contiguous(x: Tensor) -> Tensor:
    """Return `x` if its channels are contiguous, else a copy; other strides do not matter."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_like_rows(x_BLI: Tensor, dtype: torch.dtype | None = None, channels: int | None = None) -> Tensor:
    """Return an uninitialised contiguous tensor with x's shape and order of dimensions in memory, or more channels."""
    B, L, I = x_BLI.shape
    I = channels or I
    like: dict[str, Any] = {"dtype": dtype or x_BLI.dtype, "device": x_BLI.device}
    if x_BLI.stride(0) < x_BLI.stride(1):
        return torch.empty(L, B, I, **like).transpose(0, 1)
    return torch.empty(B, L, I, **like)
