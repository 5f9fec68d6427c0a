#!/bin/sh
# Half round trips and bandwidth over TCP of one host, in turns: libfabric itself, switchyard, UCX.
# usage: compare.sh ROUNDS P2P_BENCH; needs libfabric-dev and ucx-utils. Processes are pinned to CPUs 0 and 1.
set -eu
rounds=$1 bench=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cc -O2 -o "$folder/baseline" "$(dirname "$0")/baseline.c" -lfabric
provider='tcp;ofi_rxm'
port=7400
for round in $(seq "$rounds"); do
    port=$((port + 1))
    echo "== round $round, load $(cut -d' ' -f1 /proc/loadavg)"
    timeout 60 taskset -c 0 "$folder/baseline" server "$provider" $port &
    timeout 60 taskset -c 1 "$folder/baseline" client "$provider" $port | sed 's/^/libfabric: /'
    wait
    timeout 60 "$bench" 1 1 8 "libfabric:$provider" 8 | sed 's/^/switchyard: /'
    timeout 60 "$bench" 1 1 1048576 "libfabric:$provider" 1048576 | sed 's/^/switchyard: /'
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
