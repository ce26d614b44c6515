"""What pyproject.toml cannot say: configs and scripts as package data, and the optional C++ extension."""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
# At the top of the repository, and inside the package once installed. The other scripts are for maintainers.
DATA_FOLDERS = {
    "megatron_blackmamba.configs": "configs",
    "megatron_blackmamba.scripts.slurm": "scripts/slurm",
    "megatron_blackmamba.scripts.container": "scripts/container",
}

CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
ISA_FLAGS = {
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "plain": [],
}


class BuildKernels(build_ext):
    """Compiles csrc/ into one shared library with a plain C interface: no torch headers, nothing of this machine in it.

    The sources that do arithmetic are compiled once per instruction set, and the library says at run time which one the
    processor runs. Without a C++ compiler there is a warning, and the operations run in PyTorch.
    """

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        compilers = [os.environ.get("CXX"), "c++", "g++", "clang++"]
        self.cxx = next((name for name in compilers if name and shutil.which(name.split()[0])), None)
        if self.cxx is None:
            raise CompileError("no C++ compiler found (c++, g++, clang++, or the one that CXX names)")
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        isas = ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}
        digest = hashlib.sha256(b"".join(Path(path).read_bytes() for path in sorted([*ext.sources, *ext.depends])))
        digest_flag = f'-DBLACKMAMBA_SOURCES="{digest.hexdigest()}"'
        objects = []
        for source in ext.sources:
            versions = isas if '"simd.h"' in Path(source).read_text() else {"any": []}
            for isa, flags in versions.items():
                objects.append(str(folder / f"{Path(source).stem}.{isa}.o"))
                self.run_compiler(*flags, f"-DBLACKMAMBA_ISA={isa}", digest_flag, "-c", source, "-o", objects[-1])
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self.run_compiler("-shared", *objects, "-o", f"{library}.new")
        os.replace(f"{library}.new", library)  # a process that runs the old one keeps it

    def run_compiler(self, *arguments):
        command = [*self.cxx.split(), *CXX_FLAGS, *arguments]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{' '.join(command)}: {error}") from error


KERNELS = Extension(
    "megatron_blackmamba.ops.libblackmamba",
    sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp")),
    depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h")),
    optional=True,
)

setup(
    packages=[*find_packages(include=["megatron_blackmamba*"]), *DATA_FOLDERS],
    package_dir={"": ".", **DATA_FOLDERS},
    package_data={
        "megatron_blackmamba.configs": ["**/*.yaml", "studies/*.txt"],
        "megatron_blackmamba.scripts.slurm": ["*"],
        "megatron_blackmamba.scripts.container": ["*"],
        "megatron_blackmamba.launch": ["tried.json"],
        "megatron_blackmamba.ops": ["**/*.cu", "device.h"],
        "megatron_blackmamba.report": ["vendor/*"],
        "megatron_blackmamba": ["py.typed"],
        "megatron_blackmamba.serving": ["page/*"],
    },
    ext_modules=[KERNELS],
    cmdclass={"build_ext": BuildKernels},
)
