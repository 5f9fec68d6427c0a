"""Builds the distribution ``switchyard-moe``: the Python package, its native module, and the binary ``switchyard``.

As a PEP 517 backend it builds the binary with cargo, and leaves the rest to maturin. For tests,
``python switchyard_build.py pack`` makes a wheel of a module and a binary that are built already.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parents[1]
WORKSPACE = PYTHON.parent
NAME = "switchyard_moe"
# Features of the binary beside its default ones. The module has `cuda` as well.
FEATURES = "SWITCHYARD_WHEEL_FEATURES"
# Folders of the workspace that neither the module nor the binary needs.
NOT_IN_SDIST = ("bench/runs/", "data/", "deploy/", "docs/", "examples/", "fuzz/", "python/tests/", ".ci/")


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return []


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    return []


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    import maturin

    root = Path.cwd()
    workspace = root if (root / "cli").is_dir() else WORKSPACE
    scripts = root / "data" / "scripts"
    build_binary(workspace, scripts)
    try:
        return maturin.build_wheel(wheel_directory, module_settings(config_settings), metadata_directory)
    finally:
        shutil.rmtree(root / "data", ignore_errors=True)


def module_settings(config_settings: dict[str, Any] | None) -> dict[str, Any]:
    """Add the kernels for GPUs to what maturin builds, if the binary has them."""
    settings = dict(config_settings or {})
    if "cuda" in re.split(r"[ ,]+", os.environ.get(FEATURES, "")):
        settings["build-args"] = f"{settings.get('build-args', '')} --features cuda".strip()
    return settings


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Pack what the module and the binary are built from: the crates of the workspace and this package."""
    version = workspace_version()
    base = f"{NAME}-{version}"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=WORKSPACE, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split("\0")
    path = Path(sdist_directory) / f"{base}.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(filter(None, listed)):
            if not name.startswith(NOT_IN_SDIST):
                archive.add(WORKSPACE / name, f"{base}/{name}", recursive=False)
        add(archive, f"{base}/pyproject.toml", sdist_pyproject())
        add(archive, f"{base}/PKG-INFO", metadata(version))
    return path.name


def build_binary(workspace: Path, scripts: Path) -> None:
    """Build the binary in release and put it into ``scripts``, without debug information."""
    cargo = [os.environ.get("CARGO", "cargo"), "build", "--release", "--locked"]
    cargo += ["--manifest-path", str(workspace / "Cargo.toml"), "--package", "switchyard-cli", "--bin", "switchyard"]
    features = os.environ.get(FEATURES)
    if features:
        cargo += ["--features", features]
    subprocess.run(cargo, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", workspace / "target"))
    scripts.mkdir(parents=True, exist_ok=True)
    shutil.copy2(target / "release" / "switchyard", scripts / "switchyard")
    subprocess.run(["strip", str(scripts / "switchyard")], check=True)


def pack(module: Path, binary: Path, folder: Path) -> Path:
    """Make a wheel for this host only of a module and a binary that are built already."""
    version = workspace_version()
    info = f"{NAME}-{version}.dist-info"
    tag = "cp310-abi3-linux_x86_64"
    files: dict[str, tuple[bytes, bool]] = {}
    for path in sorted((PYTHON / NAME).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".pyi", ".typed"):
            files[path.relative_to(PYTHON).as_posix()] = (path.read_bytes(), False)
    files[f"{NAME}/_native.abi3.so"] = (module.read_bytes(), True)
    files[f"{NAME}-{version}.data/scripts/switchyard"] = (binary.read_bytes(), True)
    files[f"{info}/METADATA"] = (metadata(version), False)
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: switchyard_build\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        False,
    )
    files[f"{info}/entry_points.txt"] = (entry_points(), False)
    record = io.StringIO()
    for name, (data, _) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.write(f"{name},sha256={digest},{len(data)}\n")
    record.write(f"{info}/RECORD,,\n")
    files[f"{info}/RECORD"] = (record.getvalue().encode(), False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{version}-{tag}.whl"
    # Stored, not compressed: packing and installing then take a fraction of the time.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, (data, is_executable) in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if is_executable else 0o100644) << 16
            archive.writestr(entry, data)
    return path


def project() -> dict[str, Any]:
    import tomllib

    return tomllib.loads((PYTHON / "pyproject.toml").read_text())["project"]


def metadata(version: str) -> bytes:
    table = project()
    lines = ["Metadata-Version: 2.1", f"Name: {table['name']}", f"Version: {version}"]
    lines += [f"Summary: {table['description']}", f"Requires-Python: {table['requires-python']}"]
    lines += [f"License: {table['license']}"]
    lines += [f"Classifier: {classifier}" for classifier in table["classifiers"]]
    lines += [f"Requires-Dist: {requirement}" for requirement in table.get("dependencies", [])]
    for extra, requirements in table.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in requirements]
    return ("\n".join(lines) + "\n").encode()


def entry_points() -> bytes:
    table = project()
    groups = dict(table.get("entry-points", {}))
    if "scripts" in table:
        groups["console_scripts"] = table["scripts"]
    text = ""
    for group, entries in groups.items():
        text += f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items()) + "\n"
    return text.encode()


def workspace_version() -> str:
    text = (WORKSPACE / "Cargo.toml").read_text()
    found = re.search(r'^\[workspace\.package\]\s*^version = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{WORKSPACE / 'Cargo.toml'} has no [workspace.package] that begins with a version")
    return found[1]


def sdist_pyproject() -> bytes:
    """Return the project's file for the root of an sdist, where the workspace is."""
    text = (PYTHON / "pyproject.toml").read_text()
    text = text.replace('backend-path = ["build_backend"]', 'backend-path = ["python/build_backend"]')
    text = text.replace('python-source = "."', 'python-source = "python"\nmanifest-path = "python/Cargo.toml"')
    return text.encode()


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs what is built already, or an sdist.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make a wheel of a module and a binary")
    packing.add_argument("--module", type=Path, required=True)
    packing.add_argument("--binary", type=Path, required=True)
    packing.add_argument("--out", type=Path, required=True)
    sdist = commands.add_parser("sdist", help="make an sdist")
    sdist.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "pack":
        print(pack(arguments.module, arguments.binary, arguments.out))
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        print(arguments.out / build_sdist(str(arguments.out)))


if __name__ == "__main__":
    sys.exit(main())
