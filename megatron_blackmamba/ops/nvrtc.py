"""Compile CUDA C++ at run time with NVRTC, and launch it: no nvcc, no headers, about a second a source.

NVRTC and its Python interface, `cuda.bindings`, come with PyTorch for CUDA. A kernel takes one structure, whose fields
are pointers and 64-bit integers; their names and order are read from its source.
"""

import ctypes
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = Path(__file__).with_name("device.h")
OLDEST = (9, 0)  # compute capability: the kernels fit Hopper's registers, and older GPUs recompute states
OPTIONS = ("--std=c++17", "--use_fast_math", "--extra-device-vectorization")
STATIC_SHARED_BYTES = 48 * 1024  # a kernel that wants more must ask for it


class CompilerError(RuntimeError):
    """NVRTC or the driver refused a kernel."""


def unavailable() -> str | None:
    """Return why kernels cannot be compiled and run on this machine, or None."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return f"needs the package cuda-bindings, which comes with PyTorch for CUDA: {error}"
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if (found := torch.cuda.get_device_capability()) < OLDEST:
        return f"needs compute capability {'.'.join(map(str, OLDEST))} or newer, found {'.'.join(map(str, found))}"
    return None


def launch(
    source: Path,
    kernel: str,
    structure: str,
    defines: dict[str, int],
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    arguments: dict[str, Tensor | int | None],
) -> None:
    """Run a kernel on the device and stream of its tensors; compile it if this process has not yet."""
    from cuda.bindings import driver

    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    function = _function(source, kernel, tuple(sorted(defines.items())), shared_bytes, device.index)
    packed = pack(source, structure, arguments)
    pointer = ctypes.c_void_p(ctypes.addressof(packed))
    stream = torch.cuda.current_stream(device).cuda_stream
    _checked(driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointer), 0))


def pack(source: Path, structure: str, arguments: dict[str, Tensor | int | None]) -> "ctypes.Array[ctypes.c_int64]":
    """Return the arguments as the structure in memory: addresses of tensors, 0 for None, and integers."""
    names = fields(source, structure)
    if arguments.keys() != set(names):
        raise TypeError(f"{structure} takes {', '.join(names)}; not {', '.join(arguments)}")
    values = (arguments[name] for name in names)
    return (ctypes.c_int64 * len(names))(*(x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in values))


@cache
def fields(source: Path, structure: str) -> tuple[str, ...]:
    """Return the names of a structure's fields, in order."""
    found = re.search(rf"struct {structure} {{(.*?)}};", source.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise LookupError(f"{source.name} has no structure {structure}")
    declarations = re.sub(r"//[^\n]*", "", found[1]).split(";")
    return tuple(name for each in declarations for name in re.findall(r"(\w+)\s*(?=,|$)", each.strip()))


@cache
def constants(source: Path, defines: tuple[tuple[str, int], ...] = ()) -> dict[str, int]:
    """Return the values of a source's `constexpr int`, as far as they follow from these definitions."""
    known = dict(defines)
    for declarations in re.findall(r"constexpr int ([^;]*);", source.read_text("utf-8")):
        for name, expression in re.findall(r"(\w+) = ([^,]+)", declarations):
            chosen = re.sub(r"(\w+) \? (\w+) : (\w+)", r"(\2 if \1 else \3)", expression).replace("/", "//")
            with suppress(NameError):
                known[name] = eval(chosen, {"__builtins__": {}}, known)
    return known


def compile_source(source: Path, defines: dict[str, int], architecture: str) -> bytes:
    """Return the machine code of all kernels of a source, for an architecture such as "sm_90a"."""
    from cuda.bindings import nvrtc

    text = DEVICE.read_text(encoding="utf-8") + f'#line 1 "{source.name}"\n' + source.read_text(encoding="utf-8")
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), source.name.encode(), 0, [], []))
    options = [*OPTIONS, f"--gpu-architecture={architecture}", *(f"-D{name}={x}" for name, x in defines.items())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise CompilerError(f"{source.name} does not compile for {architecture}:\n{log.decode(errors='replace')}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


@cache
def _function(source: Path, kernel: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> Any:
    from cuda.bindings import driver

    module = _module(source, defines, device)
    function = _checked(driver.cuModuleGetFunction(module, kernel.encode()))
    if shared_bytes > STATIC_SHARED_BYTES:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function


@cache
def _module(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    code = compile_source(source, dict(defines), f"sm_{major}{minor}")
    return _checked(driver.cuModuleLoadData(code))


def _checked(answer: tuple) -> Any:
    """Return what a call of `cuda.bindings` answers beside its status, or raise."""
    status, *rest = answer
    if status.value:
        raise CompilerError(f"CUDA answers {status.name}")
    return rest[0] if rest else None
