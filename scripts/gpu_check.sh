#!/usr/bin/env bash
# Test the project on this machine's GPU and measure it there, in calls of some minutes, without network.
#
#   scripts/gpu_check.sh CARRIED RESULTS [--minutes 9] [--parts 1 2 3 4 5 6]
#
# Needs Python with PyTorch, its Triton and transformers, one NVIDIA GPU, and a C compiler, as Triton does. CARRIED is a
# folder that scripts/gpu_carry.sh made on a machine with network, or "": of its wheels those are used that this Python
# lacks. Its corpus.tar.xz, if there, is the text of part 5, and its folder `old` has kernels to compare with in part 3.
# RESULTS receives logs, tables in Markdown and state.json. The next call with it goes on where the last one stopped.
#
# 1 what is new: tests, and compute-sanitizer where it is installed   2 layouts of several ranks over NCCL
# 3 the 1.5B model's step at 42, 18 and 6 sequences                    4 decoding
# 5 `blackmamba train` on text: killed, resumed, exported              6 all tests, peers, FP8
#
# Exit codes: 1 if anything failed, 75 if something is left. REHEARSE=1 runs it without a GPU, on small models.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
CARRIED=${1:-}
RESULTS=${2:-gpu_results}
shift $(($# < 2 ? $# : 2))
export PYTHON=${PYTHON:-python3}
WORK=$(mktemp -d)
export WORK
trap 'rm -rf "$WORK"' EXIT
source scripts/carried.sh
use_carried
[ -z "$CARRIED" ] || [ ! -e "$CARRIED/commit" ] || export COMMIT="${COMMIT:-$(cat "$CARRIED/commit")}"
"$PYTHON" -m scripts.gpu_check "$RESULTS" ${CARRIED:+--carried "$CARRIED"} "$@"
