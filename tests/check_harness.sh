#!/usr/bin/env bash
# The harness against tests whose outcomes are known. usage: tests/check_harness.sh BUILD_DIR
cd "$(dirname "$0")/.." || exit 1
. tests/checks.bash
prog=$1/harness-selftest
unset WICK_REQUIRE_CUDA WICK_TEST_SEED
export WICK_TEST_TIMEOUT=2

# says STATUS PATTERN [program options]: the status, and a line that matches the pattern, whole.
says() {
    local want=$1 pattern=$2 out status
    shift 2
    out=$("$prog" "$@" 2>/dev/null)
    status=$?
    [ "$status" = "$want" ] || { echo "status $status, not $want"; return 1; }
    grep -qxE "$pattern" <<<"$out" || { echo "no line $pattern in:"; echo "$out"; return 1; }
}

closes_with() {
    local want=$1 line
    shift
    line=$("$prog" "$@" 2>/dev/null | tail -n 1)
    [ "$line" = "$want" ] || { echo "closing line: $line"; return 1; }
}

repeats_by_seed() {
    local a b c
    a=$(WICK_TEST_SEED=7 "$prog" --filter seeded | grep ': number')
    b=$(WICK_TEST_SEED=7 "$prog" --filter seeded --filter good | grep ': number')
    c=$("$prog" --filter seeded | grep ': number')
    [ -n "$a" ] && [ "$a" = "$b" ] && [ "$a" != "$c" ]
}

# Of tests that run side by side: each one's output in one piece, in order, and the same totals.
side_by_side() {
    local got want
    got=$("$prog" --fork --jobs 3 --verbose --filter prints --filter good.passes 2>&1 | sed 's/ (.*//')
    want=$(echo passed good.passes; for t in slow one two three; do
        for i in 0 1 2; do echo "$t $i"; echo "$t $i, aside"; done; echo "passed prints.$t"; done
        echo 5 passed, 0 failed)
    [ "$got" = "$want" ] || { echo "$got"; return 1; }
}

# Three waits of 0.3 s or more, and one of 0.6 s, take little more than the longest.
takes_less() {
    local start end
    start=$(date +%s%N)
    "$prog" --fork --jobs 4 --filter prints >/dev/null 2>&1 || return 1
    end=$(date +%s%N)
    [ $(((end - start) / 1000000)) -lt 1200 ]
}

at='  tests/selftest/outcomes\.c:[0-9]+: '
check harness.pass says 0 '2 passed, 0 failed' --filter good
check harness.check says 1 "${at}CHECK\(1 \+ 1 == 3\)" --filter bad.check
check harness.eq_i says 1 "${at}CHECK_EQ_I\(40 \+ 1, 42\): 41 is not 42" --filter bad.check_eq_i
check harness.near says 1 "${at}CHECK_NEAR.*: 1 and 1\.5 differ by 0\.5, more than 0\.25" --filter bad.check_near
check harness.near_nan closes_with '0 passed, 1 failed' --filter bad.check_near_nan
check harness.str says 1 "${at}CHECK_STR.*\"left\" is not \"\(null\)\"" --filter bad.check_str
check harness.mem says 1 "${at}CHECK_MEM.*byte 2 of 4 is 0x63, not 0x78" --filter bad.check_mem
check harness.near_f32 says 1 "${at}CHECK_NEAR_F32.*: 2 of 3 differ, worst \[2\]: 3 is not nan .*" \
    --filter bad.check_near_f32
check harness.require says 1 "${at}REQUIRE\(0\)" --filter bad.require
check harness.require_returns closes_with '0 passed, 1 failed' --filter bad.require
check harness.many says 1 '  92 more failures' --filter bad.many
check harness.skip says 3 '  no device here' --filter skips
check harness.skip_line closes_with '2 passed, 0 failed, 1 skipped' --filter skips --filter good
check harness.skip_required env WICK_REQUIRE_CUDA=1 bash -c "! '$prog' --filter skips"
check harness.none says 3 '0 passed, 0 failed' --filter no.such.test
check harness.usage says 2 '' --no-such-option
check harness.list says 0 'dies\.segv' --list
check harness.json says 1 '\{"test": "bad\.check_str", .*"outcome": "failed", .*\\"left\\".*\}' --json --filter bad
check harness.seed repeats_by_seed

check harness.segv says 1 'failed dies\.segv .*' --fork --filter dies.segv
check harness.segv_place says 1 "${at}(killed by signal 11|exited with status [1-9]).*" --fork --filter dies.segv
check harness.abort says 1 "${at}killed by signal 6 .*" --fork --filter dies.aborts
check harness.exit says 1 "${at}exited with status 0 .*" --fork --filter dies.exits
check harness.hang says 1 "${at}ran past 2 s .*" --fork --filter dies.hangs
check harness.goes_on closes_with '1 passed, 4 failed' --fork --filter dies --filter last
check harness.jobs side_by_side
check harness.jobs_time takes_less
check harness.jobs_go_on closes_with '1 passed, 4 failed' --fork --jobs 4 --filter dies --filter last
check harness.jobs_hang says 1 "${at}ran past 2 s .*" --fork --jobs 2 --filter dies
check harness.jobs_number says 2 '' --jobs 0
if grep -q '^WICK_SANITIZE:[A-Z]*=.' "$1/CMakeCache.txt"; then
    skip harness.no_fork 'a sanitized build'
else
    check harness.no_fork says 1 'failed dies\.segv .*' --no-fork --filter good --filter dies.segv
    check harness.no_fork_line closes_with '2 passed, 1 failed' --no-fork --filter good --filter dies.segv
fi
finish
