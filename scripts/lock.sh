#!/usr/bin/env bash
# Write requirements/lock.txt, the exact versions that `make install` takes, and requirements/lowest.txt, the oldest
# versions that pyproject.toml allows. Called by `make lock`, which needs a network. uv finds the versions; users need only pip.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TOOLS=${TOOLS:-build/lock}
EXTRAS=(--extra data --extra dev --extra docs --extra bench --extra wandb)

[ -x "$TOOLS/bin/uv" ] || { "$PYTHON" -m venv "$TOOLS" && "$TOOLS/bin/pip" --quiet install "uv>=0.9"; }

compile() { # compile FILE TITLE ARGUMENTS...
    local file=$1 title=$2
    shift 2
    "$TOOLS/bin/uv" pip compile pyproject.toml --universal --python-version 3.10 --no-emit-index-url --no-annotate --no-header \
        --quiet --output-file "$file.new" "$@"
    { printf '# %s Written by `make lock`.\n' "$title" && cat "$file.new"; } > "$file"
    rm "$file.new"
}

compile requirements/lock.txt "The exact versions that make install takes, for every supported Python." \
    requirements/pins.in "${EXTRAS[@]}" --upgrade
compile requirements/lowest.txt "The oldest versions that pyproject.toml allows, without extras; make borders tries them." \
    --resolution lowest-direct --upgrade
git --no-pager diff --stat -- requirements || true
