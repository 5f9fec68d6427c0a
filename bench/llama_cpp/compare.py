#!/usr/bin/env python3
"""Times `switchyard bench moe` and llama.cpp in turns, on the models of make_models.py.

    compare.py MODELS_DIR SWITCHYARD OUT.jsonl [--rounds N] [--threads N]
    compare.py --summary OUT.jsonl

Needs llama-cpp-python and numpy. Each round appends one line per measurement to OUT.jsonl. `--summary` prints medians
over the rounds and ratios of neighbours.

llama.cpp has no figure for experts alone. *difference*: the same batches on the model with thin experts, so that
attention, router and all else cancel: (full - thin) / layers / (1 - thin width / width). *top-k*, for one token only:
(time with 8 experts - time with 1) / layers / 7 * 8. Batches have the number of distinct experts that those of
`bench moe` have in the median.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

PAIRS = {"bf16": "BF16", "fp8": "Q8_0", "int4": "Q4_0", "mxfp4": "Q4_0"}
LAYERS, WIDTH, THIN_WIDTH, TOP_K = 2, 768, 32, 8
REPEATS = {1: 40, 16: 7, 64: 4}


def service(binary, folder, threads, seconds):
    command = [binary, "bench", "moe", "--json", "--model", folder, "--threads", str(threads)]
    command += ["--tokens", ",".join(map(str, REPEATS)), "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["rows"]


def batch(rng, picks, tokens, distinct):
    """Tokens of the first half of the vocabulary whose experts are so many."""
    while True:
        some = [rng.randrange(2, len(picks) // 2) for _ in range(tokens)]
        if len({expert for token in some for expert in picks[token]}) == distinct:
            return some


def worker(models, kind, threads, targets):
    """Runs in a process of its own. Prints milliseconds a layer by number of tokens."""
    from llama_cpp import Llama

    def load(name, top_k):
        return Llama(
            f"{models}/{name}.gguf",
            n_ctx=512,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            n_ubatch=512,
            verbose=False,
            # Without it the last layer computes the last token alone.
            logits_all=True,
            kv_overrides={"qwen3moe.expert_used_count": top_k},
        )

    def milliseconds(model, tokens):
        model.reset()
        start = time.perf_counter()
        model.eval(tokens)
        return (time.perf_counter() - start) * 1e3

    full, thin, one = load(kind, TOP_K), load(f"{kind}-thin", TOP_K), load(kind, 1)
    with open(f"{models}/experts.json", encoding="utf-8") as file:
        picks = json.load(file)
    rng, rows = random.Random(time.time_ns()), []
    for tokens, distinct in targets.items():
        samples = []
        for _ in range(REPEATS[tokens] + 2):
            some = batch(rng, picks, tokens, distinct)
            samples.append([milliseconds(model, some) for model in (full, thin, one)])
        whole, rest, single = (statistics.median(column) for column in zip(*samples[2:]))
        row = {"tokens": tokens, "experts": distinct, "full_ms": whole, "thin_ms": rest}
        row["difference_ms"] = (whole - rest) / LAYERS / (1 - THIN_WIDTH / WIDTH)
        if tokens == 1:
            row["top1_ms"] = single
            row["topk_ms"] = (whole - single) / LAYERS / (TOP_K - 1) * TOP_K
        rows.append(row)
    print(json.dumps(rows))


def measure(args):
    with open(args.out, "a", encoding="utf-8") as out:
        for _ in range(args.rounds):
            for ours, theirs in PAIRS.items():
                rows = service(args.switchyard, f"{args.models}/{ours}", args.threads, args.seconds)
                targets = {row["tokens"]: int(row["experts_p50"]) for row in rows}
                command = [sys.executable, __file__, "--worker", args.models, theirs]
                command += ["--threads", str(args.threads), "--targets", json.dumps(targets)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                line = {"ours": ours, "theirs": theirs, "threads": args.threads}
                line |= {"switchyard": rows, "llama_cpp": json.loads(done.stdout)}
                out.write(json.dumps(line) + "\n")
                out.flush()


def summary(path):
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    print("| ours | llama.cpp | tokens | experts | in process ms | service ms | llama.cpp ms | in process ÷ | service ÷ |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for ours, theirs in PAIRS.items():
        rounds = [line for line in lines if line["ours"] == ours]
        for idx, tokens in enumerate(REPEATS):
            for figure in ("topk_ms", "difference_ms"):
                cells = [(l["switchyard"][idx], l["llama_cpp"][idx]) for l in rounds]
                if not cells or figure not in cells[0][1]:
                    continue
                name = f"{theirs}, {'top-k' if figure == 'topk_ms' else 'difference'}"
                local = [a["in_process_us_p50"] / 1e3 for a, _ in cells]
                remote = [a["service_us_p50"] / 1e3 for a, _ in cells]
                other = [b[figure] for _, b in cells]
                ratios = [
                    statistics.median(a / b for a, b in zip(some, other)) for some in (local, remote)
                ]
                columns = [statistics.median(some) for some in (local, remote, other)]
                text = " | ".join(f"{value:.2f}" for value in columns + ratios)
                print(f"| {ours} | {name} | {tokens} | {cells[0][1]['experts']} | {text} |")


def main():
    if sys.argv[1] == "--summary":
        return summary(sys.argv[2])
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("models")
    parser.add_argument("switchyard", help="path of the binary")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--targets", type=json.loads)
    args = parser.parse_args()
    if args.worker:
        targets = {int(tokens): distinct for tokens, distinct in args.targets.items()}
        return worker(args.models, args.switchyard, args.threads, targets)
    return measure(args)


if __name__ == "__main__":
    main()
