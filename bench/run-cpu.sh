#!/usr/bin/env bash
# Measures everything that one CPU host can show and freezes it in a folder.
#
#   bench/run-cpu.sh bench/runs/2026-01-31-myhost [--quick]
#
# Needs a release build (cargo build --release; cargo build --release -p switchyard-bench-harness
# --example compute_bench). Run it on an otherwise idle host: the load is recorded.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:?give a folder for the results}
seconds=2
[ "${2:-}" = --quick ] && seconds=0.5
bin=target/release/switchyard
compute=target/release/examples/compute_bench
for program in "$bin" "$compute"; do
    [ -x "$program" ] || { echo "$program is missing: build it first (see the head of this script)" >&2; exit 1; }
done
mkdir -p "$out"

machine() {
    echo "date      $(date -u +%Y-%m-%dT%H:%MZ)"
    echo "commit    $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- '*.rs' '*.toml' || echo ' + changes')"
    echo "cpu       $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
    echo "memory    $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
    echo "kernel    $(uname -r)"
    echo "compiler  $(rustc --version)"
    echo "load      $(cut -d' ' -f1-3 /proc/loadavg) before"
}
step() { # name, command…
    local name=$1
    shift
    echo "==> $name: $*"
    echo "$name: $*" >>"$out/commands.txt"
    "$@" >"$out/$name"
}

: >"$out/commands.txt"
machine | tee "$out/machine.txt"
step p2p-1v1.json "$bin" bench p2p --json
step p2p-2v2.json "$bin" bench p2p --senders 2 --receivers 2 --max-bytes 1048576 --json
step p2p-1v3.json "$bin" bench p2p --senders 1 --receivers 3 --max-bytes 1048576 --json
step p2p-3v1.json "$bin" bench p2p --senders 3 --receivers 1 --max-bytes 1048576 --json
if command -v ucx_perftest >/dev/null; then
    step ucx-compare.txt bench/ucx-compare.sh 3
else
    echo "ucx_perftest is missing: no comparison with UCX (apt-get install ucx-utils)"
fi
step moe-qwen3-30b-a3b.json "$bin" bench moe --preset qwen3-30b-a3b --seconds "$seconds" --json
step compute-qwen3-30b-a3b.txt "$compute" --preset qwen3-30b-a3b
step compute-deepseek-v3.txt "$compute" --preset deepseek-v3 --tokens 1,2,4
for idx in 1 2 3 4 5; do
    step "demo-$idx.json" "$bin" demo --json
done
echo "load      $(cut -d' ' -f1-3 /proc/loadavg) after" >>"$out/machine.txt"
python3 bench/summarise_cpu.py "$out" | tee "$out/summary.md"
