#!/usr/bin/env bash
# Collect the 16 MB that gpu_check.sh and gpu_study.sh need offline. Run this with network access, then copy the folder.
#
#   scripts/gpu_carry.sh FOLDER [PYTHON_VERSION]
#
# Fetches wheels for 64-bit x86 Linux and PYTHON_VERSION (default 3.12), and the source archives of mamba-ssm
# and causal-conv1d. PyTorch with its Triton, NumPy and transformers are expected there; the scripts install of the
# wheels only what that Python lacks. Needs a Python with pip and PyTorch, such as this project's: PYTHON=.venv/bin/python.
set -euo pipefail
FOLDER=${1:?gpu_carry.sh FOLDER [PYTHON_VERSION]}
VERSION=${2:-3.12}
PYTHON=${PYTHON:-python3}
WHEELS=(
    'megatron-core>=0.16.1,<0.20' psutil
    pydantic annotated-types typing-inspection typing-extensions typer annotated-doc shellingham click
    rich markdown-it-py mdurl pygments pyyaml orjson zstandard
    pytest iniconfig pluggy packaging
    'setuptools<82' wheel ninja einops
)
SOURCES=('mamba-ssm>=2.2' 'causal-conv1d>=1.4')

pip() { "$PYTHON" -m pip --disable-pip-version-check --quiet download --no-deps --dest "$FOLDER" "$@"; }

mkdir -p "$FOLDER"
platforms=()
for glibc in 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
for name in manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${name}_x86_64"); done
wheels() { pip --only-binary=:all: --implementation cp --python-version "$VERSION" "${platforms[@]}" "$@"; }
wheels "${WHEELS[@]}"
# pydantic works with one version of its core alone.
core=$("$PYTHON" - "$FOLDER" <<'PY'
import pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("pydantic-*.whl")
archive = zipfile.ZipFile(wheel)
metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
print(re.search(r"Requires-Dist: (pydantic-core==[\w.]+)", archive.read(metadata).decode())[1])
PY
)
wheels "$core"
# pip asks the archives' setup.py for their names; these spare it the CUDA compiler.
export MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE
for source in "${SOURCES[@]}"; do
    pip --no-binary=:all: --no-build-isolation "$source"
done
git rev-parse --short HEAD >"$FOLDER/commit" 2>/dev/null || rm -f "$FOLDER/commit" # the tree may travel without git
du -sh "$FOLDER"
