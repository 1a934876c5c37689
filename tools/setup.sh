#!/usr/bin/env bash
# Installs the Debian packages that building Wick needs and that are missing; with --dev also those for lint,
# sanitizers and analysis. Does nothing, at once, where nothing is missing.
set -u

# A package and what shows that it is there: a command, or a path, a * in it standing for the architecture.
needs=(
    'gcc gcc'
    'libc6-dev /usr/include/stdio.h'
    'cmake cmake'
    'ninja-build ninja'
    'make make'
    'zlib1g-dev /usr/include/zlib.h'
    'libjansson-dev /usr/include/jansson.h'
    'dataset-fashion-mnist /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz'
)
dev_needs=(
    'git git'
    'clang clang'
    'clang-format clang-format'
    'clang-tidy clang-tidy'
    'libclang-rt-14-dev /usr/lib/llvm-14/lib/clang/*/lib/linux'
    'valgrind valgrind'
)
case "${1:-}" in
'') ;;
--dev) needs+=("${dev_needs[@]}") ;;
*)
    echo "usage: tools/setup.sh [--dev]" >&2
    exit 2
    ;;
esac

present() {
    case $1 in
    /*) compgen -G "$1" >/dev/null ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

find_missing() {
    missing=()
    local need
    for need in "${needs[@]}"; do
        present "${need#* }" || missing+=("${need%% *}")
    done
}

find_missing
[ ${#missing[@]} = 0 ] && exit 0

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo -n)
    # A terminal can be asked for the password.
    [ -t 0 ] && as_root=(sudo)
fi
command="apt-get install -y --no-install-recommends ${missing[*]}"
explain() {
    echo "Wick needs these packages: ${missing[*]}" >&2
    echo "$1" >&2
    echo "As root: $command" >&2
    exit 1
}
command -v apt-get >/dev/null || explain 'There is no apt-get here to install them; on other systems the names differ.'
if [ ${#as_root[@]} != 0 ] && ! { command -v sudo >/dev/null && "${as_root[@]}" true 2>/dev/null; }; then
    explain 'Installing them takes root, and sudo is not available.'
fi

echo "Installing ${missing[*]}"
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1; }
install() { apt install -y --no-install-recommends "${missing[@]}"; }
install || { apt update && install; } || {
    tail -n 20 "$log" >&2
    explain 'apt-get could not install them (its last lines are above).'
}
find_missing
[ ${#missing[@]} = 0 ] || explain 'apt-get reported success, yet they are not where they are looked for.'
