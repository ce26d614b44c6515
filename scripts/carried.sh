# For scripts that run without network: the wheels in the folder CARRIED that this Python lacks, in $WORK/site.
# Sourced, with PYTHON, CARRIED and WORK set.
# shellcheck shell=bash

export PYTHONPATH="$WORK/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

pip() { "$PYTHON" -m pip --disable-pip-version-check --quiet install --no-cache-dir --no-index --no-deps --target "$WORK/site" "$@"; }

# What is here already stays as it is: a second NumPy or packaging before it could only do harm.
missing_wheels() {
    "$PYTHON" - "$CARRIED" <<'EOF'
import pathlib
import sys
from importlib.metadata import PackageNotFoundError, version
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    try:
        version(wheel.name.split("-")[0])
    except PackageNotFoundError:
        print(wheel)
EOF
}

use_carried() {
    [ -n "$CARRIED" ] || return 0
    CARRIED=$(cd "$CARRIED" && pwd) || exit 2
    local wheels
    mapfile -t wheels < <(missing_wheels)
    [ ${#wheels[@]} = 0 ] || pip "${wheels[@]}" || exit 2
}
