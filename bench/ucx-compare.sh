#!/usr/bin/env bash
# Puts with a flag against UCX's active messages over shared memory, in turns on the same two cores.
#
#   bench/ucx-compare.sh [RUNS]
#
# Needs ucx_perftest (Debian and Ubuntu: apt-get install ucx-utils) and a release build of
# `switchyard`; P2P_BENCH names another command that prints the same table. Latency is the lowest
# median of RUNS runs, bandwidth the highest: both sides get the same chance to meet a quiet machine.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-3}
bench=${P2P_BENCH:-target/release/switchyard bench p2p}
port=${UCX_PORT:-13470}
latency_sizes="8 64 512 4096 65536"
bandwidth_size=1048576

command -v ucx_perftest >/dev/null || {
    echo "ucx_perftest is missing: apt-get install ucx-utils" >&2
    exit 1
}
command -v "${bench%% *}" >/dev/null || {
    echo "${bench%% *} is missing: cargo build --release" >&2
    exit 1
}

work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
export UCX_TLS=posix,self UCX_WARN_UNUSED_ENV_VARS=n UCX_LOG_LEVEL=error

# One measurement: prints the median latency in µs and the average bandwidth in MB/s.
ucx() { # test bytes iterations
    taskset -c 1 timeout 60 ucx_perftest -p "$port" >/dev/null 2>&1 &
    server=$!
    for _ in $(seq 50); do
        if taskset -c 0 timeout 60 ucx_perftest 127.0.0.1 -p "$port" -t "$1" -s "$2" \
            -n "$3" -w "$(($3 / 10))" -f >"$work/ucx" 2>/dev/null && [ -s "$work/ucx" ]; then
            break
        fi
        sleep 0.1
    done
    wait "$server" || true
    server=
    awk 'NF >= 6 && $1 ~ /^[0-9]+$/ { print $2, $6 }' "$work/ucx" | tail -1
}

for _ in $(seq "$runs"); do
    $bench >"$work/ours"
    awk '$1 ~ /^[0-9]+$/ && NF == 4 { print "ours", $1, $2, $4 }' "$work/ours" >>"$work/all"
    sed -n 's/.*raw flag \([0-9.]*\) µs.*/raw 0 \1 0/p' "$work/ours" >>"$work/all"
    for bytes in $latency_sizes; do
        echo "ucx-lat $bytes $(ucx ucp_am_lat "$bytes" 50000)" >>"$work/all"
    done
    echo "ucx-bw $bandwidth_size $(ucx ucp_am_bw "$bandwidth_size" 4000)" >>"$work/all"
done

awk -v latency="$latency_sizes" -v bw="$bandwidth_size" '
    function low(key, value) { if (!(key in least) || value < least[key]) least[key] = value }
    function high(key, value) { if (value > most[key]) most[key] = value }
    { low($1 " " $2, $3 + 0); high($1 " " $2, $4 + 0) }
    END {
        printf "%-28s %12s %12s %9s\n", "", "switchyard", "UCX am", "ratio"
        printf "%-28s %9.3f µs\n", "raw flag, one way", least["raw 0"]
        num = split(latency, sizes, " ")
        for (i = 1; i <= num; i++) {
            ours = least["ours " sizes[i]]; theirs = least["ucx-lat " sizes[i]]
            printf "%-28s %9.3f µs %9.3f µs %9.2f\n", sizes[i] " B, one way", ours, theirs, ours / theirs
        }
        ours = most["ours " bw]; theirs = most["ucx-bw " bw] / 1e3 * 1.048576
        printf "%-28s %7.1f GB/s %7.1f GB/s %9.2f\n", bw " B, bandwidth", ours, theirs, ours / theirs
    }' "$work/all"
