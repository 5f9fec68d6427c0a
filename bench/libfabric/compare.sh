#!/bin/sh
# Half round trips and bandwidth over TCP of one host, in turns: libfabric itself (baseline.c, and its own
# fi_pingpong where it is installed), switchyard, UCX.
# Switchyard runs twice: with a descriptor to sleep on (the default), and looking for what comes
# (SWITCHYARD_LIBFABRIC_WAIT=poll), as libfabric itself and UCX do here.
# usage: compare.sh ROUNDS P2P_BENCH; needs libfabric-dev and ucx-utils, and libfabric-bin for fi_pingpong.
# BASELINE names a built baseline.c: nothing is compiled then. Processes are pinned to CPUs 0 and 1.
# summarise.py turns the output into medians and ratios of the same round.
set -eu
rounds=$1 bench=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
baseline=${BASELINE:-$folder/baseline}
[ -n "${BASELINE:-}" ] || cc -O2 -o "$baseline" "$(dirname "$0")/baseline.c" -lfabric
provider='tcp;ofi_rxm'
port=7400
for round in $(seq "$rounds"); do
    port=$((port + 1))
    echo "== round $round, load $(cut -d' ' -f1 /proc/loadavg)"
    timeout 60 taskset -c 0 "$baseline" server "$provider" $port &
    timeout 60 taskset -c 1 "$baseline" client "$provider" $port | sed 's/^/libfabric: /'
    wait
    for size in 8 1048576; do
        command -v fi_pingpong >/dev/null || break
        [ $size = 8 ] && times=20000 || times=500
        timeout 60 taskset -c 0 fi_pingpong -e rdm -p "$provider" -I $times -S $size -B $port >/dev/null &
        sleep 0.7
        timeout 60 taskset -c 1 fi_pingpong -e rdm -p "$provider" -I $times -S $size -P $port 127.0.0.1 |
            tail -1 | sed 's/^/fi_pingpong: /'
        wait
    done
    for size in 8 1048576; do
        for waits in descriptor poll; do
            SWITCHYARD_LIBFABRIC_WAIT=$waits timeout 60 "$bench" 1 1 $size "libfabric:$provider" $size |
                sed "s/^/switchyard $waits: /"
        done
    done
    for test in ucp_am_lat ucp_put_bw; do
        size=8
        [ $test = ucp_am_lat ] || size=1048576
        export UCX_TLS=tcp UCX_NET_DEVICES=lo
        timeout 60 taskset -c 0 ucx_perftest -t $test -s $size -n 2000 -p $port >/dev/null 2>&1 &
        sleep 0.7
        timeout 60 taskset -c 1 ucx_perftest 127.0.0.1 -t $test -s $size -n 2000 -p $port 2>/dev/null |
            grep Final | sed "s/^/ucx $test: /"
        wait
    done
done
