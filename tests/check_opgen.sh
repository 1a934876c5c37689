#!/usr/bin/env bash
# The op table's generator: bad rows end with FILE:LINE and what is wrong, good ones give the same text twice.
# usage: tests/check_opgen.sh BUILD_DIR
cd "$(dirname "$0")/.." || exit 1
build=$1
. tests/checks.bash
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

# refuses LINE MESSAGE ROW: ROW (with \n between lines) must be refused at LINE with MESSAGE.
refuses() {
    local out
    printf '%b\n' "$3" >"$dir/bad.def"
    if out=$("$build/opgen" "$dir/bad.def" "$dir/out" 2>&1); then
        echo "accepted"
        return 1
    fi
    case $out in
    *"bad.def:$1: "*"$2"*) ;;
    *) echo "$out"; return 1 ;;
    esac
}

repeats() {
    "$build/opgen" src/ops/ops.def "$dir/a" && "$build/opgen" src/ops/ops.def "$dir/b" && diff -r "$dir/a" "$dir/b" &&
        diff "$dir/a/ops_gen.c" "$build/gen/ops_gen.c"
}

ew='op x\nclass EW\ndoc d\nin a\n'
check opgen.repeats repeats
check opgen.key_before_op refuses 1 "before the first op" 'doc d'
check opgen.unknown_key refuses 5 "unknown key 'frob'" "${ew}frob y"
check opgen.class refuses 1 "class 'QX' is not known" 'op x\nclass QX\ndoc d'
check opgen.doc_missing refuses 1 "has no doc" 'op x\nclass EW\nin a\nloop y = a'
check opgen.infer_missing refuses 1 "'infer' is missing" 'op x\nclass OPAQUE\ndoc d\nin a'
check opgen.loop_missing refuses 1 "needs a loop" 'op x\nclass ROW\ndoc d\nin a\ninfer f\nreduce LAST'
check opgen.twice refuses 6 "op x twice" "${ew}loop y = a\nop x"
check opgen.flag refuses 5 "flag 'FAST'" "${ew}flags FAST"
check opgen.attr_type refuses 5 "attribute type 'FLOAT'" "${ew}attr v FLOAT"
check opgen.loop_syntax refuses 5 "ends too early" "${ew}loop y = a +"
check opgen.loop_paren refuses 5 "')' expected" "${ew}loop y = (a + 1"
check opgen.loop_primitive refuses 5 "'foo' is no primitive" "${ew}loop y = foo(a)"
check opgen.loop_arity refuses 5 "'add' takes 2 operands, not 1" "${ew}loop y = add(a)"
check opgen.loop_name refuses 5 "'b' is neither" "${ew}loop y = b"
check opgen.loop_structural refuses 6 "is structural" "${ew}attr n INT\nloop y = a + n"
check opgen.loop_types refuses 5 "a float and an integer" "${ew}loop y = a + index(0)"
check opgen.loop_integer refuses 5 "1.5 is no 32-bit integer" "${ew}loop y = i2f(index(0) + 1.5)"
check opgen.loop_output refuses 5 "stores 0 of 1 outputs" "${ew}loop z = a"
check opgen.loop_twice refuses 6 "stored twice" "${ew}loop y = a\nloop y = a"
check opgen.loop_input refuses 5 "'a' is not written" "${ew}loop a = a + 1"
check opgen.loop_row refuses 7 "same for the whole row" \
    'op x\nclass ROW\ndoc d\nin a\nreduce LAST\ninfer f\nloop y = rsum(rsum(a))'
check opgen.vjp_input refuses 6 "'b' is no input" "${ew}loop y = a\nvjp b = g"
check opgen.vjp_op refuses 6 "'q' is no op" "${ew}loop y = a\nvjp a = q(g)"
check opgen.vjp_arity refuses 6 "takes 1 arguments, not 2" "${ew}loop y = a\nvjp a = x(g, g)"
check opgen.vjp_kind refuses 6 "must be a tensor" "${ew}loop y = a\nvjp a = x(1)"
check opgen.vjp_diff refuses 1 "needs 'diff'" "${ew}loop y = a\nvjp f"
check opgen.public_count refuses 6 "gives 1 values for 0 attributes" "${ew}loop y = a\npublic wk_x(k INT) = k"
finish
