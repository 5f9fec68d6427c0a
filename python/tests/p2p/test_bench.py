"""`python -m switchyard_moe.bench p2p`: its report, and what it says without another library."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from peers import LIMIT


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "switchyard_moe.bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=5 * LIMIT, check=False)


def test_a_short_run_writes_all_reports(tmp_path: Path) -> None:
    report, table, plot = tmp_path / "report.json", tmp_path / "rows.csv", tmp_path / "plot.svg"
    files = ["--json", str(report), "--csv", str(table), "--plot", str(plot)]
    ran = bench("p2p", "--sizes", "4K,1M", "--rounds", "1", "--seconds", "0.01", "--pool", "8M", *files)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(report.read_text())["rows"]
    found = {(row["transport"], row["op"], row["bytes"], row["memory"]) for row in rows}
    assert len(found) == len(rows) == 3 * 2 * 2 * 2
    assert all(row["median_us"] > 0 and row["num"] >= 5 for row in rows)
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert plot.read_text().startswith("<svg") and "switchyard cma" in plot.read_text()


def test_a_missing_library_is_named_with_its_remedy() -> None:
    ran = bench("p2p", "--sizes", "4K", "--rounds", "1", "--seconds", "0.01", "--pool", "1M", "--peer", "ucx:auto")
    if "ucx auto" not in ran.stdout:
        assert ran.returncode == 1
        assert "SKIPPED: ucx" in ran.stderr and "pip install ucxx" in ran.stderr
    assert "switchyard cma" in ran.stdout


def test_wrong_arguments_are_refused() -> None:
    for args in (["p2p", "--peer", "pigeon"], ["p2p", "--sizes", "4X"], ["pigeon"], []):
        assert bench(*args).returncode == 2
    assert "nixl" in bench("p2p", "--help").stdout
