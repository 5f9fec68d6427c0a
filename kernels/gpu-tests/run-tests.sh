#!/usr/bin/env bash
# Tests of the GPU data path on this host: kernels against the references in C++ and Rust, processes
# against one another, faults, and compute-sanitizer where it is installed. Needs a driver and one GPU, which clients
# and servers share; with two or four GPUs it runs across them. Every step has a time limit.
#
#   run-tests.sh [SEED]
#
# Steps that cannot run are SKIPPED. SWITCHYARD_REQUIRE=all, or a list of sanitizer, libfabric and
# gpus, makes that a failure. SWITCHYARD_KEEP=FILE keeps the output of every step, as the steps end.
# SWITCHYARD_STEPS=FIRST-LAST runs these steps only, by their numbers in the output: a host may be
# lent for less time than all of them take.
set -u
keep=${SWITCHYARD_KEEP:+$(realpath -m "$SWITCHYARD_KEEP")}
cd "$(dirname "$0")"
if [ programs.tar.xz -nt .unpacked ]; then
    # Python where tar finds no xz.
    tar -xJf programs.tar.xz 2> /dev/null ||
        python3 -c 'import tarfile; tarfile.open("programs.tar.xz").extractall(".")' || {
        echo "${0##*/}: programs.tar.xz cannot be unpacked: install xz, or python3" >&2
        exit 3
    }
    touch .unpacked
fi
seed=${1:-$(date +%s)}
export CUDA_MODULE_LOADING=EAGER
num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
if [ "$num_gpus" -eq 0 ]; then
    echo "run-tests: no GPU found (nvidia-smi -L lists none)" >&2
    exit 3
fi
steps=${SWITCHYARD_STEPS:-1-999}
if ! [[ $steps =~ ^[0-9]+-[0-9]+$ ]]; then
    echo "run-tests: SWITCHYARD_STEPS is \`$steps\`, expected FIRST-LAST, such as 13-20" >&2
    exit 3
fi
failures=0 num_steps=0 num_left_out=0
is_chosen() { # counts the step
    num_steps=$((num_steps + 1))
    [ "$num_steps" -ge "${steps%-*}" ] && [ "$num_steps" -le "${steps#*-}" ] && return
    num_left_out=$((num_left_out + 1))
    return 1
}
step() { # limit in seconds, name, command
    is_chosen || return
    local limit=$1 name="$num_steps $2"
    shift 2
    local start=$SECONDS wrong=
    timeout --kill-after=5 "$limit" "$@" > "step.log" 2>&1 || wrong="exit $?"
    if [ -z "$wrong" ] && [ -n "${must_say:-}" ] && ! grep -qF -- "$must_say" step.log; then
        wrong="its output lacks \"$must_say\""
    fi
    if [ -n "$keep" ]; then
        { echo "== $name (${wrong:-ok})" && cat step.log; } >> "$keep" || exit 3
    fi
    if [ -z "$wrong" ]; then
        echo "ok      $name ($((SECONDS - start)) s)"
    else
        echo "FAILED  $name ($wrong)"
        tail -n 15 step.log
        failures=$((failures + 1))
    fi
}
sanitize() { # limit in seconds, name, tool, command
    local limit=$1 name=$2 tool=$3 summary="ERROR SUMMARY: 0 errors"
    shift 3
    [ "$tool" = racecheck ] && summary="RACECHECK SUMMARY: 0 hazards displayed"
    # A sanitizer that did not attach has no findings either.
    must_say=$summary step "$limit" "$name" compute-sanitizer --tool "$tool" --error-exitcode 9 "$@"
}
skip() { # resource, name, reason
    is_chosen || return
    if [[ ,$required, == *",$1,"* || ,$required, == *,all,* ]]; then
        echo "FAILED  $num_steps $2: $1 required by SWITCHYARD_REQUIRE, but $3"
        failures=$((failures + 1))
    else
        echo "SKIPPED $num_steps $2: $3"
    fi
}

echo "seed $seed, $num_gpus GPUs"
required=${SWITCHYARD_REQUIRE:-}
# A test that finds no GPU here is wrong.
export SWITCHYARD_REQUIRE=gpu${required:+,$required} SWITCHYARD_TEST_SEED=$seed
step 60 "kernels against the host reference" ./kernels_test --seed "$seed"
step 60 "expert stage against double precision" ./expert_test --seed "$seed"
step 60 "products whose copies never complete" ./expert_test --expire --seed "$seed"
# One after the other: freeing memory waits for all kernels of a process, also for those that wait
# for each other.
step 120 "kernels launched from Rust, against Rust" ./rust_kernels_test on_the_gpu gpu:: --test-threads 1
# GPUs of other architectures use the PTX; without this one's matrix units it is correct but slow.
# Each test opens the GPU anew and takes some thirteen seconds, mostly of the driver's compiler:
# hence only a few tests.
step 120 "layers from PTX" env CUDA_FORCE_PTX_JIT=1 CUDA_CACHE_PATH="$PWD/.ptx-cache" \
    ./rust_kernels_test on_the_gpu::layers_with_fp8 on_the_gpu::expert_outputs on_the_gpu::echo --test-threads 1
step 60 "device slots between processes" \
    env SWITCHYARD_TEST_DEVICE=cuda ./rust_cuda_ipc_test --test-threads 2
# A filter that finds nothing passes, too.
must_say="6 passed" step 60 "memory that NICs are given" \
    env SWITCHYARD_TEST_DEVICE=cuda ./rust_ibgda_test memory:: --test-threads 1 --show-output
step 60 "the proxy's lanes and copies" ./rust_proxy_test --test-threads 1
step 180 "work requests over a NIC in software" ./softnic_test --seed "$seed"
step 150 "layers of two processes with a NIC each" ./softnic_test --only process_layers --seed "$seed"
export SWITCHYARD_TEST_MODEL=$PWD/tiny-moe SWITCHYARD_TEST_DATA=$PWD/data
export SWITCHYARD_TEST_DEVICE=cuda SWITCHYARD_SEED=$seed
step 90 "layers through a proxy and a NIC in software" \
    env SWITCHYARD_TEST_TRANSPORT=softnic ./rust_device_proxy_test --test-threads 1
# Servers and clients whose kernels post requests, with slots in the host's memory: the NIC reaches
# no other memory here.
for queues in plain devx; do
    step 120 "layers over requests that kernels post, queues: $queues" \
        env SWITCHYARD_TEST_QUEUES=$queues ./rust_device_ibgda_test --test-threads 1 \
        --skip slots_of_one_side_only --skip cannot_have_a_gpus_memory
done
must_say="4 passed" step 180 "formats and families, against their libraries" \
    ./rust_device_server_test device::formats:: device::families:: --test-threads 1 --show-output
if [ -n "${SWITCHYARD_LIBFABRIC_SO:-}" ] || ldconfig -p 2>/dev/null | grep -q 'libfabric\.so\.1'; then
    step 90 "layers through a proxy and libfabric" ./rust_device_proxy_test --test-threads 1
else
    skip libfabric "layers through a proxy and libfabric" "there is no libfabric.so.1"
fi
if command -v compute-sanitizer > /dev/null; then
    sanitize 90 "memcheck" memcheck ./kernels_test --quick --seed "$seed"
    sanitize 90 "memcheck: experts" memcheck ./expert_test --seed "$seed"
    sanitize 90 "memcheck from Rust" memcheck ./rust_kernels_test on_the_gpu::echo on_the_gpu::wrong --test-threads 1
    for test in layers_match_the_reference many_tokens_of_few_blocks_match_the_reference \
        expert_outputs_are_weighted_and_summed two_frames_in_flight_keep_apart; do
        sanitize 180 "racecheck: $test" racecheck ./kernels_test --quick --seed "$seed" --only "$test"
    done
    # With fp8 it does not follow the arrival that ends reads of scales: docs/explanation/gpu-experts.md.
    sanitize 180 "racecheck: experts, tiles in parts" racecheck ./expert_test --few --dtype bf16 --seed "$seed"
else
    skip sanitizer "memcheck, racecheck" "compute-sanitizer is not on the PATH"
fi
if [ "$num_gpus" -ge 2 ]; then
    ranks=$((num_gpus >= 4 ? 4 : 2))
    step 60 "layers between $ranks processes" ./moe_bench --ranks "$ranks" --set check --seed "$seed" --limit 50
    step 90 "NICs in software of two processes" ./softnic_test --only processes --seed "$seed"
    step 120 "servers on GPUs" \
        ./rust_device_server_test device:: --test-threads 1 --skip timing --skip formats:: --skip families::
    step 180 "weights between servers, on GPUs and not" \
        ./rust_device_server_test peers::gpu:: --test-threads 1
    step 180 "layers where client and server share a GPU" env CUDA_VISIBLE_DEVICES=0 \
        ./rust_device_server_test device::layers:: device::fp8:: --test-threads 1
    step 300 "clients on GPUs" ./rust_device_client_test --test-threads 1
    step 60 "calls on GPUs allocate nothing" ./rust_device_alloc_test
    step 60 "a server killed, a server frozen" ./fault_test --seed "$seed" --limit 25
    step 60 "puts between processes, every byte compared" \
        ./switchyard bench p2p --device cuda --senders 1 --receivers $((ranks - 1)) --json
else
    step 60 "layers of a process with itself" ./moe_bench --ranks 1 --set check --seed "$seed" --limit 50
    # The clients of `random` need another GPU than their server, which is the same process. Kernels
    # that share one wait for each other's multiprocessors: steps that otherwise take seconds may
    # take long.
    step 180 "servers on a GPU, clients beside them" \
        ./rust_device_server_test device:: --test-threads 1 --skip timing --skip random:: \
        --skip formats:: --skip families::
    step 180 "weights between servers, on a GPU and not" \
        ./rust_device_server_test peers::gpu:: --test-threads 1
    step 400 "clients on a GPU, servers beside them" ./rust_device_client_test --test-threads 1
    step 90 "calls on a GPU allocate nothing" ./rust_device_alloc_test
    skip gpus "layers and NICs between processes, faults, puts" "they need two GPUs"
fi
rm -f step.log
if [ "$num_left_out" -eq "$num_steps" ]; then
    echo "run-tests: SWITCHYARD_STEPS=$steps has none of the $num_steps steps" >&2
    exit 3
elif [ "$num_left_out" -ne 0 ]; then
    echo "LEFT OUT $num_left_out of $num_steps steps: SWITCHYARD_STEPS=$steps"
fi
echo "$failures failed"
[ "$failures" -eq 0 ]
