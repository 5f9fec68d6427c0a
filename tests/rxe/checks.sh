#!/bin/sh
# The checks of one guest:
#
#   checks.sh short       claims that only a device can confirm, and the demo
#   checks.sh transport   the transport, conformance, proxies
#   checks.sh services    layers through proxies, the message engine, examples, the demo
#
# The last two may run side by side in two guests. Runs inside of the guest, beside the binaries that the step `rxe`
# of xtask builds; /mnt has the small model.
set -e
export SWITCHYARD_REQUIRE=rdma
model=/tmp/model
export SWITCHYARD_TEST_WAKE_UPS=300 SWITCHYARD_KILL_DEATHS=24 SWITCHYARD_KILL_ROUNDS=12
export SWITCHYARD_TEST_PEERS=192

# Limits end a check that hangs. An emulated processor takes several times as long.
slow=1
[ "$SWITCHYARD_RXE_ACCEL" != tcg ] || slow=3
# Skips of single tests, which are shown at the end.
export SWITCHYARD_SKIP_LOG=/tmp/skipped

check() { # name, limit in seconds, command...
    name=$1 limit=$(($2 * slow))
    shift 2
    begin=$(cut -d. -f1 /proc/uptime)
    timeout "$limit" "$@" || { echo "rxe: $name failed with $?"; exit 1; }
    echo "rxe: $name took $(($(cut -d. -f1 /proc/uptime) - begin)) s"
}
# Runs tests by name. A name that no test has is an error.
some_of() { # name, limit in seconds, binary, tests...
    title=$1 limit=$2 binary=$3
    shift 3
    check "$title" "$limit" sh -c 'set -o pipefail; "$@" 2>&1 | tee /tmp/tests' sh \
        "$binary" --test-threads=1 --exact "$@"
    grep -qF "ok. $# passed" /tmp/tests || { echo "rxe: not all of these ran: $*"; exit 1; }
}
packets() { cat "/sys/class/infiniband/$1/ports/1/hw_counters/sent_pkts"; }
second_device() {
    ip link set eth1 mtu 9000 up
    ip addr add 10.8.0.1/24 dev eth1
    rdma link add rxe1 type rxe netdev eth1
    waited=0
    until grep -qs 'RoCE v2' /sys/class/infiniband/rxe1/ports/1/gid_attrs/types/1; do
        waited=$((waited + 1))
        [ $waited -lt 100 ] || { echo "rxe: rxe1 has no RoCE v2 address after 10 s"; exit 1; }
        sleep 0.1
    done
}
demo() {
    begin=$(cut -d. -f1 /proc/uptime)
    timeout $((150 * slow)) ./switchyard demo --json --model $model --transport verbs --deadline-ms 2000 --servers 3 --max-new-tokens 32 >/tmp/demo
    tr -d ' \n' </tmp/demo >/tmp/compact
    for expected in '"verified":true' '"lost_requests":0' '"duplicated_requests":0' '"killed":{'; do
        grep -qF "$expected" /tmp/compact || { cat /tmp/demo; echo "rxe: the report lacks $expected"; return 1; }
    done
    echo "rxe: the demo over verbs, with a server killed, took $(($(cut -d. -f1 /proc/uptime) - begin)) s"
}

# Producers, lanes and threads of a proxy on one side; slots on the other, which compares every word.
proxied() {
    timeout $((120 * slow)) \
        ./benchmark_remote --listen 127.0.0.1:7555 --transport verbs --patience-s 60 2>/tmp/receiver &
    receiver=$!
    waited=0
    until grep -qs listening /tmp/receiver; do
        waited=$((waited + 1))
        [ $waited -lt 200 ] || { cat /tmp/receiver; echo "rxe: no process listens"; exit 1; }
        sleep 0.1
    done
    check "$1" 60 sh -c './benchmark_remote --connect 127.0.0.1:7555 --transport verbs --json --threads 2 \
        --budget 16 --batch 8 --commands 2000 --checks 4 >/tmp/figures'
    cat /tmp/figures
    wait $receiver || { cat /tmp/receiver; echo "rxe: the receiver failed"; exit 1; }
    for expected in '"checked":128,' '"objects":4000,'; do
        grep -qF "$expected" /tmp/figures || { echo "rxe: the figures lack $expected"; exit 1; }
    done
}

resources=$(rdma resource show)
case $1 in
short)
    some_of "the transport" 120 ./verbs \
        device::a_device_moves_what_its_tokens_say \
        device::what_was_accepted_completes_once_whatever_happens \
        deaths::a_killed_peer_is_an_error_within_the_limit \
        guessed_keys::guessed_keys_open_nothing_and_the_victim_goes_on \
        refusals::a_wrong_key_or_address_fails_its_user_and_nobody_else \
        signals::a_flag_comes_behind_its_puts \
        signals::more_flags_than_receives_all_count \
        perftest::ib_write_bw_gets_what_is_put
    some_of "conformance" 200 ./conformance verbs::two_processes_over_verbs
    # As for a device without atomics: the peer's driver adds to flags.
    SWITCHYARD_VERBS_SIGNALS=messages some_of "conformance, flags as messages" 200 \
        ./conformance verbs::two_processes_over_verbs
    mkdir -p $model && cp /mnt/*.json /mnt/*.safetensors $model
    SWITCHYARD_TEST_TRANSPORT=verbs SWITCHYARD_TEST_MODEL=$model some_of "layers through proxies" 120 \
        ./proxy_layers layers_are_computed_through_the_proxies
    SWITCHYARD_TEST_TRANSPORT=verbs check "transfers of the message engine" 200 \
        ./engine --test-threads=2 --skip large transfers::
    demo || exit 1
    ;;
transport)
    check "the transport, and perftest's tools as its peers" 200 ./verbs --test-threads=1
    check "conformance" 200 ./conformance --exact verbs::two_processes_over_verbs
    check "conformance behind a proxy" 200 ./proxy_network --exact network::processes_over_verbs
    (
        # As for a device without atomics: the peer's driver adds to flags.
        export SWITCHYARD_VERBS_SIGNALS=messages
        check "conformance, flags as messages" 200 ./conformance --exact verbs::two_processes_over_verbs
        check "conformance behind a proxy, flags as messages" 200 ./proxy_network --exact network::processes_over_verbs
        proxied "objects through a proxy, flags as messages"
    )
    proxied "objects through a proxy"
    # Settings that ofi_rxm needs over verbs, see docs/how-to/libfabric.md. The first fits its queue into this device.
    check "conformance over libfabric's verbs;ofi_rxm" 200 \
        env FI_UNIVERSE_SIZE=8 FI_OFI_RXM_USE_SRX=1 FI_MR_CACHE_MAX_COUNT=0 \
        SWITCHYARD_REQUIRE=rdma,libfabric SWITCHYARD_TEST_PROVIDER='verbs;ofi_rxm' \
        ./conformance --exact two_processes_over_another_provider
    second_device
    sent=$(packets rxe1)
    check "conformance over six queue pairs of two devices" 200 \
        env SWITCHYARD_TEST_PORTS=rxe0+rxe1 ./conformance --exact verbs::two_processes_over_several_queue_pairs
    sent=$(($(packets rxe1) - sent))
    [ $sent -gt 500 ] || { echo "rxe: only $sent packets went by the second device"; exit 1; }
    check "conformance over six queue pairs of two devices, flags as messages" 200 \
        env SWITCHYARD_VERBS_SIGNALS=messages SWITCHYARD_TEST_PORTS=rxe0+rxe1 \
        ./conformance --exact verbs::two_processes_over_several_queue_pairs
    SWITCHYARD_TEST_PORTS=rxe0+rxe1 check "a fabric of two devices" 200 ./verbs --test-threads=1 queue_pairs::
    rdma link del rxe1
    ;;
services)
    mkdir -p $model && cp /mnt/*.json /mnt/*.safetensors $model
    # Left out: tests that make posts fail themselves, the same way over any transport.
    check "layers with failover through proxies" 200 \
        env SWITCHYARD_TEST_TRANSPORT=verbs SWITCHYARD_TEST_MODEL=$model \
        ./proxy_layers --test-threads=1 layers_are_computed a_server_that_goes
    check "fused kernels through proxies" 200 \
        env SWITCHYARD_TEST_TRANSPORT=verbs SWITCHYARD_TEST_MODEL=$model \
        ./proxy_device --test-threads=1 layers_with_fp8 tokens_of
    check "a server that goes, through proxies, flags as messages" 200 \
        env SWITCHYARD_VERBS_SIGNALS=messages SWITCHYARD_TEST_TRANSPORT=verbs SWITCHYARD_TEST_MODEL=$model \
        ./proxy_layers --test-threads=1 a_server_that_goes
    check "fused kernels through proxies, flags as messages" 200 \
        env SWITCHYARD_VERBS_SIGNALS=messages SWITCHYARD_TEST_TRANSPORT=verbs SWITCHYARD_TEST_MODEL=$model \
        ./proxy_device --test-threads=1 layers_with_fp8 stands_still
    second_device
    sent=$(packets rxe1)
    SWITCHYARD_TEST_TRANSPORT=verbs:rxe0+rxe1 check "the message engine over two devices" 200 \
        ./engine --test-threads=2 --skip large --skip killed
    sent=$(($(packets rxe1) - sent))
    [ $sent -gt 5000 ] || { echo "rxe: only $sent packets of the engine went by the second device"; exit 1; }
    rdma link del rxe1
    (
        export SWITCHYARD_TEST_TRANSPORT=verbs
        # One device repeats only the tests of two that move data.
        check "the message engine" 200 ./engine --test-threads=2 transfers:: tasks:: sharing:: resets::
        check "deaths of the engine's peers" 200 ./engine killed
        check "the engine's benchmark" 100 ./engine_bench
        check "many peers" 100 ./scale --nocapture peers::
        check "deaths of a transport's peers" 100 ./scale --nocapture deaths::
    )
    check "one client, one server" 60 ./p2p_one_to_one verbs
    check "two clients, two servers" 60 ./p2p_multi 2 2 verbs 262144 2
    demo || exit 1
    ;;
*)
    echo "rxe: \`$1\` is no part, expected short, transport or services"
    exit 2
    ;;
esac
# Every resource on the device is released, also those of killed processes, once the kernel has removed these.
waited=0
until [ "$(rdma resource show)" = "$resources" ]; do
    waited=$((waited + 1))
    [ $waited -lt 200 ] || { rdma resource show; echo "rxe: before it was $resources"; exit 1; }
    sleep 0.1
done
# Takes the device's link down, so it comes last and alone.
[ "$1" != transport ] || SWITCHYARD_TEST_LINK=eth0 check "a link that goes down" 60 \
    ./verbs --exact deaths::a_port_that_goes_down_is_noticed_without_an_operation
[ ! -s /tmp/skipped ] || sed 's/^/rxe: SKIPPED: /' /tmp/skipped
