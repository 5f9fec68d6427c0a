"""The source distribution: its files, and that cargo resolves it without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

WORKSPACE = Path(__file__).resolve().parents[2]
BUILD = WORKSPACE / "python" / "build_backend" / "switchyard_build.py"
# What a build reads beside manifests.
SOURCES = (".rs", ".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".typed")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def metadata(folder: Path) -> dict[str, Any]:
    # Crates of other systems are not in the cache of one that never built them.
    host = re.search(r"^host: (.+)$", run("rustc", "-vV", cwd=folder), re.MULTILINE)
    assert host is not None
    command = [os.environ.get("CARGO", "cargo"), "metadata", "--format-version", "1", "--locked", "--offline"]
    found: dict[str, Any] = json.loads(run(*command, "--filter-platform", host[1], cwd=folder))
    return found


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    path = Path(run(sys.executable, BUILD, "sdist", "--out", folder, cwd=WORKSPACE).strip())
    assert path.stat().st_size < 10 << 20
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.gz")


def test_every_source_of_every_crate_is_there(unpacked: Path) -> None:
    names = run("git", "ls-files", "-z", cwd=WORKSPACE).split("\0")
    folders = [Path(p["manifest_path"]).parent for p in metadata(WORKSPACE)["packages"] if p["source"] is None]
    crates = {str(folder.relative_to(WORKSPACE)) + "/" for folder in folders}
    assert "cli/" in crates
    wanted = [name for name in names if name.startswith(tuple(crates)) and name.endswith(SOURCES)]
    wanted = [name for name in wanted if not name.startswith("python/tests/")]
    assert len(wanted) > 100
    for name in [*wanted, "Cargo.toml", "Cargo.lock", "LICENSE", "README.md"]:
        assert (unpacked / name).read_bytes() == (WORKSPACE / name).read_bytes(), name


def test_cargo_resolves_it_without_a_network(unpacked: Path) -> None:
    packages = [package for package in metadata(unpacked)["packages"] if package["source"] is None]
    expected = [package["name"] for package in metadata(WORKSPACE)["packages"] if package["source"] is None]
    assert sorted(package["name"] for package in packages) == sorted(expected)
    for package in packages:
        assert Path(package["manifest_path"]).is_relative_to(unpacked)
        for target in package["targets"]:
            assert Path(target["src_path"]).is_file(), target["src_path"]


def test_its_project_file_names_what_is_there(unpacked: Path) -> None:
    text = (unpacked / "pyproject.toml").read_text()
    found = dict(re.findall(r'^(manifest-path|python-source) = "(.+)"$', text, re.MULTILINE))
    assert (unpacked / found["manifest-path"]).is_file()
    assert (unpacked / found["python-source"] / "switchyard_moe" / "py.typed").is_file()
    backend = re.search(r'^backend-path = \["(.+)"\]$', text, re.MULTILINE)
    assert backend is not None
    assert (unpacked / backend[1] / "switchyard_build.py").is_file()
    assert "\nName: switchyard-moe\n" in (unpacked / "PKG-INFO").read_text()
