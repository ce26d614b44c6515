"""Requirements of the rehearsal, checked without importing torch."""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

CHECKED = {"torch": ("2.13",), "triton": ("3.7", "3.9"), "megatron-core": ("0.16",)}
"""Minor versions whose private interfaces `fake_cuda.py` and `record.py` were checked with."""


def why_not() -> str | None:
    """Return why a step cannot be rehearsed here; None: it can."""
    if not sys.platform.startswith("linux"):
        return f"the rehearsal needs Linux, not {sys.platform}"
    for package, minors in CHECKED.items():
        try:
            here = version(package)
        except PackageNotFoundError:
            return f"the rehearsal needs {package}, which is not installed"
        if ".".join(here.split(".")[:2]) not in minors:
            return (
                f"THE REHEARSAL DOES NOT KNOW {package} {here}, only {', '.join(minors)}: add the version to"
                " benchmarks/rehearsal/requirements.py once tests/rehearsal passes with it"
            )
    return None if shutil.which("g++") else "the rehearsal needs g++, which is not installed"
