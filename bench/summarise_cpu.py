#!/usr/bin/env python3
"""Tables of a folder that bench/run-cpu.sh has filled."""

import json
import pathlib
import sys


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    load = lambda name: json.loads((folder / name).read_text())
    print("# Measurements on one CPU host\n")
    print("```text")
    print((folder / "machine.txt").read_text().rstrip())
    print("```\n")

    print("## Put + flag between processes\n")
    pairs = load("p2p-1v1.json")
    raw = pairs["raw_flag_us_p50"]
    print(f"Raw flag in the same mapping: {raw:.3f} µs one way. {pairs['verified_bytes']:,} bytes compared.\n")
    print("| bytes | one way µs p50 | p99 | ÷ raw flag | GB/s |")
    print("|--:|--:|--:|--:|--:|")
    for row in pairs["rows"]:
        print(
            f"| {row['bytes']} | {row['one_way_us_p50']:.3f} | {row['one_way_us_p99']:.3f} "
            f"| {row['one_way_us_p50'] / raw:.2f} | {row['gb_per_s']:.1f} |"
        )
    for name, title in [("2v2", "2 → 2"), ("1v3", "1 → 3"), ("3v1", "3 → 1")]:
        rows = load(f"p2p-{name}.json")["rows"]
        cells = [f"{row['bytes']}: {row['one_way_us_p50']:.2f}" for row in rows[::4]]
        print(f"\n{title}, one way µs p50 (more processes than cores): " + ", ".join(cells))
    ucx = folder / "ucx-compare.txt"
    if ucx.exists():
        print("\n## Beside UCX active messages over shared memory\n")
        print("```text")
        print(ucx.read_text().rstrip())
        print("```")

    moe = load("moe-qwen3-30b-a3b.json")
    print(f"\n## One layer of {moe['preset']} through the service\n")
    print(f"{moe['threads']} threads, {moe['servers']} server, {moe['wire_dtype']} on the wire; µs, medians.\n")
    print("| tokens | in process | service | ratio | dispatch | queue | compute | combine |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in moe["rows"]:
        cells = [row[name] for name in ("dispatch_us_p50", "server_queue_us_p50", "server_compute_us_p50", "combine_us_p50")]
        print(
            f"| {row['tokens']} | {row['in_process_us_p50']:.0f} | {row['service_us_p50']:.0f} "
            f"| {row['ratio_p50']:.4f} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"
        )

    print("\n## Expert compute\n")
    print("```text")
    print((folder / "compute-qwen3-30b-a3b.txt").read_text().rstrip())
    print("```")

    print("\n## Demo: a server killed in mid-sentence\n")
    print("| run | verified | tokens/s | layer µs p50 | p99 | stall ms | lost | duplicated |")
    print("|--:|--|--:|--:|--:|--:|--:|--:|")
    for path in sorted(folder.glob("demo-*.json")):
        demo = json.loads(path.read_text())
        print(
            f"| {path.stem[5:]} | {demo['verified']} | {demo['tokens_per_s']:.0f} | {demo['layer_us_p50']:.0f} "
            f"| {demo['layer_us_p99']:.0f} | {demo['failover_stall_ms']:.2f} | {demo['lost_requests']} "
            f"| {demo['duplicated_requests']} |"
        )


if __name__ == "__main__":
    main()
