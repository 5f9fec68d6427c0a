#!/bin/sh
# Builds the fuzz targets and runs each for a bounded time:
#
#     fuzz/run.sh [SECONDS_PER_TARGET] [TARGET...]
#
# Stable Rust and a C++ compiler are enough: coverage comes from LLVM's pass, which needs no nightly
# flag, and out-of-range reads from guard pages instead of a sanitizer. Everything goes to
# target/fuzz; inputs that fail are in target/fuzz/artifacts. With a nightly toolchain,
# `cargo fuzz run TARGET` works here as well.
#
# SWITCHYARD_FUZZ_SEED fixes the mutations. They then begin from the seeds alone, and go as far as the time allows.
# Without it every run tries other mutations, and continues from the last run's corpus.
set -eu

cd "$(dirname "$0")"
seconds=${1:-13}
[ $# -gt 0 ] && shift
targets=${*:-dispatch_frame response_frame hello handshake detail transport checkpoint floats}
out=$(cd .. && pwd)/target/fuzz

if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        apt-get install -y -q --no-install-recommends g++ >/dev/null
    else
        echo "fuzz/run.sh: no C++ compiler, which libFuzzer needs; install g++ or set CXX" >&2
        exit 2
    fi
fi

# --target keeps the instrumentation away from build scripts and procedural macros.
mkdir -p "$out"
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module \
-Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares \
-Ccodegen-units=1" \
CARGO_TARGET_DIR="$out" \
    cargo build --release --locked --quiet --jobs "${SWITCHYARD_FUZZ_JOBS:-2}" --target "$host"
bin="$out/$host/release"

SWITCHYARD_FUZZ_SEEDS="$out/seeds" "$bin/seeds" >/dev/null 2>"$out/seeds.log" || {
    cat "$out/seeds.log" >&2
    exit 1
}
run() {
    target=$1
    [ -z "${SWITCHYARD_FUZZ_SEED:-}" ] || rm -rf "$out/corpus/$target"
    mkdir -p "$out/corpus/$target" "$out/artifacts/$target"
    log="$out/$target.log"
    if ! timeout $((seconds + 60)) "$bin/$target" "$out/corpus/$target" "$out/seeds/$target" \
        -seed="${SWITCHYARD_FUZZ_SEED:-0}" -max_total_time="$seconds" -max_len=32768 -timeout=5 \
        -rss_limit_mb=2048 -artifact_prefix="$out/artifacts/$target/" -print_final_stats=1 >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "fuzz: $target FAILED; the input is in target/fuzz/artifacts/$target" >&2
        return 1
    fi
    echo "fuzz: $target for $seconds s: $(grep -E 'DONE' "$log" | tail -n 1)"
}

# As many at a time as there are jobs. All of them end before a failure counts.
failed=0
set -- $targets
while [ $# -gt 0 ]; do
    pids=
    num=0
    while [ $# -gt 0 ] && [ "$num" -lt "${SWITCHYARD_FUZZ_JOBS:-2}" ]; do
        run "$1" &
        pids="$pids $!"
        num=$((num + 1))
        shift
    done
    for pid in $pids; do
        wait "$pid" || failed=1
    done
done
exit "$failed"
