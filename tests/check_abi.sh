#!/usr/bin/env bash
# The shared library as a linker sees it: what it needs, what it exports, how large it is; and the public header
# on its own, in the languages that may include it. usage: tests/check_abi.sh BUILD_DIR
cd "$(dirname "$0")/.." || exit 1
build=$1
. tests/checks.bash
lib=$build/libwick.so

sanitized() { grep -q '^WICK_SANITIZE:[A-Z]*=.' "$build/CMakeCache.txt" 2>/dev/null; }

needs_only_libc_and_libm() {
    local extra
    extra=$(readelf -d "$lib" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vxE 'lib(c|m)\.so\.6|ld-linux.*')
    [ -z "$extra" ] || { echo "also needs $extra"; return 1; }
}

exports_only_wk() {
    local extra
    extra=$(nm -D --defined-only "$lib" | awk '{print $NF}' | grep -vE '^wk_[a-z0-9_]*(@@WICK_0)?$|^WICK_0(@@WICK_0)?$')
    [ -z "$extra" ] || { echo "also exports $extra"; return 1; }
}

has_soname() { readelf -d "$lib" | grep -q 'SONAME.*\[libwick\.so\.0\]'; }

# Code and data without debug information; 6 MB is the bound.
is_small() {
    local bytes
    bytes=$(size "$lib" | awk 'NR == 2 {print $1 + $2}')
    [ "$bytes" -le 6000000 ] || { echo "$bytes bytes"; return 1; }
}

has_no_text_relocations() { ! readelf -d "$lib" | grep -q TEXTREL; }

# Every function that the public header declares is there; those it defines inline need not be.
declared_is_exported() {
    local text inline missing call='\bwk_[a-z0-9_]+ *\('
    text=$(echo '#include <wick.h>' | "${CC:-cc}" -E -P -Iinclude -I"$build/gen" -x c - |
        tr '\n' ' ' | tr ';' '\n' | grep -v typedef)
    inline=$(grep -oE "static (__)?inline(__)? [^;{(]*$call" <<<"$text" | grep -oE "$call\$" | tr -d ' (')
    missing=$(comm -23 \
        <(grep -oE "$call" <<<"$text" | tr -d ' (' | grep -vxF "${inline:-none}" | sort -u) \
        <(nm -D --defined-only "$lib" | awk '{sub(/@.*/, "", $NF); print $NF}' | sort -u))
    [ -z "$missing" ] || { echo "declared and not exported:" $missing; return 1; }
}

header_alone() {
    local compiler=$1
    shift
    echo '#include <wick.h>' | "$compiler" "$@" -Wall -Wextra -Werror -fsyntax-only -Iinclude -I"$build/gen" -
}

if sanitized; then
    skip abi.libraries 'a sanitized build'
else
    check abi.needs_only_libc_and_libm needs_only_libc_and_libm
    check abi.is_small is_small
fi
check abi.exports_only_wk exports_only_wk
check abi.has_soname has_soname
check abi.has_no_text_relocations has_no_text_relocations
if [ -e include/wick.h ]; then
    check abi.declared_is_exported declared_is_exported
    check abi.header_c11 header_alone "${CC:-cc}" -x c -std=c11
    if command -v "${CXX:-c++}" >/dev/null; then
        check abi.header_cxx header_alone "${CXX:-c++}" -x c++ -std=c++17
    else
        skip abi.header_cxx 'no C++ compiler'
    fi
fi
finish
