"""The plot of the engines' benchmark."""

from __future__ import annotations

import os
import random
import secrets
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from switchyard_moe.bench import engine

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_long_as_their_times() -> None:
    seed = int(os.environ.get("SWITCHYARD_TEST_SEED") or secrets.randbits(32))
    print(f"SWITCHYARD_TEST_SEED={seed}")
    generator = random.Random(seed)
    parts: dict[str, dict[str, float]] = {mode: dict.fromkeys(engine.PARTS, 0.0) for mode in engine.MODES}
    parts["local"]["experts_s"] = generator.uniform(0.1, 1.0)
    served = parts["served"]
    for part in ("dispatch_s", "combine_s", "queue_s", "compute_s"):
        served[part] = generator.uniform(0.1, 1.0)
    served["wait_s"] = served["queue_s"] + served["compute_s"] + generator.uniform(0.1, 1.0)
    served["experts_s"] = served["dispatch_s"] + served["wait_s"] + served["combine_s"] + generator.uniform(0.1, 1.0)
    seconds = {mode: parts[mode]["experts_s"] + generator.uniform(0.1, 1.0) for mode in engine.MODES}
    result: dict[str, Any] = {
        "engine": "vllm",
        "batch": 8,
        "dtype": "float32",
        "tokens": 64,
        "served_over_local": seconds["local"] / seconds["served"],
        "seconds": seconds,
        "parts": parts,
    }
    root = ElementTree.fromstring(engine.draw(result))
    bars: dict[str, float] = {}
    for bar in root.iter(f"{SVG}rect"):
        if bar.get("height") == "40":
            bars[bar.attrib["y"]] = bars.get(bar.attrib["y"], 0.0) + float(bar.attrib["width"])
    lengths = [bars[y] for y in sorted(bars, key=float)]
    longest = max(seconds.values())
    assert lengths == pytest.approx([700 * seconds[mode] / longest for mode in engine.MODES], abs=0.5)
