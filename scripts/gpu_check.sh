#!/usr/bin/env bash
# Test the project on this machine's GPU and measure it there, in one call of under 9 minutes, without network.
#
#   scripts/gpu_check.sh [CARRIED] [RESULTS]
#
# Needs Python with PyTorch, its Triton and transformers, one NVIDIA GPU, and a C compiler, as Triton does. CARRIED is a
# folder that scripts/gpu_carry.sh made on a machine with network: wheels, of which those are used that this Python lacks,
# and the source archives of mamba-ssm and causal-conv1d, which are built for this GPU alone where there is nvcc, to be
# measured against. RESULTS (default gpu_results) receives the logs, the benchmarks' JSON and summary.txt.
# In turn: tests; the 1.5B model's step with its profile, then beside dense models; kernels beside their peers; generation;
# the loop of `tiny`; the 1.5B model's step beside the same in FP8; layouts of several ranks over NCCL, which go on where an
# earlier call with the same RESULTS stopped. LIMIT=N (default 530) bounds the call in seconds. What
# runs out of time leaves what it had found. Exit code: that of the tests.
#
# REHEARSE=1 runs on a machine without a GPU all that needs none: installing, building for an H100, collecting the tests,
# and the benchmark of a step with `tiny` on the CPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
CARRIED=${1:-}
RESULTS=${2:-gpu_results}
PYTHON=${PYTHON:-python3}
DEADLINE=$((SECONDS + ${LIMIT:-530}))
BUILD_SECONDS=${BUILD_SECONDS:-390}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$RESULTS"
RESULTS=$(cd "$RESULTS" && pwd)
find "$RESULTS" -maxdepth 1 \( -name '*.log' -o -name '*.json' -o -name summary.txt \) ! -name nccl.json -delete
source scripts/carried.sh
PATH="$WORK/site/bin:$(dirname "$(command -v "$PYTHON")"):$PATH" # ninja is there: without it sources compile in turn

left() { local seconds=$((DEADLINE - SECONDS)); echo $((seconds > 1 ? seconds : 1)); }
# within SECONDS LOG COMMAND...: run a command with a time limit, and never past the deadline. It is interrupted as by
# Ctrl-C, so that it says where it was, and pytest what had failed.
within() {
    local seconds=$1 log=$2
    shift 2
    timeout --signal=INT --kill-after=5 "$((seconds < $(left) ? seconds : $(left)))" "$@" >"$RESULTS/$log" 2>&1
}

"$PYTHON" - <<'EOF' || exit 2
import os
import sys
import torch
if not torch.cuda.is_available() and not os.environ.get("REHEARSE"):
    sys.exit("gpu_check: PyTorch sees no CUDA device here; without one, `pytest tests/ops` checks the kernels")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "a rehearsal without a GPU"
print(f"{gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}")
EOF

use_carried

# Their setup.py names every architecture there is; a compiler in front of theirs forgets all but this GPU's.
one_architecture() {
    local cuda arch
    cuda=$(dirname "$(dirname "$(readlink -f "$NVCC")")")
    arch=$("$PYTHON" -c 'from torch import cuda; print("%d%d" % cuda.get_device_capability())' 2>/dev/null || echo 90)
    mkdir -p "$WORK/cuda/bin"
    ln -s "$cuda"/* "$WORK/cuda/" 2>/dev/null
    ln -s "$cuda"/bin/* "$WORK/cuda/bin/" 2>/dev/null
    rm -f "$WORK/cuda/bin/nvcc"
    cat >"$WORK/cuda/bin/nvcc" <<EOF
#!/usr/bin/env bash
kept=()
while [ \$# -gt 0 ]; do
    case "\$1" in
        -gencode) shift ;;
        -gencode=* | --generate-code=*) ;;
        *) kept+=("\$1") ;;
    esac
    shift
done
exec "$cuda/bin/nvcc" -gencode "arch=compute_$arch,code=sm_$arch" "\${kept[@]}"
EOF
    chmod +x "$WORK/cuda/bin/nvcc"
    # Some toolkits are a compiler alone; PyTorch's own packages bring headers and the runtime. They are searched last.
    local torch_cuda
    torch_cuda=$("$PYTHON" -c 'import nvidia, pathlib
print(next(f.parents[1] for p in nvidia.__path__ for f in pathlib.Path(p).glob("cu*/include/cuda_runtime_api.h")))')
    if [ -n "$torch_cuda" ]; then
        mkdir -p "$WORK/lib"
        ln -s "$torch_cuda"/lib/libcudart.so.* "$WORK/lib/libcudart.so"
        export CPATH="${CPATH:+$CPATH:}$torch_cuda/include" LIBRARY_PATH="${LIBRARY_PATH:+$LIBRARY_PATH:}$WORK/lib"
    fi
}

build_peers() {
    one_architecture
    MAX_JOBS=$(nproc)
    export CUDA_HOME="$WORK/cuda" PATH="$WORK/cuda/bin:$PATH" MAX_JOBS
    export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE
    local pids=() failed=0
    for source in "$CARRIED"/causal[_-]conv1d*.tar.gz "$CARRIED"/mamba[_-]ssm*.tar.gz; do
        [ -e "$source" ] && { pip --no-build-isolation "$source" & pids+=($!); }
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    echo "took $SECONDS s"
    return $failed
}

BUILDER=
NVCC=$(compgen -G "${CUDA_HOME:-none}/bin/nvcc" || command -v nvcc || compgen -G /usr/local/cuda/bin/nvcc)
if [ -n "$CARRIED" ] && compgen -G "$CARRIED/*.tar.gz" >/dev/null; then
    if [ -n "$NVCC" ]; then
        export -f build_peers one_architecture pip
        export WORK CARRIED PYTHON NVCC PATH
        timeout --kill-after=5 "$BUILD_SECONDS" nice bash -c build_peers >"$RESULTS/build.log" 2>&1 &
        BUILDER=$!
    else
        echo "no nvcc here, so mamba-ssm and causal-conv1d cannot be built" | tee "$RESULTS/build.log"
    fi
fi

# While they are built, the GPU is free for everything that is not timed. What the other tests' configuration asks for
# need not be here: pytest's plugins, hypothesis.
TEST=("$PYTHON" -m pytest tests/gpu -v -rs --tb=short --durations=5 -o addopts= -p no:cacheprovider --confcutdir=tests/gpu)
"$PYTHON" -c 'import xdist' 2>/dev/null && TEST+=(-n 8) # most of their time is compilation
within 200 tests.log "${TEST[@]}"
TESTS=$?
tail -25 "$RESULTS/tests.log"

# Of the builds one source alone still compiles by now, on one core. The step has done with fitting before it counts.
STEP=()
[ -z "${REHEARSE:-}" ] || STEP=(tiny --beside tiny --length 128 --sequences 2 --repeats 2)
within "$(($(left) - 130))" step.log "$PYTHON" -m benchmarks.gpu_step "${STEP[@]}" --json "$RESULTS/gpu_step.json"

[ -z "$BUILDER" ] || wait "$BUILDER"
PEERS=
for package in mamba_ssm causal_conv1d; do
    "$PYTHON" -c "import $package" >>"$RESULTS/build.log" 2>&1 && PEERS+="$package "
done
if [ -n "$PEERS" ]; then
    within 45 peers.log "${TEST[@]}" -k installed
    PEER_TESTS=$?
    tail -3 "$RESULTS/peers.log"
    [ "$TESTS" != 0 ] || TESTS=$PEER_TESTS
fi
if [ -z "${REHEARSE:-}" ]; then
    within "$(left)" kernels.log "$PYTHON" -m benchmarks.gpu_kernels --json "$RESULTS/gpu_kernels.json"
fi
GENERATION=()
[ -z "${REHEARSE:-}" ] || GENERATION=(tiny --rows 1 2 --prompt 16 --repeats 2)
if [ "$(left)" -ge 30 ]; then
    within 60 generation.log "$PYTHON" -m benchmarks.gpu_generation "${GENERATION[@]}" --json "$RESULTS/gpu_generation.json"
fi
[ "$(left)" -lt 40 ] || within 60 loop.log "$PYTHON" -m benchmarks.train_step tiny training.precision=bf16
STEP=(blackmamba_340m_1.5b --beside blackmamba_340m_1.5b+kernels.linear=fp8)
[ -z "${REHEARSE:-}" ] || STEP=(tiny --beside tiny+kernels.linear=fp8 --length 128 --sequences 2 --repeats 2)
if [ "$(left)" -ge 40 ]; then
    within "$(left)" fp8.log "$PYTHON" -m benchmarks.gpu_step "${STEP[@]}" --json "$RESULTS/gpu_step_fp8.json"
fi
if [ -z "${REHEARSE:-}" ] && [ "$(left)" -ge 60 ]; then
    within "$(left)" nccl.log "$PYTHON" -m tests.gpu.nccl_layouts --results "$RESULTS/nccl.json" --seconds "$(($(left) - 10))"
fi

{
    echo "tests: exit code $TESTS ($(grep -E '[0-9]+ (passed|failed|skipped)' "$RESULTS/tests.log" | tail -1))"
    echo "peers: ${PEERS:-none}"
    [ ! -e "$RESULTS/build.log" ] || grep -iE 'error|took' "$RESULTS/build.log" | tail -3
    for log in kernels step generation loop fp8 nccl; do
        [ ! -e "$RESULTS/$log.log" ] || { printf '\n%s:\n' "$log"; tail -60 "$RESULTS/$log.log"; }
    done
    echo "took $SECONDS s"
} | tee "$RESULTS/summary.txt"
exit "$TESTS"
