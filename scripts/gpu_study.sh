#!/usr/bin/env bash
# Train the study `trend_gpu` on this machine's GPU, in calls of under 10 minutes, without network.
#
#   scripts/gpu_study.sh [CARRIED] [RESULTS]
#
# CARRIED is a folder that scripts/gpu_carry.sh made: of its wheels those are used that this Python lacks. Its corpus.tar.xz
# is the corpus, which `blackmamba study trend_gpu --budget 0` gathers on a machine with network. Each further call goes on
# where the last one stopped, as long as studies/trend_gpu is kept. RESULTS (default gpu_study) receives points.json with
# the finished points, the page and the log.
# MINUTES=N (default 8) bounds the training of a call, JOBS=N (default 4) is the number of runs that share the GPU.
# POINTS=FILE has points of earlier calls on other machines, which are not trained again.
# Exit code 75: points are left, call it again.
#
# REHEARSE=STUDY trains a small study file on a machine without a GPU instead.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
CARRIED=${1:-}
RESULTS=${2:-gpu_study}
PYTHON=${PYTHON:-python3}
STUDY=${REHEARSE:-trend_gpu}
FOLDER=${FOLDER:-studies/trend_gpu}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$RESULTS"
source scripts/carried.sh
use_carried
if [ -n "$CARRIED" ] && [ -e "$CARRIED/corpus.tar.xz" ] && [ ! -e "$FOLDER/corpus" ]; then
    mkdir -p "$FOLDER/unpacked" # not in its place before it is whole
    "$PYTHON" -m tarfile --extract "$CARRIED/corpus.tar.xz" "$FOLDER/unpacked" || exit 2
    mv "$FOLDER/unpacked/corpus" "$FOLDER/corpus"
fi

"$PYTHON" - <<'EOF' || exit 2
import os
import sys
import torch
if not torch.cuda.is_available() and not os.environ.get("REHEARSE"):
    sys.exit("gpu_study: PyTorch sees no CUDA device here; `blackmamba study trend` is the same study for CPUs")
EOF

"$PYTHON" -m megatron_blackmamba study "$STUDY" --folder "$FOLDER" --minutes "${MINUTES:-8}" --jobs "${JOBS:-4}" \
    ${POINTS:+--points "$POINTS"} 2>&1 |
    tee -a "$RESULTS/study.log"
code=$?
cp "$FOLDER/points.json" "$RESULTS/" 2>/dev/null && cp "$FOLDER"/*.html "$RESULTS/" 2>/dev/null
exit "$code"
