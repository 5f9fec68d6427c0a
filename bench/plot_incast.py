#!/usr/bin/env python3
"""Writes summary.md and plots for the results of incast-sim.

    python3 bench/plot_incast.py bench/runs/2026-01-31-sim

needs matplotlib for the plots; without it, only summary.md is written.
"""

import json
import statistics
import sys
from pathlib import Path

# Latency in ms as published by NexVenusCL (its README; GPU and NIC are not stated there).
PUBLISHED = {
    "8v8": {65536: 0.065, 262144: 0.104, 1048576: 0.233, 8388608: 1.432},
    "32v32": {65536: 0.110, 262144: 0.259, 1048576: 0.768, 8388608: 5.555},
    "8v32": {65536: 0.118, 262144: 0.245, 1048576: 0.762, 8388608: 5.573},
    "32v8": {65536: 0.105, 262144: 0.241, 1048576: 1.294, 8388608: 19.496},
    "16v32": {65536: 0.121, 262144: 0.250, 1048576: 0.778, 8388608: 5.573},
    "32v16": {65536: 0.115, 262144: 0.260, 1048576: 1.727, 8388608: 18.673},
}
NAMES = {
    "loss": "no control, lossy",
    "pause": "no control, pause",
    "credits": "credits, in turn",
    "credits_shortest": "credits, shortest first",
}
COLOURS = {"loss": "#c0392b", "pause": "#e08e2b", "credits": "#2471a3", "credits_shortest": "#5dade2"}


def shape_of(scenario):
    return f"{scenario['senders']}v{scenario['receivers']}"


def size_name(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def load(folder):
    results = json.loads((folder / "results.json").read_text())
    table = {}
    for run in results["runs"]:
        scenario = run["scenario"]
        if scenario.get("verb") == "read":
            # What was published are writes.
            PUBLISHED.clear()
        key = (shape_of(scenario), scenario["bytes"], scenario["control"])
        table.setdefault(key, []).append(run)
    return results["model"], table


def median(table, key, field="ms"):
    return statistics.median(run[field] for run in table[key]) if key in table else None


def cell(value, digits=3):
    return "–" if value is None else f"{value:.{digits}f}"


def limit_ms(model, shape, size):
    senders, receivers = map(int, shape.split("v"))
    packets = -(-size // model["packet_bytes"])
    on_wire = size + packets * model["header_bytes"]
    return on_wire * max(senders, receivers) * model["ps_per_byte"] / 1e9


def summary(model, table):
    shapes = list(dict.fromkeys(key[0] for key in table))
    sizes = sorted({key[1] for key in table})
    controls = [name for name in NAMES if any(key[2] == name for key in table)]
    num_seeds = max(len(runs) for runs in table.values())
    out = [
        "# Incast on simulated 400 Gb/s links",
        "",
        "Every sender sends one message to every receiver, or every receiver reads one from every "
        "sender, all at once: *32v8* is 32 senders into 8 receivers and moves the same bytes as *8v32*. "
        "A time runs until the last of those who began knows that all is there; "
        f"medians of {num_seeds} seeds. What is modelled and what is not "
        "stands at the head of `bench/sim/src/lib.rs`; every parameter is in `results.json`.",
        "",
        "## Many into few against few into many",
        "",
        "| | " + " | ".join(f"32v8 ÷ 8v32 at {size_name(size)}" for size in sizes) + " |",
        "|---|" + "--:|" * len(sizes),
    ]

    def ratios(time):
        cells = []
        for size in sizes:
            many, few = time("32v8", size), time("8v32", size)
            cells.append(cell(many / few if many and few else None, 2))
        return cells

    if PUBLISHED:
        published = ratios(lambda shape, size: PUBLISHED[shape].get(size))
        out.append("| NexVenusCL, published | " + " | ".join(published) + " |")
    for control in controls:
        found = ratios(lambda shape, size: median(table, (shape, size, control)))
        out.append(f"| {NAMES[control]} | " + " | ".join(found) + " |")
    for size in sizes:
        out += [
            "",
            f"## {size_name(size)} to everybody, ms",
            "",
            "| shape | busiest link | published | " + " | ".join(NAMES[c] for c in controls) + " |",
            "|---|--:|--:|" + "--:|" * len(controls),
        ]
        for shape in shapes:
            row = [shape, cell(limit_ms(model, shape, size)), cell(PUBLISHED.get(shape, {}).get(size))]
            row += [cell(median(table, (shape, size, control))) for control in controls]
            out.append("| " + " | ".join(row) + " |")
    size = sizes[-1]
    out += [
        "",
        f"## What happens inside, at {size_name(size)}",
        "",
        "| shape | control | longest queue MiB | dropped packets | sent again MiB | timeouts | pauses | control packets |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for shape in shapes:
        for control in controls:
            key = (shape, size, control)
            out.append(
                f"| {shape} | {NAMES[control]} "
                f"| {median(table, key, 'max_queue_bytes') / 2**20:.2f} "
                f"| {median(table, key, 'dropped_packets'):,.0f} "
                f"| {median(table, key, 'resent_bytes') / 2**20:,.0f} "
                f"| {median(table, key, 'timeouts'):,.0f} | {median(table, key, 'pauses'):,.0f} "
                f"| {median(table, key, 'control_packets'):,.0f} |"
            )
    return "\n".join(out) + "\n"


def plots(folder, model, table):
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is missing: no plots (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({key[1] for key in table})
    controls = [name for name in NAMES if any(key[2] == name for key in table)]
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, shape in zip(axes, ["8v32", "32v8"]):
        for control in controls:
            times = [median(table, (shape, size, control)) for size in sizes]
            axis.plot(sizes, times, marker="o", label=NAMES[control], color=COLOURS[control])
        if shape in PUBLISHED:
            known = sorted(PUBLISHED[shape].items())
            axis.plot(*zip(*known), "k--x", label="NexVenusCL, published")
        axis.plot(sizes, [limit_ms(model, shape, size) for size in sizes], ":", color="grey", label="busiest link")
        axis.set(xscale="log", yscale="log", xlabel="bytes from every sender to every receiver", title=shape)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms until all is there")
    axes[1].legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(folder / "time_by_size.png", dpi=130)

    size = sizes[-1]
    shapes = list(dict.fromkeys(key[0] for key in table))
    fig, axis = plt.subplots(figsize=(9, 4.2))
    width = 0.8 / (len(controls) + 1)
    for nth, control in enumerate(controls):
        heights = [median(table, (shape, size, control)) / limit_ms(model, shape, size) for shape in shapes]
        axis.bar([x + nth * width for x in range(len(shapes))], heights, width, label=NAMES[control], color=COLOURS[control])
    if PUBLISHED:
        heights = [PUBLISHED.get(shape, {}).get(size, 0) / limit_ms(model, shape, size) for shape in shapes]
        axis.bar([x + len(controls) * width for x in range(len(shapes))], heights, width, label="NexVenusCL, published", color="#555555")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(shapes))], shapes)
    axis.set(ylabel="time ÷ time of the busiest link", title=f"{size_name(size)} from every sender to every receiver")
    axis.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(folder / "shapes.png", dpi=130)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    model, table = load(folder)
    text = summary(model, table)
    (folder / "summary.md").write_text(text)
    print(text)
    plots(folder, model, table)


if __name__ == "__main__":
    main()
