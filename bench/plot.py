#!/usr/bin/env python3
"""Plots of `switchyard bench p2p --json` with the message engine.

    bench/plot.py OUT.png REPORT.json [REPORT.json ...]

Each report becomes a set of lines, one per number of ranges (the smallest and the largest when there are
several reports): the median time of a transfer, and the bandwidth, by the bytes of a range. matplotlib
is installed into a virtual environment of the script's own (`$XDG_CACHE_HOME/switchyard/plot`) the first
time that it is missing.
"""

import json
import os
import pathlib
import subprocess
import sys
import venv


def with_matplotlib() -> None:
    """Makes `import matplotlib` work, if need be by running the script again elsewhere."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        home = pathlib.Path(cache) / "switchyard" / "plot"
        python = home / "bin" / "python"
        if pathlib.Path(sys.prefix) == home:
            sys.exit(f"matplotlib is missing in {home}: remove the folder and try again")
        if not python.exists():
            venv.create(home, with_pip=True)
        if subprocess.run([python, "-c", "import matplotlib"], capture_output=True).returncode:
            subprocess.run([python, "-m", "pip", "install", "-q", "matplotlib>=3.8,<4"], check=True)
        os.execv(python, [str(python), *sys.argv])


def lines(reports: list[dict]) -> list[tuple[str, list[dict]]]:
    """What is drawn: a name, and rows by size."""
    found = []
    for report in reports:
        numbers = sorted({row["num_iovs"] for row in report["rows"]})
        if len(reports) > 1:
            numbers = sorted({numbers[0], numbers[-1]})
        for number in numbers:
            rows = [row for row in report["rows"] if row["num_iovs"] == number]
            ranges = "1 range" if number == 1 else f"{number} ranges"
            name = f"{report['transport']} {report['mode']}, {ranges}"
            found.append((name, sorted(rows, key=lambda row: row["bytes"])))
    return found


def size(number: float, _: int = 0) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:g} {unit}"
        number /= 1024
    return f"{number:g} GiB"


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports = [json.loads(pathlib.Path(path).read_text()) for path in sys.argv[2:]]
    figure, (latency, bandwidth) = pyplot.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    for name, rows in lines(reports):
        sizes = [row["bytes"] for row in rows]
        latency.plot(sizes, [row["us_p50"] for row in rows], marker=".", label=name)
        bandwidth.plot(sizes, [row["gb_per_s"] for row in rows], marker=".", label=name)
    for axes, title, unit in [
        (latency, "Median time of a transfer", "µs"),
        (bandwidth, "Bandwidth", "GB/s"),
    ]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(size)
        axes.set_title(title)
        axes.set_xlabel("bytes of a range")
        axes.set_ylabel(unit)
        axes.grid(True, alpha=0.3)
    latency.set_yscale("log")
    latency.legend(fontsize="small")
    figure.savefig(sys.argv[1], dpi=110)
    print(sys.argv[1])


if __name__ == "__main__":
    main()
