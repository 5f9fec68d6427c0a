#!/usr/bin/env python3
"""Rates of a library's dense products on random values, one JSON line each: peak.py [--size N]

Reports medians of 200 products, like expert_test. As there, fp8 values are random codes except NaN. Other values would
make a GPU at its power limit faster.
"""

import argparse
import json
import statistics

import torch


def median_s(product):
    for _ in range(5):
        product()
    times = []
    for _ in range(200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        product()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def codes(size):
    bits = torch.randint(0, 256, (size, size), dtype=torch.uint8, device="cuda")
    bits[bits & 0x7F == 0x7F] = 0
    return bits.view(torch.float8_e4m3fn)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=8192)
    size = parser.parse_args().size
    a = torch.rand(size, size, device="cuda") * 2 - 1
    b = torch.rand(size, size, device="cuda") * 2 - 1
    x, y = a.bfloat16(), b.bfloat16().t()
    p, q = codes(size), codes(size).t()
    one = torch.ones((), device="cuda")

    def fp8():
        return torch._scaled_mm(p, q, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    for name, product in (("bf16", lambda: torch.matmul(x, y)), ("fp8", fp8)):
        rate = 2.0 * size**3 / median_s(product) * 1e-12
        print(json.dumps({"bench": "dense", "dtype": name, "size": size, "tflop_per_s": round(rate, 1)}), flush=True)


if __name__ == "__main__":
    main()
