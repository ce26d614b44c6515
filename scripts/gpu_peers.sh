#!/usr/bin/env bash
# Build mamba-ssm and causal-conv1d for this machine's GPU from the archives in a folder that gpu_carry.sh made.
#
#   scripts/gpu_peers.sh CARRIED
#
# gpu_check.sh calls it, with PYTHON and WORK set: the packages go to WORK/site. Exit code 1 if one was not built.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
: "${WORK:?gpu_check.sh sets WORK}" "${PYTHON:=python3}"
CARRIED=$(cd "${1:?gpu_peers.sh CARRIED}" && pwd) || exit 2
source scripts/carried.sh
PATH="$WORK/site/bin:$(dirname "$(command -v "$PYTHON")"):$PATH" # ninja is there: without it sources compile in turn
NVCC=$(compgen -G "${CUDA_HOME:-none}/bin/nvcc" || command -v nvcc || compgen -G /usr/local/cuda/bin/nvcc)
[ -n "$NVCC" ] || { echo "no nvcc here, so mamba-ssm and causal-conv1d cannot be built"; exit 1; }

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

one_architecture
MAX_JOBS=$(nproc)
export CUDA_HOME="$WORK/cuda" PATH="$WORK/cuda/bin:$PATH" MAX_JOBS
export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE
pids=() failed=0
for source in "$CARRIED"/causal[_-]conv1d*.tar.gz "$CARRIED"/mamba[_-]ssm*.tar.gz; do
    [ -e "$source" ] && { pip --no-build-isolation "$source" & pids+=($!); }
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
echo "took $SECONDS s"
exit $failed
