#!/usr/bin/env python3
"""Turns the raw lines of a GPU benchmark run into tables: summarize.py RAW.jsonl > summary.md"""

import json
import sys


def main():
    with open(sys.argv[1]) as file:
        rows = [json.loads(line) for line in file if line.startswith("{")]
    puts = [row for row in rows if row["bench"] == "put_flag"]
    streams = [row for row in rows if row["bench"] == "put_bw"]
    layers = [row for row in rows if row["bench"] == "moe"]
    baselines = {(row["what"], row["shape"], row["tokens"]): row["median_us"]
                 for row in rows if row["bench"] == "baseline"}
    link = max([row["gb_per_s_per_link"] for row in streams if row["shape"] == "1to1"], default=0)

    if not (puts or streams or layers):
        print_experts(rows)
        return 0
    print("## put + flag, one way\n\n| bytes | us | GB/s |\n|---:|---:|---:|")
    for row in puts:
        print(f"| {row['bytes']} | {row['one_way_us']:.2f} | {row['gb_per_s']:.1f} |")
    print("\n## Puts from M senders to N receivers at once\n")
    print("| shape | bytes | GB/s per link |\n|---|---:|---:|")
    for row in streams:
        if row["bytes"] > 4:
            print(f"| {row['shape']} | {row['bytes']} | {row['gb_per_s_per_link']:.1f} |")

    print(f"\n## dispatch + combine\n\nHidden 7168, top-8 of 256, bf16 back, one process per rank, CUDA graphs;"
          f" µs, the slowest client's median; every output checked bit for bit. MB: sent by all"
          f" clients and servers together in a layer of the column before. Limit: bytes over the busiest link direction at {link:.0f} GB/s.\n")
    print("| shape | tokens | fp8 | MB | limit | ratio | bf16 | fp8 Zipf | with lists | NCCL | symmetric memory |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    table = {}
    for row in layers:
        if row["blocks"] == [0, 0, 0]:
            key = (row["dtype"], row["routing"], row["server"])
            table.setdefault((row["shape"], row["tokens"]), {})[key] = row

    def cell(row):
        return "–" if row is None else f"{row['median_us']:.1f}" + ("" if row["wrong"] == 0 else " WRONG")

    for (shape, tokens), found in table.items():
        main_row = found.get(("fp8", "uniform", "echo"))
        limit = main_row and main_row["link_bytes"] / link * 1e-3 if link else 0
        ratio = f"{main_row['median_us'] / limit:.2f}" if limit else "–"
        others = [baselines.get((what, shape, tokens)) for what in ("nccl", "torch symmetric memory")]
        moved = f"{main_row['bytes'] / 1e6:.2f}" if main_row else "–"
        print(f"| {shape} | {tokens} | {cell(main_row)} | {moved} | {limit:.1f} | {ratio}"
              f" | {cell(found.get(('bf16', 'uniform', 'echo')))} | {cell(found.get(('fp8', 'zipf', 'echo')))}"
              f" | {cell(found.get(('fp8', 'uniform', 'lists')))}"
              + "".join(f" | {us:.1f}" if us else " | –" for us in others) + " |")

    curve = [row for row in layers if row["blocks"] != [0, 0, 0]]
    if curve:
        print("\n## Time against thread blocks (at most one per multiprocessor up to 132)\n")
        print("| shape | tokens | " + " | ".join(str(n) for n in sorted({r["blocks"][0] for r in curve})) + " |")
        print("|---|---:|" + "---:|" * len({row["blocks"][0] for row in curve}))
        for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in curve):
            line = sorted((row for row in curve if (row["shape"], row["tokens"]) == (shape, tokens)),
                          key=lambda row: row["blocks"][0])
            print(f"| {shape} | {tokens} | " + " | ".join(f"{row['median_us']:.1f}" for row in line) + " |")
    print_experts(rows)
    wrong = [row for row in layers if row["wrong"] or row["error"] != [0, 0]]
    print(f"\n{len(layers)} cases, {len(wrong)} with wrong values or errors.")
    return 1 if wrong else 0


def print_posting(rows):
    """What work requests cost their posters, beside stores of the same rows."""
    posts = [row for row in rows if row["bench"] == "ibgda_post"]
    if not posts:
        return
    print("\n## Posting work requests\n\nNobody reads the queues, or a kernel (sink) or a thread of the host (host)"
          " completes everything at once. A post is one call of one warp; the warps of a queue are of one block"
          " each, or all of one.\n")
    for row in rows:
        if row["bench"] == "doorbell":
            record = "" if row.get("record", 1) else ", no record"
            print(f"Two requests and their doorbell alone, queue in {row['queues']} memory, scope {row['scope']}{record}:"
                  f" {row['us_per_post']:.2f} µs.\n")
    print("| a post is | queues in | scope | NIC | queues | warps each | posters | record | µs of a warp per post"
          " | posts/s per queue, M | requests/s, M |")
    print("|---|---|---|---|---:|---:|---|---|---:|---:|---:|")
    for row in posts:
        # Runs of before there were owners said `one_block` alone.
        posters = row.get("posters") or ("one block" if row.get("one_block") else "any")
        record = "yes" if row.get("record", 1) else "no"
        print(f"| {row['kind']} | {row['queues']} | {row['scope']} | {row['nic']} | {row['num_qps']}"
              f" | {row['warps_per_qp']} | {posters} | {record} | {row['us_per_post']:.2f} | {row['posts_per_s_per_qp'] / 1e6:.2f}"
              f" | {row['wqes_per_s'] / 1e6:.1f} |" + ("" if row["status"] == 0 else " FAILED"))
    print("\n| a row and its flag by stores to | threads | bytes | µs |\n|---|---:|---:|---:|")
    for row in rows:
        if row["bench"] == "stores":
            print(f"| {row['to']} | {row['threads']} | {row['row_bytes']} | {row['us_per_post']:.2f} |")


def print_experts(rows):
    experts = [row for row in rows if row["bench"] == "expert_compute"]
    if experts:
        copy = next((row["tb_per_s"] for row in rows if row["bench"] == "copy"), 0)
        dense = {row["dtype"]: row["tflop_per_s"] for row in rows if row["bench"] == "dense"}
        rates = ", ".join(f"{rate:.0f} TFLOP/s in {dtype}" for dtype, rate in dense.items())
        print(f"\n## Expert stage\n\nThe same number of tokens for each expert of a server. Floor: bytes at the rate of a"
              f" copy, {copy:.2f} TB/s, or operations at that of a library's dense products"
              f" ({rates or '790 TFLOP/s in bf16, 1400 in fp8, measured apart'}), whichever takes longer.\n")
        print("| model | type | experts | tokens each | µs | p10–p90 | TB/s | TFLOP/s | floor | by | ratio |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|---|---:|")
        for row in experts:
            print(f"| {row['model']} | {row['dtype']} | {row['experts']} | {row['tokens_per_expert']} | {row['us']:.1f}"
                  f" | {row['p10_us']:.1f}–{row['p90_us']:.1f} | {row['tb_per_s']:.2f}"
                  f" | {row['tflop_per_s']} | {row['floor_us']:.1f} | {row['floor']} | {row['ratio']:.2f} |")
    print_posting(rows)


if __name__ == "__main__":
    sys.exit(main())
