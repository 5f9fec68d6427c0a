#!/usr/bin/env python3
"""Draws timelines of a layer, as `switchyard bench moe --device cuda --timeline --json` reports them, into an SVG.

    python3 bench/plot_timeline.py OUT.svg TITLE=FILE.json ...

draws one panel for each number of tokens of each file, all on one scale. Needs nothing but Python.
"""

import html
import json
import sys

ROW, LABEL, RIGHT, WIDTH, TOP = 16, 200, 110, 1000, 30
COLOURS = {"client": "#3b6fb6", "host": "#9a9a9a", "waits": "#c9d8c0", "server": "#4d9a4a"}
STARTS = "#e0c060"


def colour(step):
    if "host" in step["lane"]:
        return COLOURS["host"]
    if step["name"].endswith("starts"):
        return STARTS
    if step["name"] == "waits":
        return COLOURS["waits"]
    return COLOURS["client" if step["lane"] == "client" else "server"]


def panels(arguments):
    for argument in arguments:
        title, path = argument.split("=", 1)
        report = json.load(open(path))
        for row in report["rows"]:
            if row.get("timeline"):
                yield f"{title}, {row['tokens']} token(s)", row["timeline"]


def draw(found):
    longest = max(t["layer_us"] for _, t in found) * 1.1
    first = -0.12 * longest
    scale = (WIDTH - LABEL - RIGHT) / (longest - first)
    x = lambda us: LABEL + (min(max(us, first), longest) - first) * scale
    out, y = [], 0
    for title, timeline in found:
        steps = timeline["steps"]
        bottom = y + TOP + ROW * len(steps)
        out.append(
            f'<text x="4" y="{y + 18}" font-weight="bold">{html.escape(title)}: {timeline["layer_us"]:.1f} µs a layer'
            f' (medians of {timeline["layers"]}, ± {timeline["uncertainty_us"]:.1f} µs between GPUs)</text>'
        )
        for us in range(0, int(longest) + 1, 10):
            out.append(f'<line x1="{x(us):.1f}" x2="{x(us):.1f}" y1="{y + TOP}" y2="{bottom}" stroke="#ddd"/>')
            out.append(f'<text x="{x(us):.1f}" y="{bottom + 12}" text-anchor="middle" fill="#666">{us}</text>')
        end = timeline["layer_us"]
        out.append(f'<line x1="{x(end):.1f}" x2="{x(end):.1f}" y1="{y + TOP}" y2="{bottom}" stroke="#c00"/>')
        for i, step in enumerate(steps):
            at, begin, stop = y + TOP + ROW * i, x(step["begin_us"]), x(step["end_us"])
            name = html.escape(f'{step["lane"]}: {step["name"]}')
            out.append(f'<text x="{LABEL - 6}" y="{at + 12}" text-anchor="end">{name}</text>')
            out.append(
                f'<rect x="{begin:.1f}" y="{at + 2}" width="{max(stop - begin, 1):.1f}" height="{ROW - 4}"'
                f' fill="{colour(step)}"/>'
            )
            out.append(
                f'<text x="{WIDTH - RIGHT + 6}" y="{at + 12}">{step["begin_us"]:.1f} – {step["end_us"]:.1f}</text>'
            )
        y = bottom + 24
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *out, "</svg>", ""])


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    found = list(panels(sys.argv[2:]))
    if not found:
        sys.exit("no file has a timeline: expected the output of `bench moe --device cuda --timeline --json`")
    with open(sys.argv[1], "w") as out:
        out.write(draw(found))


if __name__ == "__main__":
    main()
