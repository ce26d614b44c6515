#!/usr/bin/env bash
# Make the virtual environment and install the project in it, editable, with everything the tests need.
# Called by `make install`; PYTHON names the interpreter, VENV the folder.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

command -v "$PYTHON" >/dev/null || { echo "No '$PYTHON' here. Name one: make install PYTHON=python3.11" >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "$("$PYTHON" --version) is not supported: Python 3.10 to 3.13 is. Name one: make install PYTHON=python3.11" >&2; exit 2; }

if [ -x "$VENV/bin/python" ] && [ "$("$VENV/bin/python" -c 'import sys; print(sys.version_info[:2])')" != "$("$PYTHON" -c 'import sys; print(sys.version_info[:2])')" ]; then
    echo "$VENV holds another Python; making it anew."
    rm -rf "$VENV"
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || {
    echo "python -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 2; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
"$VENV/bin/python" -c 'import torch' 2>/dev/null || {
    echo "Installing PyTorch and the project's requirements into $VENV (once; minutes)..."
    # One known version, so that a fresh machine gets what the tests ran with; any torch >= 2.6 already there is kept.
    pip install "torch==2.13.0" || pip install torch
}
pip install --editable ".[dev]"
echo "Ready: $VENV/bin/blackmamba --help"
