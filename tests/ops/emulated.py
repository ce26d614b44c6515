"""Runs CUDA C++ without a GPU: the same source, compiled for the CPU with emulator.h in the place of device.h."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

from torch import Tensor

from megatron_blackmamba.ops import nvrtc

EMULATOR = Path(__file__).with_name("emulator.h")


class Emulator:
    """Stands in for `nvrtc.launch`, on CPU tensors.

    order: Which thread of a block runs first: 0 the first, 1 the last, 2 one in between.
    early: Asynchronous copies happen at once, else when they are waited for.
    change: Changes the source before it is compiled, to plant a fault.
    """

    def __init__(self, folder: Path, order: int = 0, early: bool = False, change=lambda text: text) -> None:
        self.folder, self.order, self.early, self.change = folder, order, early, change
        self.launched: list[str] = []

    def launch(self, source, kernel, structure, defines, grid, threads, shared_bytes, arguments) -> None:
        assert all(x.is_cpu for x in arguments.values() if isinstance(x, Tensor))
        library = compiled(self.change(source.read_text()), tuple(sorted(defines.items())), self.folder)
        packed = nvrtc.pack(source, structure, arguments)
        self.launched.append(kernel)
        run = getattr(library, f"run_{kernel}")
        if run(ctypes.byref(packed), (ctypes.c_int * 3)(*grid), threads, shared_bytes, self.order, int(self.early)):
            raise RuntimeError(f"{kernel}: threads wait for each other for ever")


def why_not() -> str | None:
    return None if shutil.which("g++") else "needs g++"


@cache
def compiled(text: str, defines: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    entries = [
        line.split("(")[0].split()[-1] for line in text.split("KERNEL ")[1:] for line in [line.split(")", 1)[1]] if line
    ]
    wrappers = "".join(
        f"""
extern "C" int run_{name}(const void* arguments, const int* grid, int count, int bytes, int first, int early) {{
  order = first; copies_are_early = early;
  return run({name}, arguments, grid, count, bytes);
}}"""
        for name in entries
    )
    at = folder / f"emulated_{abs(hash((text, defines)))}"
    at.with_suffix(".cpp").write_text(f'#include "{EMULATOR}"\n{text}{wrappers}\n')
    flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off", *(f"-D{k}={v}" for k, v in defines)]
    subprocess.run(["g++", *flags, at.with_suffix(".cpp"), "-o", at.with_suffix(".so")], check=True)
    return ctypes.CDLL(str(at.with_suffix(".so")))
