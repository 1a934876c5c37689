#!/bin/sh
# Installs the peers that Wick is measured and checked against (PyTorch, numpy, onnx, onnxruntime, all pinned)
# in a Python virtual environment outside the tree, by plain pip. Nothing that `make` builds or tests needs
# them: they regenerate tests/golden and run bench/peers.
#
#   tools/peers.sh [DIR]     DIR defaults to ${XDG_CACHE_HOME:-$HOME/.cache}/wick/peers
#   WICK_PEERS_CUDA=1        PyTorch with all its CUDA packages (several GB more), for a machine with a GPU
#   PYTHON=python3.11        the interpreter to build the environment from
#
# PyPI's x86-64 PyTorch links the CUDA libraries even for CPU work. Without WICK_PEERS_CUDA only those of them
# are fetched that the loader does not find on this machine.
set -eu

dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/wick/peers}
python=${PYTHON:-python3}
torch=2.11.0
plain="numpy==2.4.6 filelock==3.29.0 typing-extensions==4.16.0 sympy==1.14.0 mpmath==1.3.0 networkx==3.6.1
       jinja2==3.1.6 MarkupSafe==3.0.4 fsspec==2026.3.0
       onnx==1.23.2 onnxruntime==1.32.0 ml_dtypes==0.6.0 protobuf==7.36.2 flatbuffers==25.12.19
       packaging==26.4"

die() { printf 'peers: %s\n' "$*" >&2; exit 1; }

# The package that carries a library, at the version torch 2.11.0's own requirements name.
package_of() {
    case $1 in
    libcudart.so.*) echo nvidia-cuda-runtime==13.0.96 ;;
    libcupti.so.*) echo nvidia-cuda-cupti==13.0.85 ;;
    libcublas.so.* | libcublasLt.so.*) echo nvidia-cublas==13.1.0.3 ;;
    libcufft.so.*) echo nvidia-cufft==12.0.0.61 ;;
    libcufile.so.*) echo nvidia-cufile==1.15.1.6 ;;
    libcurand.so.*) echo nvidia-curand==10.4.0.35 ;;
    libcusparse.so.*) echo nvidia-cusparse==12.6.3.3 ;;
    libnvJitLink.so.*) echo nvidia-nvjitlink==13.0.88 ;;
    libcudnn.so.*) echo nvidia-cudnn-cu13==9.19.0.56 ;;
    libcusparseLt.so.*) echo nvidia-cusparselt-cu13==0.8.0 ;;
    libnccl.so.*) echo nvidia-nccl-cu13==2.28.9 ;;
    libnvshmem_host.so.*) echo nvidia-nvshmem-cu13==3.4.5 ;;
    esac
}

command -v "$python" >/dev/null || die "no $python; install Python 3.11 or newer"
mkdir -p "$dir"
need_mb=8000
[ "${WICK_PEERS_CUDA:-0}" = 1 ] && need_mb=16000
free_mb=$(df -Pm "$dir" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge "$need_mb" ] || die "$dir has $free_mb MB free; $need_mb MB are needed"

start=$(date +%s)
[ -x "$dir/bin/pip" ] || "$python" -m venv "$dir" || die "no virtual environment made (Debian: python3-venv)"
pip() { "$dir/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir "$@"; }

# shellcheck disable=SC2086
pip --no-deps $plain || die "pip could not install the plain packages"
if [ "${WICK_PEERS_CUDA:-0}" = 1 ]; then
    pip "torch==$torch" || die "pip could not install torch $torch with its CUDA packages"
else
    pip --no-deps "torch==$torch" || die "pip could not install torch $torch"
fi
tries=0
until err=$("$dir/bin/python" -c 'import torch' 2>&1); do
    lib=$(printf '%s\n' "$err" | sed -n 's/.*Error: \(lib[^:]*\): cannot open shared.*/\1/p' | tail -n 1)
    pkg=$(package_of "$lib")
    tries=$((tries + 1))
    if [ -z "$pkg" ] || [ $tries -gt 16 ]; then
        die "torch does not import: $(printf '%s\n' "$err" | tail -n 1)"
    fi
    echo "peers: torch needs $lib: installing $pkg"
    pip --no-deps "$pkg" || die "pip could not install $pkg"
done

"$dir/bin/python" - <<'PY' || die "the peers do not import"
import numpy, onnx, onnxruntime, torch
for m in (torch, numpy, onnx, onnxruntime):
    print("peers:", m.__name__, m.__version__)
PY
echo "peers: $(du -sm "$dir" | cut -f 1) MB in $dir, $(($(date +%s) - start)) s; run $dir/bin/python"
