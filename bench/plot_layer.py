#!/usr/bin/env python3
"""Writes summary.md and plots for the results of layer-sim.

    python3 bench/plot_layer.py bench/runs/2026-01-31-layer-sim

needs matplotlib for the plots; without it, only summary.md is written.
"""

import json
import statistics
import sys
from pathlib import Path

# Dispatch and combine kernels of DeepEP's low-latency mode in µs (its documentation: H800 with 400 Gb/s
# NICs, 128 tokens, hidden 7168, top-8, fp8 out, bf16 back), by ranks.
DEEPEP = {8: (77, 114), 256: (194, 360)}
NAMES = {"pause": "lossless fabric", "credits": "credits", "loss": "lossy fabric"}


def medians(runs):
    table = {}
    for run in runs:
        scenario = run["scenario"]
        key = (scenario["clients"], scenario["servers"], scenario["control"])
        table.setdefault(key, []).append(run)
    fields = [field for field in runs[0] if field != "scenario"]
    return {
        key: {field: statistics.median(run[field] for run in of_key) for field in fields}
        for key, of_key in table.items()
    }


def summary(results, table):
    layer, model = results["layer"], results["model"]
    out = ["# A layer over GPU-initiated RDMA, predicted", ""]
    out.append(
        f"Hidden 7168, top-{layer['top_k']} of {layer['experts']} experts, {layer['tokens']} tokens per client, fp8 "
        f"out, bf16 back, one {8000 / model['ps_per_byte']:.0f} Gb/s link per GPU. Measured inputs: {layer['post_ns']} ns "
        f"until a kernel's requests are posted, {layer['requests_per_us']} requests per µs, {layer['kernels_ns']} ns of "
        "kernels. Everything is *simulated*; nothing here ran on a ConnectX. What is modelled stands at the head of "
        "`bench/sim/src/layer.rs`."
    )
    out += ["", "## The model against the published 8-to-8 table", ""]
    out.append("NexVenusCL's puts with a flag from 8 to 8 GPUs, µs. What does not depend on the size comes from the row of 1 KiB.")
    out += ["", "| bytes | published | links alone | predicted | predicted ÷ published |", "|---:|---:|---:|---:|---:|"]
    for put in results["put_8v8"]:
        out.append(
            f"| {put['bytes']:,} | {put['published_us']:.0f} | {put['links_us']:.1f} | {put['predicted_us']:.0f} | {put['ratio']:.3f} |"
        )
    out += ["", "## Dispatch and combine without experts", ""]
    out.append("µs. *Limit*: bytes over the busiest link, both ways. DeepEP: published kernels, dispatch + combine. A launch of these kernels has 32 clients or servers at most: beyond that this is what links and posting would allow.")
    out += ["", "| clients | servers | servers per token | control | dispatch | combine | layer | limit | layer ÷ limit | DeepEP |"]
    out.append("|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for (clients, servers, control), row in table.items():
        other = DEEPEP.get(servers) if clients == servers else None
        out.append(
            f"| {clients} | {servers} | {row['servers_per_token']:.2f} | {NAMES[control]} | {row['dispatch_us']:.0f} | "
            f"{row['combine_us']:.0f} | {row['layer_us']:.0f} | {row['limit_us']:.0f} | {row['layer_us'] / row['limit_us']:.2f} | "
            f"{sum(other) if other else '–'} |"
        )
    return "\n".join(out) + "\n"


def plot(folder, results, table):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    puts = results["put_8v8"]
    sizes = [put["bytes"] for put in puts]
    left.loglog(sizes, [put["published_us"] for put in puts], "k--x", label="NexVenusCL, published")
    left.loglog(sizes, [put["predicted_us"] for put in puts], "o-", label="predicted")
    left.set(xlabel="bytes", ylabel="µs", title="put + flag, 8 to 8")
    for control in sorted({key[2] for key in table}):
        points = sorted((key[1], row) for key, row in table.items() if key[0] == key[1] and key[2] == control)
        right.plot([n for n, _ in points], [row["layer_us"] for _, row in points], "o-", label=f"predicted, {NAMES[control]}")
    right.plot([n for n, _ in points], [row["limit_us"] for _, row in points], ":", color="#555555", label="limit by bytes")
    right.plot(list(DEEPEP), [sum(both) for both in DEEPEP.values()], "k--x", label="DeepEP low latency, published")
    right.set(xlabel="servers (and clients)", ylabel="µs", title="dispatch + combine, 128 tokens", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "layer.png", dpi=110)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    try:
        results = json.loads((folder / "results.json").read_text())
    except OSError as error:
        sys.exit(f"{folder}/results.json: {error.strerror}; run layer-sim --out {folder} first")
    table = medians(results["layers"])
    (folder / "summary.md").write_text(summary(results, table))
    try:
        plot(folder, results, table)
    except ImportError:
        print("no matplotlib: no plots", file=sys.stderr)


if __name__ == "__main__":
    main()
