#!/usr/bin/env bash
# Compares the declarations of CUDA that the library is built on with CUDA's own headers, where these are
# installed. WICK_CUDA_INCLUDE names another directory. usage: tests/check_cuda_decl.sh BUILD_DIR
cd "$(dirname "$0")/.." || exit 1
. tests/checks.bash

found=
for dir in ${WICK_CUDA_INCLUDE:+"$WICK_CUDA_INCLUDE"} /usr/local/cuda/include /opt/cuda/include /usr/include; do
    # crt/ is missing from a runtime-only installation, and the others need it.
    if [ -z "$found" ] && [ -e "$dir/cuda.h" ] && [ -e "$dir/nvrtc.h" ] && [ -e "$dir/cublasLt.h" ] &&
        [ -e "$dir/crt/host_defines.h" ]; then
        found=$dir
    fi
done
if [ -z "$found" ]; then
    skip cuda_decl "no CUDA headers"
else
    check cuda_decl "${CC:-cc}" -std=gnu17 -fsyntax-only -Isrc -isystem "$found" tests/cuda_decl_check.c
fi
finish
