#!/usr/bin/env bash
# Runs every test of a build and ends with one line, the sum of all of them: N passed, N failed[, N skipped].
# usage: tests/run.sh BUILD_DIR [options of the test programs, such as --filter cuda or --quick]
# As many tests at a time as there are processors; the option --jobs N says otherwise.
# With --filter only the test programs run, not the check_*.sh scripts.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${1:?usage: tests/run.sh BUILD_DIR [options]}
shift
export WICK_TEST_DIR=$PWD/tests
passed=0 failed=0 skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

# Runs one command, shows its output but for the closing line, and adds that line up.
add() {
    local name=$1 status line
    shift
    "$@" 2>&1 | tee "$log" | sed -E '/^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$/d'
    status=${PIPESTATUS[0]}
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -n 1)
    if [ -z "$line" ]; then
        echo "$name: ended with status $status and no closing line"
        failed=$((failed + 1))
        return
    fi
    echo "$name: $line"
    set -- ${line//[!0-9]/ }
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + ${3:-0}))
    # Status 3 says that no test ran, which is for the sum to judge.
    if [ "$status" != 0 ] && [ "$status" != 3 ] && [ "$2" = 0 ]; then
        echo "$name: ended with status $status though no test failed"
        failed=$((failed + 1))
    fi
}

set -- --jobs "$(nproc)" "$@"
add wick-tests "$build/wick-tests" "$@"
add wick-api-tests "$build/wick-api-tests" "$@"
case " $* " in
*" --filter "*) ;;
*)
    for script in tests/check_*.sh; do
        add "$(basename "$script" .sh)" bash "$script" "$build"
    done
    ;;
esac

line="$passed passed, $failed failed"
[ "$skipped" = 0 ] || line="$line, $skipped skipped"
echo "$line"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
