#!/usr/bin/env bash
# Check the modeling files with several versions of transformers, each in an environment of its own: our tests, 20 steps
# with Trainer, TRL's SFTTrainer and PEFT (scripts/hf_training.py), and transformers' own tests of any model, beside its
# Mamba (scripts/hf_generic_tests.py).
#
#   scripts/hf_versions.sh [VERSION...]       by default: 4.50 4.57 5
#
# The environments are kept in .hf_versions/ and share all else with .venv (or VENV), so that they are made in a minute.
# Without GitHub, HF_TESTS=FOLDER names a clone of transformers with the tests of `generate` (see hf_generic_tests.py).
# Needs `make install` first; lm-eval is tested too where .venv has it (`pip install -e .[eval]`).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
ENVIRONMENTS=${ENVIRONMENTS:-.hf_versions}
[ -x "$VENV/bin/python" ] || { echo "$VENV has no Python: make install first, or name another with VENV=" >&2; exit 2; }

shared=$("$VENV/bin/python" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))')
failed=()
[ $# -gt 0 ] || set -- 4.50 4.57 5
for version in "$@"; do
    folder=$ENVIRONMENTS/transformers-$version
    python=$folder/bin/python
    if [ ! -e "$folder/ready" ]; then
        rm -rf "$folder"
        "$VENV/bin/python" -m venv "$folder"
        own=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        echo "$shared" > "$own/shared.pth"  # comes after the environment's own packages
        # in versions that go with this one: accelerate for offloading, datasets for lm-eval, and what the scripts need
        "$python" -m pip --disable-pip-version-check --quiet install \
            "transformers==$version.*" accelerate datasets trl peft parameterized
        touch "$folder/ready"
    fi
    "$python" -c 'import transformers; print(f"== transformers {transformers.__version__}")'
    "$python" -m pytest tests/hf || failed+=("$version")
    "$python" scripts/hf_training.py || failed+=("$version (training)")
    "$python" scripts/hf_generic_tests.py || failed+=("$version (generic tests)")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with transformers ${failed[*]}" >&2; exit 1; }
