# What the check_*.sh scripts share: each check is one command that must succeed; finish prints the closing line.
checks_passed=0 checks_failed=0 checks_skipped=0

# check NAME COMMAND...: the command's output is shown where it fails.
check() {
    local name=$1 out
    shift
    if out=$("$@" 2>&1); then
        checks_passed=$((checks_passed + 1))
    else
        checks_failed=$((checks_failed + 1))
        echo "failed $name"
        [ -z "$out" ] || printf '%s\n' "$out" | sed 's/^/  /'
    fi
}

# skip NAME REASON
skip() {
    checks_skipped=$((checks_skipped + 1))
    echo "skipped $1"
    echo "  $2"
}

finish() {
    local line="$checks_passed passed, $checks_failed failed"
    [ "$checks_skipped" = 0 ] || line="$line, $checks_skipped skipped"
    echo "$line"
    [ "$checks_failed" = 0 ]
    exit
}
