#!/usr/bin/env bash
# Measures a fleet on one host: joins, layers with and without TLS, kills, leaves, weights from peers, 1,000 simulated
# servers, and what `switchyard plan` predicts. Writes a file for each step into a folder. A step that fails does not end
# the run. The script then names the step and ends with 1.
#
#   bench/run-fleet.sh bench/runs/2026-01-31-fleet [--quick]
#
# Needs a release build. The binary has a command of its own: beside examples it would be built with the emulation of
# GPUs for tests, whose thread-local memory makes each start slower.
#   cargo build --release -p switchyard-cli --bin switchyard
#   cargo build --release -p switchyard-cli --example fleet_figures --example slow_server
#   cargo build --release -p switchyard-bench-harness --example peer_weights --example fleet_sim
# RELEASE names another folder than target/release. The whole needs 16 CPUs, 64 GB of memory and 10 minutes; the
# simulator runs beside the joins and layers, on CPUs of its own. It needs root for weights over TCP.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:?give a folder for the results}
release=${RELEASE:-target/release}
bin=$release/switchyard
examples=$release/examples
joins=200 layers=12 hedges=15 changes=6 servers=1000 steady=20 weights=9 rounds=3 seconds=1
if [ "${2:-}" = --quick ]; then
    joins=5 layers=2 hedges=2 changes=1 servers=50 steady=3 weights=1 rounds=1 seconds=0.2
fi
tiny=data/tiny-moe
work=$(mktemp -d -p /dev/shm switchyard-fleet.XXXXXX)
chmod 755 "$work"
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

# Two groups of CPUs, so that the simulator does not disturb the rest.
cpus=$(nproc)
if [ "$cpus" -ge 12 ]; then
    most=0-$((cpus - 5)) few=$((cpus - 4))-$((cpus - 1))
else
    most=0-$((cpus - 1)) few=$most
fi

step() { # name, seconds at most, CPUs, command…
    local name=$1 limit=$2 on=$3 begin=$SECONDS
    shift 3
    echo "$name: $*" >>"$out/commands.txt"
    timeout "$limit" taskset -c "$on" "$@" >"$out/$name" 2>"$out/$name.err" ||
        echo "$name: exit code $?" | tee -a "$work/failed"
    [ -s "$out/$name.err" ] || rm -f "$out/$name.err"
    echo "==> $name: $((SECONDS - begin)) s"
}

: >"$out/commands.txt"
{
    echo "cpu       $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $cpus cores"
    echo "memory    $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
    echo "kernel    $(uname -r)"
    echo "version   $("$bin" --version)"
    echo "load      $(cut -d' ' -f1-3 /proc/loadavg) before"
} >"$out/machine.txt"

step fleet-sim.jsonl 150 "$few" "$examples/fleet_sim" "$bin" "$servers" "$servers" "$steady" &
simulator=$!
step join.jsonl 90 "$most" "$examples/fleet_figures" "$bin" "$tiny" join "$joins"
step layers.jsonl 60 "$most" "$examples/fleet_figures" "$bin" "$tiny" layers "$layers"
step hedges-64.jsonl 60 "$most" "$examples/slow_server" "$bin" none 64 "$hedges"
step hedges-1.jsonl 60 "$most" "$examples/slow_server" "$bin" none 1 "$(((hedges + 1) / 2))"
step changes.jsonl 120 "$most" "$examples/fleet_figures" "$bin" "$tiny" changes "$changes"
wait "$simulator"
step join-alone.jsonl 60 "$most" "$examples/fleet_figures" "$bin" "$tiny" join "$((joins / 2))"

step make.txt 90 "0-$((cpus - 1))" "$bin" make-checkpoint --preset qwen3-30b-a3b --layers "$weights" --out "$work/full"
mkdir -p "$work/bare"
cp "$work/full/config.json" "$work/bare/"
chmod -R a+rX "$work"
all=0-$((cpus - 1))
step peers-join.jsonl 90 "$all" "$examples/peer_weights" join "$bin" "$work/full" "$work/bare" 100000000000 "$rounds"
step peers-join-tcp.jsonl 90 "$all" "$examples/peer_weights" join-tcp "$bin" "$work/full" "$work/bare" 100000000000 2
rm -rf "$work/full"
step make-2.txt 60 "$all" "$bin" make-checkpoint --preset qwen3-30b-a3b --layers "$(((weights + 2) / 3))" --out "$work/full"
cp "$work/full/config.json" "$work/bare/"
chmod -R a+rX "$work"
step peers-fleet.jsonl 120 "$all" "$examples/peer_weights" fleet "$bin" "$work/full" "$work/bare" 4000000000 2
rm -rf "$work/full"

bench() { # name, threads, servers, tokens, seed
    step "$1" 40 "$all" "$bin" --json bench moe --model "$work/layer" --seconds "$seconds" --threads "$2" --servers "$3" \
        --tokens "$4" --seed "$5"
}
step make-3.txt 30 "$all" "$bin" make-checkpoint --preset qwen3-30b-a3b --layers 1 --out "$work/layer"
step layers-qwen3.jsonl 60 "$all" "$examples/fleet_figures" "$bin" "$work/layer" layers "$layers"
bench fit.json 1 1 1,4,16,64,256 1
bench held-out.json 1 1 2,8,32,128 2
bench two-servers.json 2 2 1,4,16,64,256 3
bench four-servers.json 4 4 1,4,16,64,256 4
for measured in held-out two-servers four-servers; do
    step "check-$measured.txt" 30 "$all" "$bin" plan --preset qwen3-30b-a3b --bench "$out/fit.json" \
        --check "$out/$measured.json" --zipf 0 --traffic flat --peak 100
done
echo "load      $(cut -d' ' -f1-3 /proc/loadavg) after" >>"$out/machine.txt"
if [ -s "$work/failed" ]; then
    echo "run-fleet.sh: these steps failed:" >&2
    cat "$work/failed" >&2
    exit 1
fi
