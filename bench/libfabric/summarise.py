#!/usr/bin/env python3
"""Medians, and medians of the ratios within a round, of what compare.sh printed.

usage: summarise.py OUTPUT...
"""

import re
import statistics
import sys

LATENCY, BANDWIDTH = "8 bytes, half round trip, µs", "1 MiB, GB/s"
# Name, pattern whose last group is the figure, factor.
FIGURES = {
    LATENCY: [
        ("libfabric, write by inject", r"^libfabric: write of 8 bytes: half round trip ([\d.]+)", 1),
        ("libfabric, message by inject", r"^libfabric: message of 8 bytes: half round trip ([\d.]+)", 1),
        ("fi_pingpong, message, mean", r"^fi_pingpong: 8 +\S+ +\S+ +\S+ +\S+ +\S+ +([\d.]+)", 1),
        ("switchyard, descriptor", r"^switchyard(?: descriptor)?: +8 +([\d.]+)", 1),
        ("switchyard, poll", r"^switchyard poll: +8 +([\d.]+)", 1),
        ("ucx, active message", r"^ucx ucp_am_lat: Final: +\d+ +([\d.]+)", 1),
    ],
    BANDWIDTH: [
        ("libfabric, writes", r"^libfabric: 1 MiB writes: ([\d.]+)", 1),
        ("fi_pingpong, one at a time", r"^fi_pingpong: 1m +\S+ +\S+ +\S+ +\S+ +([\d.]+)", 1 / 1000),
        ("switchyard, descriptor", r"^switchyard(?: descriptor)?: +1048576 +[\d.]+ +[\d.]+ +([\d.]+)", 1),
        ("switchyard, poll", r"^switchyard poll: +1048576 +[\d.]+ +[\d.]+ +([\d.]+)", 1),
        ("ucx, puts", r"^ucx ucp_put_bw: Final: +\d+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)", 1 / 1000),
    ],
}


def main():
    rounds = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            rounds += re.split(r"(?m)^== round .*$", file.read())[1:]
    for title, figures in FIGURES.items():
        # A tool that was not run has no figures.
        figures = [figure for figure in figures if any(re.search(figure[1], text, re.MULTILINE) for text in rounds)]
        found = {name: [] for name, _, _ in figures}
        for text in rounds:
            values = [re.search(pattern, text, re.MULTILINE) for _, pattern, _ in figures]
            if all(values):
                for (name, _, factor), value in zip(figures, values):
                    found[name].append(float(value[1]) * factor)
        num = len(found[figures[0][0]]) if figures else 0
        if not num:
            sys.exit(f"no whole round for `{title}`")
        names = [name for name, _, _ in figures]
        others = [name for name in names if not name.startswith("switchyard")]
        print(f"\n{title}; {num} rounds\n\n| | median | " + " | ".join(f"÷ {name}" for name in others) + " |")
        print("|---|--:|" + "--:|" * len(others))
        for name in names:
            ratios = [statistics.median(a / b for a, b in zip(found[name], found[other])) for other in others]
            cells = [f"{ratio:.2f}" if name != other else "" for ratio, other in zip(ratios, others)]
            print(f"| {name} | {statistics.median(found[name]):.2f} | " + " | ".join(cells) + " |")


main()
