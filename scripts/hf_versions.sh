#!/usr/bin/env bash
# Run the tests of the modeling files on several versions of transformers, each in an environment of its own, and train
# 20 steps with Trainer and TRL's SFTTrainer (scripts/hf_training.py).
#
#   scripts/hf_versions.sh [VERSION...]       by default: 4.50 4.57 5
#
# The environments are kept in .hf_versions/ and share all else with .venv (or VENV), so that they are made in a minute.
# Needs `make install` first; lm-eval is tested too where .venv has it (`pip install -e .[eval]`).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
ENVIRONMENTS=${ENVIRONMENTS:-.hf_versions}
[ -x "$VENV/bin/python" ] || { echo "$VENV has no Python: make install first, or name another with VENV=" >&2; exit 2; }

shared=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
failed=()
[ $# -gt 0 ] || set -- 4.50 4.57 5
for version in "$@"; do
    folder=$ENVIRONMENTS/transformers-$version
    if [ ! -e "$folder/ready" ]; then
        rm -rf "$folder"
        "$VENV/bin/python" -m venv "$folder"
        own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        echo "$shared" > "$own/shared.pth"  # comes after the environment's own packages
        # datasets for lm-eval, accelerate for it and for offloading, in versions that go with this one
        "$folder/bin/python" -m pip --disable-pip-version-check --quiet install "transformers==$version.*" datasets accelerate trl
        touch "$folder/ready"
    fi
    "$folder/bin/python" -c 'import transformers; print(f"== transformers {transformers.__version__}")'
    "$folder/bin/python" -m pytest tests/hf || failed+=("$version")
    "$folder/bin/python" scripts/hf_training.py || failed+=("$version (training)")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with transformers ${failed[*]}" >&2; exit 1; }
