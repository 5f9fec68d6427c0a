"""Tables of raw.jsonl and relay.jsonl in Markdown: python3 summarize.py raw.jsonl relay.jsonl"""
import json
import sys

local = [json.loads(line) for line in open(sys.argv[1])]
relay = [json.loads(line) for line in open(sys.argv[2])]

print("## Commands from the GPU to the threads\n")
print("| threads | lanes each | batch | budget | post | million/s | Gbit/s | latency p50 µs | p99 µs |")
print("|---|---|---|---|---|---|---|---|---|")
for d in local:
    if d["bench"] == "rate":
        t = d["latency"]
        # Without a post nothing is moved.
        rate = f"{d['gbps']:.0f}" if d["post"] != "null" else "–"
        print(f"| {d['threads']} | {d['lanes']} | {d['batch']} | {d['budget']} | {d['post']} | {d['mops']:.2f} "
              f"| {rate} | {t['p50_us']:.1f} | {t['p99_us']:.1f} |")
print("\n## One command after the other\n")
print("| threads | lanes each | post | round trip p50 µs | p99 µs |")
print("|---|---|---|---|---|")
seen = set()
for d in local:
    key = (d["threads"], d["lanes"], d.get("post"))
    if d["bench"] == "round_trip" and key not in seen:
        seen.add(key)
        t = d["latency"]
        print(f"| {d['threads']} | {d['lanes']} | {d['post']} | {t['p50_us']:.2f} | {t['p99_us']:.2f} |")
reads = sorted(d["latency"]["p50_us"] for d in local if d["bench"] == "read")
print(f"\nA look of the GPU at a word of the host: {reads[len(reads) // 2]:.2f} µs (median of medians).\n")
for d in local:
    if d["bench"] == "idle":
        print(f"Idle, {d['threads']} threads with {d['lanes']} lanes each: "
              f"{d['cpu_percent_per_thread']:.2f} % of a core per thread.")
checked = sum(d.get("checked", 0) for d in local)
print(f"\n{checked} objects compared word by word, {sum(d.get('bad', 0) for d in local)} bad.")
print("\n## The copy of a relay, GPU 0 to GPU 1\n")
print("| copies | bytes each | µs per batch | GB/s |")
print("|---|---|---|---|")
for d in relay:
    if d["bench"] == "peer_copy":
        print(f"| {d['copies']} | {d['bytes']} | {d['batch_us']:.1f} | {d['gb_per_s']:.1f} |")
for d in relay:
    if d["bench"] == "relay":
        print(f"\nBehind a proxy, from memory of the host, each of {d['objects']} objects of 10,752 bytes with an add "
              f"to a counter behind it: {d['mops']:.2f} million/s, {d['gbps']:.0f} Gbit/s.")
