#!/usr/bin/env bash
# Make the virtual environment and install the project in it, editable, with everything the tests need.
# Called by `make install`; PYTHON names the interpreter, VENV the folder. What was interrupted goes on when called again.
# Versions are those of requirements/lock.txt; NEWEST=1 takes the newest that pyproject.toml allows. `install.sh EXTRA...`
# adds the packages of extras.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

trap 'exit 130' INT # pip ends well when it is interrupted, and what follows must not begin
fail() { printf '%s\n' "$@" >&2; exit 2; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

command -v "$PYTHON" >/dev/null || fail "No '$PYTHON' here. Name one: make install PYTHON=python3.11"
VERSION=$(version_of "$PYTHON") || fail "'$PYTHON' does not run. Name another: make install PYTHON=python3.11"
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    fail "Python $VERSION is not supported: 3.10 to 3.13 is. Name one: make install PYTHON=python3.11"

if [ -x "$VENV/bin/python" ] && [ "$(version_of "$VENV/bin/python")" != "$VERSION" ]; then
    echo "$VENV holds another Python; making it anew."
    rm -rf "$VENV"
fi
NEEDS_VENV="On Debian and Ubuntu: apt-get install python$VERSION-venv"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" ||
    fail "$PYTHON could not make the virtual environment $VENV. $NEEDS_VENV"
# An environment that was interrupted before it had pip gets it now.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null 2>&1 ||
    fail "$VENV has no pip. $NEEDS_VENV"

QUIET=--quiet
[ -t 1 ] && QUIET=--progress-bar=on # gigabytes: who watches sees them come
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@" "$QUIET"; }
# Python compiles what it imports, a small part of what is installed; pip would compile all of it, for more than a minute.
install() { pip install --no-compile "${VERSIONS[@]}" "$@"; }
no_pip() {
    fail "pip failed, see above. Is there a network, and room ($(df -Ph "$VENV" | awk 'NR == 2 {print $4}') free)? \
What is installed stays: make install goes on from there."
}
has_torch() { "$VENV/bin/python" -c 'import torch; torch.ones(1)' 2>/dev/null; }

if [ "${NEWEST:-}" = 1 ]; then
    VERSIONS=(--upgrade --upgrade-strategy eager)
else
    LOCK=$(mktemp)
    trap 'rm -f "$LOCK"' EXIT
    cp requirements/lock.txt "$LOCK"
    LOCKED=$(sed -n 's/^torch==//p' "$LOCK")
    if has_torch && [ "$("$VENV/bin/python" -c 'import torch; print(torch.__version__.split("+")[0])')" != "$LOCKED" ]; then
        sed -i -E '/^(torch|triton|nvidia-|cuda-)/d' "$LOCK" # a PyTorch of one's own stays, with what belongs to it
    fi
    VERSIONS=(--constraint "$LOCK")
fi
has_torch ||
    echo "Installing PyTorch and the project's requirements into $VENV (once; minutes; up to 6 GB with CUDA's libraries)..."
install setuptools wheel || no_pip # what builds packages comes from the lock too
EXTRAS=$(IFS=, && echo "${*:-dev}")
install --no-build-isolation --editable ".[$EXTRAS]" || no_pip

[ -e megatron_blackmamba/ops/libblackmamba.so ] ||
    echo "Without the C++ kernels: everything works, slower. With a compiler (apt-get install g++): make -B install"
echo "Ready: source $VENV/bin/activate, then blackmamba --help"
