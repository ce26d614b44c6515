"""The doctor's look at what is installed: versions, and for each op the backends found here and why not the others."""

import json
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, resources

from megatron_blackmamba.launch.findings import Finding
from megatron_blackmamba.version import __version__, installed

REQUIRED = ("numpy", "pydantic", "tokenizers", "safetensors", "transformers")
OPTIONAL = {
    "fastokens": "tokenizes many times faster",
    "triton": "fused kernels on GPUs; comes with PyTorch's CUDA builds",
    "mamba-ssm": "CUDA selective scan",
    "transformer-engine": "kernels.linear: te, and fused optimizers on GPUs",
    "wandb": "logging.wandb",
    "lm-eval": "evaluation of an export",
}
PROJECT = "megatron-blackmamba"
REPAIR = "`make -B install` repairs the environment"
GPU_ONLY = {"triton", "mamba-ssm", "transformer-engine"}


def interpreter() -> Iterator[Finding]:
    python = f"{platform.python_version()} at {sys.prefix}, {platform.system()} {platform.machine()}"
    yield Finding("software", "megatron_blackmamba", __version__)
    yield Finding("software", "python", python)


def packages(gpus: int) -> Iterator[Finding]:
    for name in REQUIRED:
        version = installed(name)
        yield Finding.judge("software", name, version or "missing", version is not None, f"pip install {name}")
    for name, purpose in OPTIONAL.items():
        version = installed(name)
        if version:
            yield Finding("software", name, version)
        elif name in GPU_ONLY and not gpus:
            yield Finding("software", name, f"absent, and of no use without a GPU ({purpose})", "note")
        else:
            yield Finding("software", name, f"absent ({purpose})", "note", f"pip install {_with_flags(name)}")


def versions() -> Iterator[Finding]:
    """Yield a finding for each installed package that is older or newer than every version that was tried."""
    from packaging.version import Version

    for package, tried in tried_versions().items():
        version = installed(package)
        if version is None:
            continue
        oldest, newest = min(tried, key=Version), max(tried, key=Version)
        here = Version(version).release[:2]
        if not Version(oldest).release[:2] <= here <= Version(newest).release[:2]:
            side = "newer" if here > Version(newest).release[:2] else "older"
            found = f"{package} {version} is {side} than everything tried ({oldest} to {newest})"
            yield Finding("software", "versions", found, "note", "`make -B install` takes the locked versions")


def tried_versions() -> dict[str, set[str]]:
    """Return the versions of each package with which all tests at its border passed (docs/versions.md)."""
    rows = json.loads((resources.files(__package__) / "tried.json").read_bytes())
    failed = {(row["package"], row["version"]) for row in rows if not row["passed"]}
    tried: dict[str, set[str]] = {}
    for row in rows:
        if (row["package"], row["version"]) not in failed:
            tried.setdefault(row["package"], set()).add(row["version"])
    return tried


def foreign_names() -> Iterator[Finding]:
    """Yield a finding for each private name that an installed package lacks, unless nobody needs it there."""
    from megatron_blackmamba.engine import foreign

    for entry, gone in foreign.report():
        found = f"{entry.package} {installed(entry.package)} has no {', '.join(gone)} for {entry.used_by}: {entry.why}"
        yield Finding("software", "private names", found, "problem" if entry.needed else "note", entry.instead)


def programs() -> Iterator[Finding]:
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    advice = "install one, then `make -B install`: the compiled CPU scan is several times faster"
    yield Finding.judge("software", "C++ compiler", compiler or "none", compiler is not None, advice, "warning")
    if shutil.which("sbatch"):
        yield Finding("software", "Slurm", str(shutil.which("sbatch")))


def imports() -> Iterator[Finding]:
    """Check that PyTorch really imports, with its libraries, and that megatron-core is installed."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("software", "torch", f"does not import: {error}", "problem", REPAIR)
    else:
        yield Finding("software", "torch", torch.__version__)
    version = installed("megatron-core")
    yield Finding.judge("software", "megatron-core", version or "missing", version is not None, REPAIR)
    for wrong in unmet():
        yield Finding("software", "requirements", wrong, "problem", REPAIR)


def unmet() -> list[str]:
    """Return the installed packages whose versions do not meet this project's requirements."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in metadata.requires(PROJECT) or ()]
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        return []
    found = {need: installed(need.name) for need in needed if not need.marker or need.marker.evaluate({"extra": ""})}
    return [
        f"{need.name} {version} is here, and this project needs {need.specifier}"
        for need, version in found.items()
        if version and not need.specifier.contains(version, prereleases=True)
    ]


def backends() -> Iterator[Finding]:
    """Yield one line for each backend of each op; the first available one is used."""
    from megatron_blackmamba.ops.backends import of_this_machine, why_no_triton

    if missing := why_no_triton():
        found = f"not in use: {missing}. Operations of PyTorch replace them, several times slower"
        yield Finding("backends", "Triton kernels", found, "warning", "pip install -U triton, as your PyTorch allows")
    for op, names in of_this_machine().items():
        chosen = None
        for name, why_not in names.items():
            if why_not:
                yield Finding("backends", f"{op}: {name}", why_not, "note")
            else:
                yield Finding("backends", f"{op}: {name}", "available" if chosen else "in use")
                chosen = chosen or name
        if chosen is None:
            yield Finding("backends", op, "no backend works here", "problem", REPAIR)


def _with_flags(package: str) -> str:
    return f"--no-build-isolation {package}" if package == "mamba-ssm" else package
