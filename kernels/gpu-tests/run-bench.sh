#!/usr/bin/env bash
# All tables of the GPU data path, beside NCCL and PyTorch in the same run. Needs two or four GPUs.
#
#   run-bench.sh [OUTPUT FOLDER]     writes raw.jsonl, summary.md, README.md there
set -u
cd "$(dirname "$0")"
out=${1:-results}
mkdir -p "$out"
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
timeout 60 ./p2p_bench --ranks "$ranks" --limit 50 >> "$raw" || code=1
timeout 120 ./moe_bench --ranks "$ranks" --set table --limit 110 >> "$raw" || code=1
timeout 60 ./moe_bench --ranks "$ranks" --set sms --limit 50 >> "$raw" || code=1
rates=()
if python3 -c 'import torch' 2> /dev/null; then
    timeout 60 python3 peak.py > "$out/peak.jsonl" || code=1
    cat "$out/peak.jsonl" >> "$raw"
    for dtype in bf16 fp8; do
        rate=$(sed -n "s/.*\"dtype\": \"$dtype\".*\"tflop_per_s\": \([0-9.]*\).*/\1/p" "$out/peak.jsonl")
        [ -n "$rate" ] && rates+=("--$dtype-rate" "$rate")
    done
fi
timeout 90 ./expert_test --bench "${rates[@]}" >> "$raw" || code=1
if python3 -c 'import torch' 2> /dev/null; then
    python3 baseline.py --limit 60 --out "$out/baseline.jsonl" || code=1
    cat "$out/baseline.jsonl" >> "$raw"
else
    echo "run-bench: no PyTorch here: tables come without baselines" >&2
fi
{
    echo "# Run of $(date -u +%Y-%m-%d)"
    echo
    echo "Command: \`run-bench.sh\` of the GPU bundle (\`cargo xtask gpu-bundle\`)."
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
