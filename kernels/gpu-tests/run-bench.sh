#!/usr/bin/env bash
# All tables of the GPU data path, beside NCCL, PyTorch and, where it is installed, DeepEP in the same run. Needs two
# or four GPUs.
#
#   run-bench.sh [OUTPUT FOLDER]     writes raw.jsonl, summary.md, README.md and more there, by default into
#                                    results/<date>-<host>
#
# SWITCHYARD_BENCH_SECTIONS picks some of: p2p layers sms experts service weights nic proxy baseline
# SWITCHYARD_BENCH_MODEL is the checkpoint that `weights` loads, by default a small one.
set -u
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
today=$(date -u +%Y-%m-%d) host=$(uname -n)
out=${1:-results/$today-$host}
mkdir -p "$out"
# Nothing of an earlier run, which the summary would take for this one's.
rm -f "$out"/{p2p,service-*}.json "$out"/{peak,baseline,weights}.jsonl "$out"/proxy-*.txt
export CUDA_MODULE_LOADING=EAGER
num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
if [ "$num_gpus" -lt 2 ]; then
    echo "run-bench: needs two GPUs, found $num_gpus" >&2
    exit 3
fi
ranks=$((num_gpus >= 4 ? 4 : 2))
raw=$out/raw.jsonl
: > "$raw"
code=0
sections=" ${SWITCHYARD_BENCH_SECTIONS:-p2p layers sms experts service weights nic proxy baseline} "
has() { [[ $sections == *" $1 "* ]]; }
has_torch=no versions="no PyTorch with NCCL"
if found=$(python3 -c 'import torch; print(torch.__version__, *torch.cuda.nccl.version())' 2> /dev/null); then
    has_torch=yes
    read -r torch nccl <<< "$found"
    versions="PyTorch $torch, NCCL ${nccl// /.}"
fi
if has p2p; then
    timeout 90 ./p2p_bench --ranks "$ranks" --limit 80 >> "$raw" || code=1
    timeout 90 ./switchyard bench p2p --device cuda --all-splits --json > "$out/p2p.json" || code=1
fi
if has layers; then
    timeout 180 ./moe_bench --ranks "$ranks" --set table --limit 170 >> "$raw" || code=1
fi
if has sms; then
    timeout 90 ./moe_bench --ranks "$ranks" --set sms --limit 80 >> "$raw" || code=1
fi
if has experts; then
    rates=()
    if [ "$has_torch" = yes ]; then
        timeout 60 python3 peak.py > "$out/peak.jsonl" || code=1
        cat "$out/peak.jsonl" >> "$raw"
        for dtype in bf16 fp8; do
            rate=$(sed -n "s/.*\"dtype\": \"$dtype\".*\"tflop_per_s\": \([0-9.]*\).*/\1/p" "$out/peak.jsonl")
            [ -n "$rate" ] && rates+=("--$dtype-rate" "$rate")
        done
    fi
    timeout 90 ./expert_test --bench "${rates[@]}" >> "$raw" || code=1
fi
if has service; then
    # A whole layer through the service. Two clients of two servers need four GPUs: where a client and a server
    # share one, their kernels wait for each other's multiprocessors.
    splits="1:1 2:1"
    [ "$ranks" -eq 4 ] && splits="1:3 2:2 3:1 2:1"
    for split in $splits; do
        # Two hundred calls, each of eight layers of up to 2.8 ms.
        timeout 90 ./switchyard bench moe --device cuda --preset deepseek-v3 --tokens 128 --seconds 5 --json \
            --clients "${split%:*}" --servers "${split#*:}" > "$out/service-${split/:/to}.json" || code=1
    done
    timeout 90 ./switchyard bench moe --device cuda --preset deepseek-v3 --tokens 128 --json \
        --servers 2 --kill > "$out/service-kill.json" || code=1
fi
if has weights; then
    # The time from exec to serving, by the source of the weights. A model of the size in question says more.
    LAST_GPU=$((num_gpus - 1)) timeout 120 python3 weights.py ./switchyard \
        "${SWITCHYARD_BENCH_MODEL:-tiny-moe}" 3 > "$out/weights.jsonl" || code=1
fi
if has nic; then
    timeout 60 ./ibgda_bench >> "$raw" || code=1
fi
if has proxy; then
    timeout 60 ./benchmark_local --json --gpu 0 --threads 4 --lanes 1 --batch 16,32 --budget 64 \
        --commands 200000 --post null,copy > "$out/proxy-local.txt" || code=1
    timeout 60 ./benchmark_relay --json --near 0 --far 1 > "$out/proxy-relay.txt" || code=1
fi
if has baseline; then
    if [ "$has_torch" = yes ]; then
        python3 baseline.py --limit 60 --out "$out/baseline.jsonl" || code=1
        cat "$out/baseline.jsonl" >> "$raw"
    else
        echo "run-bench: no PyTorch here: tables come without baselines" >&2
    fi
fi
{
    echo "# Run of $today on $host"
    echo
    echo "Command: \`run-bench.sh\` of the GPU bundle (\`cargo xtask gpu-bundle\`), sections${sections% }."
    echo
    echo "- commit: $(cat COMMIT 2> /dev/null || echo unknown)"
    echo "- programs built with CUDA $(cat CUDA 2> /dev/null || echo unknown)"
    echo "- $versions"
    echo "- driver, memory, links, kernel, processors:"
    echo
    echo '```'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    nvidia-smi topo -m 2> /dev/null | sed "s/\x1b\[[0-9;]*m//g" | head -n $((ranks + 1))
    uname -r
    nproc
    echo '```'
} > "$out/README.md"
if command -v python3 > /dev/null; then
    python3 summarize.py "$raw" > "$out/summary.md" || code=1
    cat "$out/summary.md"
fi
exit "$code"
