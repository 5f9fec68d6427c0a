"""Tables, CSV and plots of `bench p2p`."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable
from typing import Any

_FIELDS = [
    "library",
    "transport",
    "round",
    "pages",
    "op",
    "bytes",
    "memory",
    "num",
    "median_us",
    "p10_us",
    "p99_us",
    "gb_per_s",
]


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    return (
        f"{row['library']:>10} {row['transport']:<5} {row['op']:<5} {_size(row['bytes']):>8} {row['memory']} "
        f"median {row['median_us']:10.1f} us, {row['gb_per_s']:6.2f} GB/s, p99 {row['p99_us']:10.1f} us"
    )


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The medians of the rounds in microseconds, by size and library."""
    rows = list(rows)
    contenders = list(dict.fromkeys(_contender(row) for row in rows))
    out = [f"{'median of rounds, us':<26}" + "".join(f"{contender:>18}" for contender in contenders)]
    for case in dict.fromkeys((row["bytes"], row["op"], row["memory"]) for row in rows):
        size, op, memory = case
        cells: list[str] = []
        for contender in contenders:
            found = [row["median_us"] for row in rows if _case(row) == case and _contender(row) == contender]
            cells.append(f"{statistics.median(found):18.1f}" if found else f"{'-':>18}")
        out.append(f"{_size(size):>8} {op:<6} {memory:<10}" + "".join(cells))
    return "\n".join(out)


def write_csv(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """All rows, with a header."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS)
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {name: f"{row[name]:.3f}" if isinstance(row[name], float) else row[name] for name in _FIELDS}
            )


def write_plot(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """One panel per operation and temperature: time by size, both logarithmic, as SVG."""
    rows = list(rows)
    if not rows:
        return
    contenders = list(dict.fromkeys(_contender(row) for row in rows))
    panels = list(dict.fromkeys((row["op"], row["memory"]) for row in rows))
    sizes = sorted({row["bytes"] for row in rows})
    times = [row["median_us"] for row in rows]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    width, height = 360, 260
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * 2}" '
        f'height="{height * math.ceil(len(panels) / 2) + 30}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for idx, panel in enumerate(panels):
        left, top = idx % 2 * width + 50, idx // 2 * height + 25
        inner_width, inner_height = width - 70, height - 60

        def x_of(size: int, left: int = left, span: int = inner_width) -> float:
            first, last = math.log2(sizes[0]), math.log2(sizes[-1])
            return left + span * (math.log2(size) - first) / max(last - first, 1)

        def y_of(time: float, top: int = top, span: int = inner_height) -> float:
            return top + span * (high - math.log10(time)) / max(high - low, 1)

        out.append(
            f'<text x="{left}" y="{top - 8}" font-weight="bold">{panel[0]}, {panel[1]} memory: median, us</text>'
        )
        for power in range(low, high + 1):
            y = y_of(10.0**power)
            out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + inner_width}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        for size in sizes:
            out.append(
                f'<text x="{x_of(size):.1f}" y="{top + inner_height + 16}" text-anchor="middle">{_size(size)}</text>'
            )
        for place, contender in enumerate(contenders):
            points: list[str] = []
            for size in sizes:
                mine = [r["median_us"] for r in rows if _case(r) == (size, *panel) and _contender(r) == contender]
                if mine:
                    points.append(f"{x_of(size):.1f},{y_of(statistics.median(mine)):.1f}")
            colour = _COLOURS[place % len(_COLOURS)]
            out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    bottom = height * math.ceil(len(panels) / 2) + 15
    for place, contender in enumerate(contenders):
        at = 50 + place * 130
        out.append(
            f'<line x1="{at}" y1="{bottom}" x2="{at + 18}" y2="{bottom}" stroke-width="2" '
            f'stroke="{_COLOURS[place % len(_COLOURS)]}"/>'
        )
        out.append(f'<text x="{at + 22}" y="{bottom + 4}">{contender}</text>')
    out.append("</svg>")
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n")


def _case(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["bytes"], row["op"], row["memory"]


def _contender(row: dict[str, Any]) -> str:
    return f"{row['library']} {row['transport']}"


def _size(size: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >> shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


_COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2"]
