#!/usr/bin/env python3
"""Turns a GPU benchmark run into tables, beside their targets: summarize.py RAW.jsonl > summary.md

Also reads the files beside the raw lines: p2p.json, service-*.json, proxy-local.txt, proxy-relay.txt. The end of the
summary names missing files. Exits with 1 if a value was wrong; a missed target is no error.
"""

import json
import pathlib
import sys

# Targets for dispatch + combine with fp8 and uniform routing, µs by shape and tokens.
LAYER_US = {("4r", 128): 33, ("2to2", 128): 24, ("1to3", 128): 30, ("3to1", 128): 30, ("4r", 4096): 780}
ONE_TOKEN_US = 9
# Allowed addition, with a real server's checks and lists, at 128 tokens.
LISTS_ADD_US = 3
# Allowed ratio with 24 thread blocks, relative to the best number of blocks.
FEW_BLOCKS, FEW_BLOCKS_RATIO = 24, 1.25
EXPERT_RATIO = 1.25
PUT_FLAG_US, PUT_SHARE = 2.0, 0.95
# Allowed ratio of a layer through the service at 128 tokens to its servers' computation alone.
SERVICE_RATIO = 1.15
STALL_MS, AFTER_KILL_RATIO = 10, 0.98
# A warp's put + flag with queues in host memory, and millions of requests per second over 32 lanes and 8 queues.
POST_US, REQUESTS_M, POST_QUEUES = 1.0, 100, 8
PROXY_ONE_WAY_US, PROXY_RATE_M, PROXY_IDLE_PERCENT = 4, 5.9, 1
# Figures of DeepEP, measured once on a host with four H200s.
DEEPEP_US = {("4r", 1): "28 (normal 53)", ("4r", 128): "92 (normal 95)", ("4r", 4096): "normal 1180"}


def main():
    run = Run(pathlib.Path(sys.argv[1]))
    aims = Aims()
    for section in (puts, streams, transport, layer_aims, layer_table, block_curve, expert_stage, posting,
                    service, kills, proxy):
        section(run, aims)
    num_wrong = correctness(run)
    aims.conclude()
    if run.notes:
        print("\n" + "\n".join(f"- {note}" for note in run.notes))
    return 1 if num_wrong else 0


class Run:
    """The figures of a run, by source."""

    def __init__(self, raw):
        self.notes = []
        folder = raw.parent
        self.rows = self.lines(raw)
        self.splits = self.json(folder / "p2p.json") or []
        self.service = {path.stem.removeprefix("service-"): report for path in sorted(folder.glob("service-*.json"))
                        if (report := self.json(path))}
        if not self.service:
            self.notes.append("There is no service-*.json.")
        # Runs of the proxy alone have all their lines in one file.
        self.proxy = [row for row in self.rows if row["bench"] in PROXY_BENCHES]
        for name in ("proxy-local.txt", "proxy-relay.txt"):
            if (folder / name).exists():
                self.proxy += self.lines(folder / name)
            else:
                self.notes.append(f"There is no {name}.")
        # Keeps one row per other key: a later line replaces an earlier one.
        self.layers, self.curve = {}, {}
        for row in self.of("moe"):
            blocks = row.get("blocks", [0, 0, 0])
            if blocks == [0, 0, 0]:
                # Other methods to overlap kernels are not part of the tables.
                if row.get("pdl", -1) == -1:
                    kind = (row["dtype"], row["routing"], row["server"])
                    self.layers.setdefault((row["shape"], row["tokens"]), {})[kind] = row
            elif (row["dtype"], row["routing"], row["server"]) == ECHO:
                self.curve.setdefault((row["shape"], row["tokens"]), {})[blocks[0]] = row
        self.others = {(row["what"], row["shape"], row["tokens"]): row["median_us"] for row in self.of("baseline")}
        self.has_deepep = any(what == "deepep" for what, _, _ in self.others)
        rates = [row["gb_per_s_per_link"] for row in self.of("put_bw") if row["shape"] == "1to1"]
        rates += [] if rates else [report["store_gb_per_s"] for report in self.splits if is_split(report, 1, 1)]
        self.link = max(rates, default=0)

    def of(self, bench):
        return [row for row in self.rows if row["bench"] == bench]

    def lines(self, path):
        """Lines of JSON with a name. A program that ran into its time limit may have left a partial line."""
        rows = []
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                continue
            try:
                row = json.loads(line)
            except ValueError:
                self.notes.append(f"{path.name} has a line that is no JSON: {line[:40]} …")
                continue
            if "bench" in row:
                rows.append(row)
        return rows

    def json(self, path):
        if not path.exists():
            self.notes.append(f"There is no {path.name}.")
            return None
        try:
            return json.loads(path.read_text(errors="replace"))
        except ValueError as error:
            self.notes.append(f"{path.name} cannot be read, so its program did not end well: {error}.")
            return None


class Aims:
    """The targets, and whether the run reached them."""

    def __init__(self):
        self.num, self.missed = 0, []

    def at_most(self, what, value, aim):
        return self.cells(what, value, f"≤ {aim}", value is not None and value <= aim)

    def at_least(self, what, value, aim):
        return self.cells(what, value, f"≥ {aim}", value is not None and value >= aim)

    def cells(self, what, value, aim, is_met):
        """Two cells of a table: `aim` and `met`."""
        if value is None:
            return [aim, NONE]
        self.num += 1
        if not is_met:
            self.missed.append(what)
        return [aim, "yes" if is_met else "**no**"]

    def conclude(self):
        if self.num:
            print(f"\nAims: {self.num - len(self.missed)} of {self.num} met."
                  + (f" Not met: {'; '.join(self.missed)}." if self.missed else ""))


def puts(run, aims):
    rows = run.of("put_flag")
    if rows:
        print("## put + flag, one way")
        lines = []
        for row in rows:
            aim = aims.at_most("4 B put + flag", row["one_way_us"], PUT_FLAG_US) if row["bytes"] == 4 else [NONE] * 2
            lines.append([row["bytes"], number(row["one_way_us"], 2), number(row["gb_per_s"]), *aim])
        table("bytes: µs: GB/s: aim: met", lines)


def streams(run, _aims):
    rows = [row for row in run.of("put_bw") if row["bytes"] > 4]
    if rows:
        print("\n## Puts from M senders to N receivers at once")
        table("shape bytes: GB/s_per_link:",
              [[row["shape"], row["bytes"], number(row["gb_per_s_per_link"])] for row in rows])


def transport(run, aims):
    """p2p.json: `switchyard bench p2p --device cuda`."""
    splits = [(f"{report['rows'][0]['senders']}to{report['rows'][0]['receivers']}", report)
              for report in run.splits if report["rows"]]
    if not splits:
        return
    print("\n## switchyard bench p2p: put + flag from Rust\n\nShare: of the rate of stores of 64 MiB, measured beside.")
    lines = []
    for shape, report in splits:
        by_bytes = {row["bytes"]: row for row in report["rows"]}
        small, large = by_bytes.get(4, {}), by_bytes.get(8 << 20, {})
        one_way, rate, store = small.get("one_way_us_p50"), large.get("gb_per_s_per_link"), report["store_gb_per_s"]
        share = rate / store if rate and store else None
        lines.append([shape, number(one_way, 2), *aims.at_most(f"4 B, {shape}", one_way, PUT_FLAG_US), number(rate),
                      number(store), number(share, 3), *aims.at_least(f"8 MiB, {shape}", share, PUT_SHARE)])
    table("shape 4_B,_µs: aim: met 8_MiB,_GB/s_per_link: stores,_GB/s: share: aim: met", lines)
    print("\nµs one way (median), and GB/s over the busiest link:")
    sizes = sorted({row["bytes"] for _, report in splits for row in report["rows"]})
    lines = []
    for size in sizes:
        cells = [next((row for row in report["rows"] if row["bytes"] == size), None) for _, report in splits]
        lines.append([size] + [f"{row['one_way_us_p50']:.2f}, {row['gb_per_s_per_link']:.1f}" if row else NONE
                               for row in cells])
    table("bytes: " + " ".join(f"{shape}:" for shape, _ in splits), lines)


def layer_aims(run, aims):
    """The cases with a target, beside the times of other libraries."""
    keys = [key for key in layer_keys(run) if layer_aim(*key) is not None and ECHO in run.layers.get(key, {})]
    if keys:
        print("\n## dispatch + combine: what it must reach\n\nfp8 out, bf16 back, uniform routing, µs.")
        lines = []
        for key in keys:
            shape, tokens = key
            row = run.layers[key][ECHO]
            lines.append([shape, tokens, layer_cell(row), *aims.at_most(f"{shape} at {tokens}", judged_us(row),
                                                                        layer_aim(*key)), *other_cells(run, key)])
        table("shape tokens: µs: aim: met NCCL: symmetric_memory: DeepEP:", lines)
        if not run.has_deepep:
            print("\nDeepEP was not measured in this run: its figures, where there are any, were measured once on a host with four H200s.")
    added = [(key, found) for key, found in run.layers.items() if key[1] == 128 and ECHO in found and LISTS in found]
    if added:
        print("\nA real server behind it, 128 tokens: every field checked, and lists by expert.")
        lines = []
        for (shape, _), found in added:
            bad = is_bad(found[ECHO]) or is_bad(found[LISTS])
            more = NEVER if bad else found[LISTS]["median_us"] - found[ECHO]["median_us"]
            lines.append([shape, layer_cell(found[ECHO]), layer_cell(found[LISTS]), number(more),
                          *aims.at_most(f"lists, {shape}", more, LISTS_ADD_US)])
        table("shape µs: with_lists: more: aim: met", lines)


def layer_table(run, _aims):
    keys = layer_keys(run)
    if not keys:
        return
    rate = "a rate not measured here"
    if run.link:
        rate = f"{run.link:.0f} GB/s, the rate of puts from one GPU to one other"
    print("\n## dispatch + combine\n\nHidden 7168, top-8 of 256, bf16 back, one process per rank, CUDA graphs; µs, the"
          " slowest client's median; every output checked bit for bit. MB: sent by all clients and servers together in"
          " a layer, also what stays on a GPU. Limit: bytes over the busiest link direction at"
          f" {rate}. Ratio: to the limit. NCCL and symmetric memory: of the same sizes in fp8, uniform routing.")
    lines = []
    for key in keys:
        found = run.layers.get(key, {})
        for dtype, routing in (("fp8", "uniform"), ("fp8", "zipf"), ("bf16", "uniform"), ("bf16", "zipf")):
            echo, lists = (found.get((dtype, routing, server)) for server in ("echo", "lists"))
            row = echo or lists
            others = other_cells(run, key)[:2] if (dtype, routing) == ECHO[:2] else [NONE] * 2
            if row is None and others == [NONE] * 2:
                continue
            limit = row["link_bytes"] / run.link * 1e-3 if row and run.link and row.get("link_bytes") else None
            ratios = [number(one["median_us"] / limit, 2) if one and limit else NONE for one in (echo, lists)]
            moved = number(row["bytes"] / 1e6, 2) if row and "bytes" in row else NONE
            lines.append([*key, dtype, routing, moved, number(limit), layer_cell(echo), ratios[0], layer_cell(lists),
                          ratios[1], *others])
    table("shape tokens: type routing MB: limit: µs: ratio: with_lists: ratio: NCCL: symmetric_memory:", lines)


def block_curve(run, aims):
    if not run.curve:
        return
    print("\n## Time against thread blocks\n\nfp8, uniform routing, µs, and the ratio to the best: of the row, or of as"
          f" many blocks as are chosen by themselves. Blocks are of each kernel. Up to 132 there is at most one per"
          f" multiprocessor; on GPUs that are client and server, kernels work beside one another, with as many blocks"
          f" each.")
    numbers = sorted({blocks for line in run.curve.values() for blocks in line})
    lines = []
    for (shape, tokens), line in run.curve.items():
        by_itself = run.layers.get((shape, tokens), {}).get(ECHO)
        times = [row["median_us"] for row in [*line.values(), by_itself] if row and not is_bad(row)]
        best = min(times, default=None)
        cells = [NONE if row is None else layer_cell(row) + (f" ({row['median_us'] / best:.2f})" if best else "")
                 for row in map(line.get, numbers)]
        few = line.get(FEW_BLOCKS)
        ratio = judged_us(few) / best if few and best else None
        lines.append([shape, tokens, layer_cell(by_itself), *cells, number(ratio, 2),
                      *aims.at_most(f"{FEW_BLOCKS} blocks, {shape} at {tokens}", ratio, FEW_BLOCKS_RATIO)])
    table(f"shape tokens: by_itself: {' '.join(f'{n}:' for n in numbers)} {FEW_BLOCKS}_over_the_best: aim: met", lines)


def expert_stage(run, aims):
    experts = run.of("expert_compute")
    if not experts:
        return
    copy = next((row["tb_per_s"] for row in run.of("copy")), 0)
    dense = {row["dtype"]: row["tflop_per_s"] for row in run.of("dense")}
    rates = ", ".join(f"{rate:.0f} TFLOP/s in {dtype}" for dtype, rate in dense.items())
    print(f"\n## Expert stage\n\nThe same number of tokens for each expert of a server. Floor: bytes at the rate of a"
          f" copy, {copy:.2f} TB/s, or operations at that of a library's dense products"
          f" ({rates or '790 TFLOP/s in bf16, 1400 in fp8, measured apart'}), whichever takes longer.")
    lines = []
    for row in experts:
        dtype, tokens, ratio = row.get("dtype", NONE), row["tokens_per_expert"], row.get("ratio")
        spread = f"{row['p10_us']:.1f}–{row['p90_us']:.1f}" if "p10_us" in row else NONE
        lines.append([row["model"], dtype, row["experts"], tokens, number(row["us"]), spread,
                      number(row.get("tb_per_s"), 2), row.get("tflop_per_s", NONE), number(row.get("floor_us")),
                      row.get("floor", NONE), number(ratio, 2),
                      *aims.at_most(f"experts, {row['model']} {dtype} at {tokens}", ratio, EXPERT_RATIO)])
    table("model type experts: tokens_each: µs: p10–p90: TB/s: TFLOP/s: floor: by ratio: aim: met", lines)


def posting(run, aims):
    """The cost of work requests to their posters, beside stores of the same rows."""
    posts = run.of("ibgda_post")
    if not posts:
        return
    print("\n## Posting work requests\n\nNobody reads the queues, or a kernel (sink) or a thread of the host (host)"
          " completes everything at once. A post is one call of one warp; the warps of a queue are of one block"
          " each, or all of one.")
    for row in run.of("doorbell"):
        record = "" if row.get("record", 1) else ", no record"
        print(f"\nTwo requests and their doorbell alone, queue in {row['queues']} memory, scope {row['scope']}{record}:"
              f" {row['us_per_post']:.2f} µs.")
    lines = []
    for row in posts:
        # Runs that do not name `posters` have only `one_block`.
        posters = row.get("posters") or ("one block" if row.get("one_block") else "any")
        failed = "" if row["status"] == 0 else " FAILED"
        lines.append([row["kind"], row["queues"], row["scope"], row["nic"], row["num_qps"], row["warps_per_qp"],
                      posters, "yes" if row.get("record", 1) else "no", number(row["us_per_post"], 2),
                      number(row["posts_per_s_per_qp"] / 1e6, 2), number(row["wqes_per_s"] / 1e6) + failed])
    table("a_post_is queues_in scope NIC queues: warps_each: posters record µs_of_a_warp_per_post:"
          " posts/s_per_queue,_M: requests/s,_M:", lines)
    # Nothing reads these queues, so only the poster counts.
    alone = [row for row in posts if row["queues"] == "host" and row["nic"] == "none" and row["status"] == 0]
    best_us = min((row["us_per_post"] for row in alone if row["kind"] == "put+signal"), default=None)
    best_rate = max((row["wqes_per_s"] / 1e6 for row in alone if row["num_qps"] == POST_QUEUES), default=None)
    table("what,_queues_in_host_memory found: aim met",
          [["put + signal, µs of a warp", number(best_us, 2), *aims.at_most("put + signal", best_us, POST_US)],
           [f"requests/s over {POST_QUEUES} queues, M", number(best_rate),
            *aims.at_least("requests per second", best_rate, REQUESTS_M)]])
    table("a_row_and_its_flag_by_stores_to threads: bytes: µs:",
          [[row["to"], row["threads"], row["row_bytes"], number(row["us_per_post"], 2)] for row in run.of("stores")])


def service(run, aims):
    """service-MtoN.json: `switchyard bench moe --device cuda`."""
    lines = []
    for report in run.service.values():
        for row in report.get("rows") or []:
            tokens, ratio = row["tokens"], row["ratio"]
            what = f"{report['clients']} → {report['servers']}"
            aim = aims.at_most(f"layer, {what}", ratio, SERVICE_RATIO) if tokens == 128 else [NONE] * 2
            lines.append([what, report["preset"], report["wire_dtype"], tokens, number(row["layer_us_p50"]),
                          number(row["compute_us"]), number(ratio, 2), *aim, number(row.get("server_us")),
                          number(row.get("server_ratio"), 2), number(row["clients_per_batch"], 2),
                          number(row["gain"], 2), min((client["calls"] for client in row["clients"]), default=NONE),
                          "yes" if report["shares_gpus"] else "no"])
    if lines:
        print("\n## A whole layer through the service\n\nMedians over each client's calls, then over the clients; a"
              " call is a graph of eight layers. Compute: a batch's experts alone, of the slowest server (in records before 2026-11-24 its time from"
              " reception to answer); server: from reception to answer. Gain: tokens per second beside those of one client alone.")
        table("clients_→_servers preset wire tokens: layer_µs: compute_µs: ratio: aim: met server_µs: server_ratio:"
              " clients_per_batch: gain:"
              " calls: GPUs_shared", lines)


def kills(run, aims):
    """service-kill.json: the same with `--kill`."""
    for report in run.service.values():
        killed = report.get("killed")
        if not killed:
            continue
        stall, ratio, wrong = killed["stall_us"] * 1e-3, killed["ratio"], killed["wrong"]
        print(f"\n## One of {report['servers']} servers that replicate each other killed under load"
              f"\n\n{report['preset']}, {killed['tokens']} tokens, {killed['with_kill']['calls']} calls,"
              f" {killed['failovers']} failover(s), {killed['resent_pairs']} pairs sent again. One server alone gave"
              f" {killed['one_server_calls_per_s']:.1f} calls/s, in its second run {killed['one_server_ratio']:.3f} of"
              " its first.")
        for death in filter(None, killed.get("deaths", [])):
            into, again, answered = (death[key] * 1e-3 for key in ("into_call_us", "sent_again_us", "answered_us"))
            print(f"Killed {abs(into):.2f} ms {'into' if into >= 0 else 'before'} a call, whose pairs were sent again {again:.2f} ms after the kill and"
                  f" answered {answered:.2f} ms later.")
        table("what found: aim: met", [
            ["tokens lost or doubled, calls", wrong, *aims.cells("tokens after a kill", wrong, "0", wrong == 0)],
            ["stall, ms", number(stall), *aims.at_most("stall after a kill", stall, STALL_MS)],
            ["afterwards, of one server alone", number(ratio, 3),
             *aims.at_least("throughput after a kill", ratio, AFTER_KILL_RATIO)]])


def proxy(run, aims):
    """proxy-local.txt and proxy-relay.txt: `benchmark_local` and `benchmark_relay`."""
    of = {bench: [row for row in run.proxy if row["bench"] == bench] for bench in PROXY_BENCHES}
    reads = [row["latency"]["p50_us"] for row in of["read"]]
    rates, trips = of["rate"], of["round_trip"]
    if rates or trips or of["idle"]:
        print("\n## The proxy\n\nCommands from a GPU to threads of the host, medians. One way: from the push to the"
              " post by two clocks, which may be wrong by ±; without it, a round trip less half a look of the GPU at"
              " the host's memory, which is the least that the way back takes.")
    # Batches, budgets and lanes are free choices, so the best combination counts.
    four = sorted((row for row in rates if row["threads"] == 4), key=lambda row: row["mops"])
    best = {row["post"]: row for row in four}
    lines = []
    for row in rates:
        is_best = best.get(row["post"]) is row
        aim = aims.at_least(f"proxy, {row['post']}", row["mops"], PROXY_RATE_M) if is_best else [NONE] * 2
        # Without a post no bytes move.
        moved = NONE if row["post"] == "null" else number(row["gbps"], 0)
        lines.append([row["threads"], row["lanes"], row["batch"], row["budget"], row["post"], number(row["mops"], 2),
                      *aim, moved, number(row["latency"]["p50_us"]), number(row["latency"]["p99_us"])])
    table("threads: lanes_each: batch: budget: post million/s: aim: met Gbit/s: p50_µs: p99_µs:", lines)
    first, ways = {}, {(row["threads"], row["lanes"]): row for row in reversed(of["one_way"])}
    for row in trips:
        first.setdefault((row["threads"], row["lanes"], row["post"]), row)
    found = []
    for (threads, lanes, post), row in first.items():
        way, us = ways.get((threads, lanes)), row["latency"]["p50_us"]
        one_way, doubt = None, ""
        # Copies of the payload are not part of a command's path.
        if post == "null" and way:
            one_way, doubt = way["latency"]["p50_us"], f" ± {way['clock']['uncertainty_us']:.2f}"
        elif post == "null" and reads:
            one_way = us - min(reads) / 2
        found.append(([threads, lanes, post, number(us, 2), number(one_way, 2) + doubt], one_way))
    quickest = min((one_way for _, one_way in found if one_way is not None), default=None)
    lines = [cells + (aims.at_most("proxy, one way", one_way, PROXY_ONE_WAY_US)
                      if one_way is not None and one_way == quickest else [NONE] * 2) for cells, one_way in found]
    table("threads: lanes_each: post round_trip,_µs: one_way,_µs: aim: met", lines)
    table("idle_threads: lanes_each: %_of_a_processor_each: aim: met",
          [[row["threads"], row["lanes"], number(row["cpu_percent_per_thread"], 2),
            *aims.at_most("idle proxy", row["cpu_percent_per_thread"], PROXY_IDLE_PERCENT)]
           for row in of["idle"]])
    if of["peer_copy"]:
        print("\nThe copy of a relay to a further GPU:")
    table("copies: bytes_each: µs_per_batch: GB/s:",
          [[row["copies"], row["bytes"], number(row["batch_us"]), number(row["gb_per_s"])] for row in of["peer_copy"]])
    for row in of["relay"]:
        print(f"\nBehind a proxy, {row['objects']} objects of 10,752 bytes from memory of the host, each with an add to"
              f" a counter behind it: {row['mops']:.2f} million/s, {row['gbps']:.0f} Gbit/s.")


def correctness(run):
    """Number of failed cases, in all sections."""
    layers = run.of("moe")
    wrong = sum(map(is_bad, layers))
    if layers:
        print(f"\n{len(layers)} cases of layers, {wrong} with wrong values or errors.")
    puts_wrong = sum(bool(row.get("error") or row.get("bad")) for row in run.rows
                     if row["bench"] in ("put_flag", "put_bw", "put_bulk"))
    if puts_wrong:
        print(f"\n{puts_wrong} cases of puts with wrong values or errors.")
    objects_wrong = sum(row.get("bad", 0) for row in run.proxy)
    if objects_wrong:
        print(f"\n{objects_wrong} objects of the proxy are wrong.")
    calls_wrong = sum(killed["wrong"] for report in run.service.values() if (killed := report.get("killed")))
    return wrong + puts_wrong + objects_wrong + calls_wrong


def layer_keys(run):
    """Shapes in the order of the run, sizes within each. Includes cases that only other libraries have."""
    keys = [*run.layers, *((shape, tokens) for _, shape, tokens in run.others)]
    shapes = list(dict.fromkeys(shape for shape, _ in keys))
    return sorted(set(keys), key=lambda key: (shapes.index(key[0]), key[1]))


def layer_aim(shape, tokens):
    # If client and server are one process, no bytes cross a link.
    return LAYER_US.get((shape, tokens), ONE_TOKEN_US if tokens == 1 and shape != "1r" else None)


def other_cells(run, key):
    nccl, symmetric, deepep = (run.others.get((what, *key)) for what in ("nccl", "torch symmetric memory", "deepep"))
    return [number(nccl), number(symmetric), number(deepep) if run.has_deepep else DEEPEP_US.get(key, NONE)]


def is_bad(row):
    return bool(row.get("wrong")) or row.get("error", [0, 0]) != [0, 0]


def layer_cell(row):
    if row is None:
        return NONE
    return number(row["median_us"]) + (" WRONG" if is_bad(row) else "")


def judged_us(row):
    """A failed case reaches no target."""
    return NEVER if is_bad(row) else row["median_us"]


def is_split(report, senders, receivers):
    return any((row["senders"], row["receivers"]) == (senders, receivers) for row in report["rows"])


def number(value, digits=1):
    return NONE if value is None else f"{value:.{digits}f}"


def table(heads, lines):
    """`heads`: names with _ for spaces, those of numbers with a colon behind."""
    if not lines:
        return
    heads = heads.split()
    print("\n| " + " | ".join(head.removesuffix(":").replace("_", " ") for head in heads) + " |")
    print("|" + "|".join("---:" if head.endswith(":") else "---" for head in heads) + "|")
    for line in lines:
        print("| " + " | ".join(map(str, line)) + " |")


NONE = "–"
NEVER = float("inf")
ECHO, LISTS = ("fp8", "uniform", "echo"), ("fp8", "uniform", "lists")
PROXY_BENCHES = ("check", "read", "one_way", "rate", "round_trip", "idle", "peer_copy", "relay")

if __name__ == "__main__":
    sys.exit(main())
