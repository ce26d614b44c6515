#!/usr/bin/env bash
# Test and measure the GPU kernels on this machine, in one call of under 9 minutes.
#
#   scripts/gpu_check.sh [CARRIED] [RESULTS]
#
# Needs Python with PyTorch and Triton, pytest, one NVIDIA GPU; no network. CARRIED is a folder with what the machine
# lacks: wheels (megatron-core, pydantic-settings, ...), and the source archives of mamba-ssm and causal-conv1d, which are
# built for this GPU alone, beside the tests, to be measured against. RESULTS (default gpu_results) receives the logs, the
# benchmark's JSON and summary.txt. Exit code: that of the tests.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
CARRIED=${1:-}
RESULTS=${2:-gpu_results}
PYTHON=${PYTHON:-python3}
DEADLINE=$((SECONDS + 530))
BUILD_SECONDS=${BUILD_SECONDS:-330}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$RESULTS"
RESULTS=$(cd "$RESULTS" && pwd)
export PYTHONPATH="$WORK/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

left() { local seconds=$((DEADLINE - SECONDS)); echo $((seconds > 1 ? seconds : 1)); }
within() { local seconds=$1 log=$2; shift 2; timeout --kill-after=5 "$seconds" "$@" >"$RESULTS/$log" 2>&1; }
pip() { "$PYTHON" -m pip --disable-pip-version-check --quiet install --no-index --no-deps --target "$WORK/site" "$@"; }

"$PYTHON" - <<'EOF' || exit 2
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("gpu_check: PyTorch sees no CUDA device here; without one, `pytest tests/ops` checks the kernels")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
EOF

if [ -n "$CARRIED" ]; then
    compgen -G "$CARRIED/*.whl" >/dev/null && { pip "$CARRIED"/*.whl || exit 2; }
fi

# Their setup.py names every architecture there is; a compiler in front of theirs forgets all but this GPU's.
one_architecture() {
    local cuda arch
    cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    arch=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
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
}

build_peers() {
    one_architecture
    MAX_JOBS=$(nproc)
    export CUDA_HOME="$WORK/cuda" PATH="$WORK/cuda/bin:$PATH" MAX_JOBS NVCC_THREADS=1
    export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE
    local pids=()
    for source in "$CARRIED"/causal[_-]conv1d*.tar.gz "$CARRIED"/mamba[_-]ssm*.tar.gz; do
        [ -e "$source" ] && { pip --no-build-isolation "$source" & pids+=($!); }
    done
    local failed=0
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    return $failed
}

BUILDER=
if [ -n "$CARRIED" ] && compgen -G "$CARRIED/*.tar.gz" >/dev/null; then
    if command -v nvcc >/dev/null; then
        export -f build_peers one_architecture pip
        export WORK CARRIED PYTHON
        timeout --kill-after=5 "$BUILD_SECONDS" bash -c build_peers >"$RESULTS/build.log" 2>&1 &
        BUILDER=$!
    else
        echo "peers: no nvcc here, so mamba-ssm and causal-conv1d cannot be built" | tee "$RESULTS/build.log"
    fi
fi

# While they are built, the GPU is free for everything that is not timed.
within 300 tests.log "$PYTHON" -m pytest tests/gpu -q -rs --durations=5 -p no:cacheprovider
TESTS=$?
tail -25 "$RESULTS/tests.log"

PEERS="none carried"
if [ -n "$BUILDER" ] && ! wait "$BUILDER"; then
    PEERS="not built: $(grep -m1 -iE 'error' "$RESULTS/build.log" || tail -1 "$RESULTS/build.log")"
elif [ -n "$BUILDER" ]; then
    PEERS="built"
    within 60 peers.log "$PYTHON" -m pytest tests/gpu -q -rs -k "installed" -p no:cacheprovider
    PEER_TESTS=$?
    tail -3 "$RESULTS/peers.log"
    [ "$TESTS" != 0 ] || TESTS=$PEER_TESTS
fi

within "$(left)" kernels.log "$PYTHON" -m benchmarks.gpu_kernels --json "$RESULTS/gpu_kernels.json"
KERNELS=$?
if "$PYTHON" -c 'import megatron.core' 2>/dev/null && [ "$(left)" -gt 45 ]; then
    within "$(left)" train_step.log "$PYTHON" -m benchmarks.train_step tiny training.precision=bf16 --repeats 10
fi

{
    echo "tests: exit code $TESTS ($(grep -E '[0-9]+ (passed|failed|skipped)' "$RESULTS/tests.log" | tail -1))"
    echo "peers: $PEERS"
    echo "kernels: exit code $KERNELS"
    cat "$RESULTS/kernels.log"
    [ -e "$RESULTS/train_step.log" ] && { echo "training step:"; tail -15 "$RESULTS/train_step.log"; }
    echo "took $SECONDS s"
} | tee "$RESULTS/summary.txt"
exit "$TESTS"
