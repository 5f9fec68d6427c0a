"""The examples of the documentation run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to" / "python.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_how_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first, *rest = examples(HOW_TO)
    assert "LocalCluster" in first
    # Later examples go on with the cluster of the first one.
    body = first.splitlines()
    for text in rest:
        if "ClientCollector" in text:
            body += [f"    {line}" for line in text.splitlines()]
    names: dict[str, Any] = {}
    exec(compile("\n".join(body), str(HOW_TO), "exec"), names)
    assert names["report"].total_us > 0
    for text in rest:
        compile(text, str(HOW_TO), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
