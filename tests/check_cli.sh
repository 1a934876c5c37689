#!/usr/bin/env bash
# The command as a shell sees it: exit statuses, messages, output that cannot be written, damaged data files.
# usage: tests/check_cli.sh BUILD_DIR
cd "$(dirname "$0")/.." || exit 1
wick=$1/wick
. tests/checks.bash
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT

# status N COMMAND...: it ends with that status; what it printed is in $dir/out and $dir/err.
status() {
    local want=$1 got
    shift
    "$@" >"$dir/out" 2>"$dir/err"
    got=$?
    [ "$got" = "$want" ] || { echo "status $got, not $want: $*"; cat "$dir/err"; return 1; }
}

# fails_with N TEXT COMMAND...: as status, and stderr says TEXT.
fails_with() {
    local want=$1 text=$2
    shift 2
    status "$want" "$@" || return 1
    grep -qF -- "$text" "$dir/err" || { echo "no '$text' in:"; cat "$dir/err"; return 1; }
}

# An IDX data set of 40 grey images, gzipped, in $1.
make_data() {
    mkdir -p "$1"
    local prefix
    for prefix in train t10k; do
        { printf '\0\0\10\3\0\0\0\50\0\0\0\34\0\0\0\34'; head -c 31360 /dev/zero | tr '\0' '\100'; } |
            gzip >"$1/$prefix-images-idx3-ubyte.gz"
        { printf '\0\0\10\1\0\0\0\50'; head -c 40 /dev/zero | tr '\0' '\3'; } | gzip >"$1/$prefix-labels-idx1-ubyte.gz"
    done
}

train() { "$wick" train --model mlp --epochs 1 --batch 8 --data-dir "$@"; }

helps() {
    local c
    status 0 "$wick" --help && grep -q train "$dir/out" || return 1
    for c in train info ops bench; do
        status 0 "$wick" $c --help && grep -q Usage: "$dir/out" || return 1
    done
}

versions() { status 0 "$wick" --version && grep -qE '^wick [0-9]+\.[0-9]+\.[0-9]+$' "$dir/out"; }

usage_errors() {
    status 2 "$wick" &&
        fails_with 2 "unknown command 'nonsense'" "$wick" nonsense &&
        fails_with 2 "unknown option '--nonsense'" "$wick" --nonsense &&
        fails_with 2 nonsense "$wick" train --nonsense &&
        fails_with 2 "one of cnn, mlp" "$wick" train --model resnet &&
        fails_with 2 "whole number" "$wick" train --epochs 2x &&
        fails_with 2 "whole number" "$wick" train --batch 0 &&
        fails_with 2 "whole number" "$wick" train --seed 99999999999999999999 &&
        fails_with 2 "a number" "$wick" train --lr nan &&
        fails_with 2 "unexpected argument" "$wick" info extra &&
        fails_with 2 "no bench" "$wick" bench nonsense &&
        fails_with 2 "no bench" "$wick" bench overhead.nonsense &&
        fails_with 2 "--list takes no bench" "$wick" bench --list extra &&
        status 2 "$wick" bench
}

trains() {
    status 0 train "$dir/data" --seed 3 || return 1
    tail -n 1 "$dir/out" | grep -qE '^test accuracy: [01]\.[0-9]{4}$' || { cat "$dir/out"; return 1; }
    grep -q $'\r' "$dir/out" && { echo 'a bar where there is no terminal'; return 1; }
    cp "$dir/out" "$dir/first"
    status 0 train "$dir/data" --seed 3 || return 1
    # The same seed repeats the same losses; only times differ.
    diff <(grep -o 'loss [0-9.]*' "$dir/first") <(grep -o 'loss [0-9.]*' "$dir/out")
}

trains_in_every_way() {
    status 0 train "$dir/data" --compile off --threads 1 --limit 9 &&
        status 0 train "$dir/data" --model cnn --compile on &&
        status 0 train "$dir/data" --epochs 0 &&
        status 0 train "$dir/data" --json && grep -q '"test_accuracy":' "$dir/out" && ! grep -v '^{.*}$' "$dir/out"
}

# A loss that JSON cannot say.
diverges() {
    rm -rf "$dir/wild" && cp -r "$dir/data" "$dir/wild" || return 1
    { printf '\0\0\10\1\0\0\0\50'; printf '\0\1\2\3\4\5\6\7%.0s' 1 2 3 4 5; } | gzip >"$dir/wild/train-labels-idx1-ubyte.gz"
    status 0 train "$dir/wild" --lr 1000 --epochs 30 --json && [ ! -s "$dir/err" ] && grep -q '"loss":null,' "$dir/out"
}

plain_files() {
    mkdir -p "$dir/plain" && cp "$dir"/data/*.gz "$dir/plain" && gunzip "$dir"/plain/*.gz && status 0 train "$dir/plain"
}

# damage NAME TEXT COMMAND...: the command changes $file; training then fails and says TEXT.
damage() {
    local file=$dir/bad/train-$1 text=$2
    shift 2
    rm -rf "$dir/bad" && make_data "$dir/bad" || return 1
    export file
    bash -c "$*" && fails_with 1 "$text" train "$dir/bad"
}

bad_data() {
    fails_with 1 "No such file" train "$dir/nowhere" &&
        damage images-idx3-ubyte.gz "ends too early" 'truncate -s -20 $file' &&
        damage images-idx3-ubyte.gz "ends too early" 'truncate -s 0 $file' &&
        damage images-idx3-ubyte.gz "train-images" 'printf XXXX | dd of=$file bs=1 seek=60 conv=notrunc status=none' &&
        damage images-idx3-ubyte.gz "wick: $dir/bad/train-images-idx3-ubyte.gz: incorrect data check" \
            'printf XXXX | dd of=$file bs=1 seek=$(($(stat -c %s $file) - 8)) conv=notrunc status=none' &&
        damage images-idx3-ubyte.gz "train-images" 'rm $file; mkdir $file' &&
        damage images-idx3-ubyte.gz "not an IDX file" 'head -c 4000 /dev/zero | gzip >$file' &&
        damage images-idx3-ubyte.gz "cannot be right" \
            '{ printf "\0\0\10\3\377\377\377\377\377\377\377\377\377\377\377\377"; cat /dev/null; } | gzip >$file' &&
        damage images-idx3-ubyte.gz "longer than" '{ gunzip -c $file; echo; } | gzip >$file.2; mv $file.2 $file' &&
        damage labels-idx1-ubyte.gz "labels" '{ printf "\0\0\10\1\0\0\0\2"; printf "\1\1"; } | gzip >$file' &&
        damage labels-idx1-ubyte.gz "not below 10" \
            '{ printf "\0\0\10\1\0\0\0\50"; head -c 40 /dev/zero | tr "\0" "\12"; } | gzip >$file'
}

# Cut at every third byte: always a message, never a crash.
every_length() {
    local n size
    size=$(stat -c %s "$dir/data/train-labels-idx1-ubyte.gz")
    for ((n = 0; n < size; n += 3)); do
        rm -rf "$dir/bad" && cp -r "$dir/data" "$dir/bad" && truncate -s $n "$dir/bad/train-labels-idx1-ubyte.gz"
        fails_with 1 "train-labels-idx1-ubyte" train "$dir/bad" || return 1
    done
}

unwritable_output() {
    local c
    for c in --help --version info ops 'ops --json' 'bench --list'; do
        fails_with 1 "cannot write" bash -c "exec $wick $c >/dev/full" && fails_with 1 "cannot write" bash -c "exec $wick $c >&-" ||
            return 1
    done
    fails_with 1 "cannot write" bash -c "exec $wick train --model mlp --epochs 1 --data-dir $dir/data >&-" &&
        status 0 bash -c "exec $wick info 2>&- <&-" && bash -c "$wick ops --json | head -n 1" >/dev/null
}

lists() {
    status 0 "$wick" ops && grep -q '^add ' "$dir/out" &&
        status 0 "$wick" ops --json && grep -q '"name":"conv2d"' "$dir/out" && ! grep -v '^{.*}$' "$dir/out" &&
        status 0 "$wick" info && grep -q '^threads ' "$dir/out" &&
        status 0 "$wick" info --json && grep -q '"isa":' "$dir/out"
}

benches() {
    status 0 "$wick" bench --list && grep -q 'overhead.add_4x4' "$dir/out" || return 1
    echo '{"overhead.scope": {"min": 0}}' >"$dir/met"
    echo '{"overhead.scope": {"max": 0}}' >"$dir/missed"
    echo '{"overhead.scope": {}}' >"$dir/empty"
    echo '{"overhead.scope": {"mx": 1}}' >"$dir/kind"
    echo '{"overhead.scope": {"max": "1"}}' >"$dir/text"
    echo '{"overhead.scope": {"max": 1e9}, "overhead.scoop": {"max": 1}}' >"$dir/unknown"
    echo '{"overhead.scope": {"max": 1e9}, "train.nothing": {"max": 1}}' >"$dir/elsewhere"
    echo '{"overhead.scope@cuda": {"max": 1}}' >"$dir/place"
    echo '[' >"$dir/broken"
    status 0 "$wick" bench overhead.scope --json --check "$dir/met" &&
        grep -qF 'bounds: 1 met, 0 missed, 0 skipped' "$dir/err" || return 1
    local field
    for field in bench case value unit peer peer_value ratio threads isa device; do
        grep -q "\"$field\":" "$dir/out" || { echo "no $field in $(cat "$dir/out")"; return 1; }
    done
    fails_with 1 "misses its bound" "$wick" bench overhead.scope --check "$dir/missed" &&
        fails_with 1 "neither max nor min" "$wick" bench overhead.scope --check "$dir/empty" &&
        fails_with 1 "'mx' is not a number named" "$wick" bench overhead.scope --check "$dir/kind" &&
        fails_with 1 "'max' is not a number named" "$wick" bench overhead.scope --check "$dir/text" &&
        fails_with 1 "no case 'overhead.scoop'" "$wick" bench overhead.scope --check "$dir/unknown" &&
        fails_with 1 "no case 'train.nothing'" "$wick" bench overhead.scope --check "$dir/elsewhere" &&
        fails_with 1 "does not run on 'cuda'" "$wick" bench overhead.scope --check "$dir/place" &&
        fails_with 1 "broken:" "$wick" bench overhead.scope --check "$dir/broken" &&
        fails_with 1 "wick: unable to open $dir/nowhere:" "$wick" bench overhead.scope --check "$dir/nowhere"
}

# A ratio counts against the peer of the same run alone; an absent peer is named, and is no pass.
bench_ratios() {
    peer() { echo "{\"bench\": \"overhead\", \"case\": \"add_4x4\", \"value\": $2, \"unit\": \"ns\", \"threads\": $1}"; }
    echo '{"overhead.add_4x4": {"max": 1e9, "min_ratio": 3}}' >"$dir/ratio"
    peer 1 1e12 >"$dir/slow" && peer 1 1e-9 >"$dir/fast" || return 1
    { peer 1000 1e-9; peer 2 1e12; } >"$dir/two"
    local run=("$wick" bench overhead.add_4x4 --check "$dir/ratio")
    status 0 "${run[@]}" && grep -qF 'unproven' "$dir/err" && grep -qF 'bounds: 1 met, 0 missed, 1 skipped' "$dir/err" &&
        status 0 "${run[@]}" --peers "$dir/slow" && grep -qF 'bounds: 2 met, 0 missed, 0 skipped' "$dir/err" &&
        fails_with 1 'the ratio' "${run[@]}" --peers "$dir/fast" && grep -qF 'bounds: 1 met, 1 missed' "$dir/err" &&
        status 0 env WICK_THREADS=2 "${run[@]}" --peers "$dir/two"
}

# The file of bounds that the project keeps names cases that exist, and the demo's are met on the little data set.
bench_demo() {
    status 0 "$wick" bench demo --data-dir "$dir/data" --json --check bench/bounds.json || { cat "$dir/err"; return 1; }
    grep -q '"case":"wall"' "$dir/out" && grep -q '"case":"accuracy"' "$dir/out" &&
        grep -qF 'bounds: 2 met, 0 missed, 0 skipped' "$dir/err" &&
        fails_with 1 'No such file' "$wick" bench demo --data-dir "$dir/nowhere"
}

# Where there is no such device, cases and bounds are skipped by name.
bench_devices() {
    fails_with 2 'takes no --device' "$wick" bench overhead.scope --device cuda || return 1
    echo '{"train.mlp_step_host@cuda": {"max": 1e9}}' >"$dir/cuda"
    status 0 "$wick" bench train.mlp_step_host --check "$dir/cuda" &&
        grep -qF 'another device' "$dir/err" && grep -qF '0 met, 0 missed, 1 skipped' "$dir/err" || return 1
    status 3 env CUDA_VISIBLE_DEVICES= WICK_CUDA_PATH=/nowhere "$wick" bench train.mlp_step_host --device cuda \
        --check "$dir/cuda" || return 1
    grep -qE '^mlp_step_host +skipped: ' "$dir/out" && grep -qF 'its case was skipped' "$dir/err"
}

# Training asks for a device that is not there: its reason, and no line of the command's own source. Nor does gpu-check start.
no_such_device() {
    local none=(env CUDA_VISIBLE_DEVICES= WICK_CUDA_PATH=/nowhere)
    fails_with 1 'wick: --device cuda: ' "${none[@]}" "$wick" train --model mlp --device cuda --data-dir "$dir/data" || return 1
    ! grep -q 'called' "$dir/err" && [ "$(wc -l <"$dir/err")" = 1 ] || { cat "$dir/err"; return 1; }
    fails_with 2 'gpu-check: no CUDA device' "${none[@]}" make -s --no-print-directory gpu-check BUILD="${wick%/wick}" &&
        ! grep -q passed "$dir/out"
}

# What the library writes about kernels, to stderr alone: the one that runs, and why a better one does not.
traces() {
    status 0 env WICK_TRACE=dispatch "$wick" train --model cnn --epochs 1 --batch 8 --compile off --data-dir "$dir/data" &&
        grep -qE '^wick dispatch: conv2d on cpu: [a-z0-9_]+ runs$' "$dir/err" && ! grep -q dispatch "$dir/out" &&
        status 0 env WICK_TRACE=plan,graph "$wick" train --model mlp --epochs 1 --batch 8 --data-dir "$dir/data" &&
        grep -qE '^plan [0-9a-f]+: [0-9]+ steps' "$dir/err" && ! grep -q dispatch "$dir/err" &&
        status 0 train "$dir/data" && [ ! -s "$dir/err" ]
}

bar_on_a_terminal() {
    script -qec "$wick train --model mlp --epochs 2 --batch 4 --data-dir $dir/data" /dev/null >"$dir/out" 2>&1 </dev/null ||
        { cat "$dir/out"; return 1; }
    grep -q '%' "$dir/out" && grep -q $'\r' "$dir/out" && grep -q 'test accuracy' "$dir/out"
}

if [ ! -x "$wick" ]; then
    skip cli 'the command is not built'
    finish
fi
make_data "$dir/data"
check cli.helps helps
check cli.versions versions
check cli.usage_errors usage_errors
check cli.trains trains
check cli.trains_in_every_way trains_in_every_way
check cli.diverges diverges
check cli.plain_files plain_files
check cli.bad_data bad_data
check cli.every_length every_length
check cli.unwritable_output unwritable_output
check cli.lists lists
check cli.benches benches
check cli.no_such_device no_such_device
check cli.traces traces
check cli.bench_ratios bench_ratios
check cli.bench_demo bench_demo
check cli.bench_devices bench_devices
if command -v script >/dev/null; then
    check cli.bar_on_a_terminal bar_on_a_terminal
else
    skip cli.bar_on_a_terminal 'no script command'
fi
finish
