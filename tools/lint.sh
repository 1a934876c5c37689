#!/usr/bin/env bash
# Format, warnings and static analysis; ends with N passed, N failed. usage: tools/lint.sh BUILD_DIR
# BUILD_DIR is a clang build of its own with warnings as errors. clang-tidy looks at the files that changed since
# they last passed there, which in a fresh BUILD_DIR is all of them. JOBS sets the number of processes.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:?usage: tools/lint.sh BUILD_DIR}
jobs=${JOBS:-$(nproc)}
. tests/checks.bash

format() { git ls-files -z '*.c' '*.h' | xargs -0r clang-format --dry-run -Werror; }

warnings() {
    CC=clang cmake -S . -B "$build" -G Ninja -DWICK_WERROR=ON >"$build.log" 2>&1 &&
        cmake --build "$build" -j "$jobs" >>"$build.log" 2>&1
    local status=$?
    [ $status = 0 ] || cat "$build.log"
    rm -f "$build.log"
    return $status
}

# Lists the sources in the build that have no stamp newer than themselves, the headers and the rules.
unchecked() {
    local stamp newest source
    newest=$({ git ls-files '*.h' '*.def' '*.inc' '*.cuh'; echo .clang-tidy; } | xargs ls -t | head -n 1)
    git ls-files '*.c' | while read -r source; do
        grep -qF "/$source\"" "$build/compile_commands.json" || continue
        stamp=$build/tidy/$source.ok
        [ "$stamp" -nt "$source" ] && [ "$stamp" -nt "$newest" ] || echo "$source"
    done
}

tidy_one() {
    clang-tidy --quiet -p "$build" "$1" 2>/dev/null || return 1
    mkdir -p "$build/tidy/$(dirname "$1")" && touch "$build/tidy/$1.ok"
}

tidy() {
    export build
    export -f tidy_one
    unchecked | xargs -r -P "$jobs" -I{} bash -c 'tidy_one {}'
}

check lint.format format
check lint.warnings warnings
check lint.tidy tidy
finish
