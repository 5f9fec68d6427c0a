"""Builds the distribution ``switchyard-moe``: the Python package, its native module, and the binary ``switchyard``.

As a PEP 517 backend it builds the binary with cargo, and leaves the rest to maturin. ``python switchyard_build.py
release`` builds sdist and wheel against an old C library, and checks the wheel's tag and size. For tests, ``pack``
makes a wheel of a module and a binary that are built already.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parents[1]
WORKSPACE = PYTHON.parent
NAME = "switchyard_moe"
# Features of the binary beside its default ones. The module has `cuda` as well.
FEATURES = "SWITCHYARD_WHEEL_FEATURES"
# C library of a release, and the platform tag of wheels that need no newer one.
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}"
# Most bytes of a release's wheel.
MAX_WHEEL_BYTES = 40 << 20
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
    subprocess.run([*cargo, *features()], check=True)
    scripts.mkdir(parents=True, exist_ok=True)
    strip(target_folder(workspace) / "release" / "switchyard", scripts)


def features() -> list[str]:
    named = os.environ.get(FEATURES)
    return ["--features", named] if named else []


def target_folder(workspace: Path) -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", workspace / "target"))


def strip(built: Path, folder: Path) -> Path:
    """Copy an ELF file into ``folder`` without symbols. Return the copy's path."""
    copy = folder / built.name
    shutil.copy2(built, copy)
    subprocess.run(["strip", str(copy)], check=True)
    return copy


def release(folder: Path) -> Path:
    """Build the sdist and a wheel that installs on every Linux with ``GLIBC`` or later. Return the wheel's path.

    One run of cargo builds module and binary: maturin would compile everything a second time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(folder / build_sdist(str(folder)), flush=True)
    target = f"{platform.machine()}-unknown-linux-gnu"
    cargo = ["cargo-zigbuild", "zigbuild", "--release", "--locked", "--target", f"{target}.{GLIBC}"]
    cargo += ["--manifest-path", str(WORKSPACE / "Cargo.toml")]
    cargo += ["--package", "switchyard-cli", "--package", "switchyard-python", "--bin", "switchyard", "--lib"]
    named = os.environ.get(FEATURES)
    if named:
        cargo += ["--features", ",".join(f"switchyard-cli/{name}" for name in named.split(","))]
    subprocess.run(cargo, check=True)
    built = target_folder(WORKSPACE) / target / "release"
    with tempfile.TemporaryDirectory() as scratch:
        module = strip(built / "libswitchyard_moe_native.so", Path(scratch))
        binary = strip(built / "switchyard", Path(scratch))
        tag = f"cp310-abi3-{PLATFORM}_{platform.machine()}"
        wheel = pack(module, binary, folder, tag=tag, compression=zipfile.ZIP_DEFLATED)
    audit(wheel)
    return wheel


def audit(wheel: Path) -> None:
    """Check that the ELF files of a wheel need no more than its tag says, and its size."""
    show = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    shown = subprocess.run(show, check=True, stdout=subprocess.PIPE, text=True).stdout
    granted = json.loads(shown)["overall_tag"]
    expected = f"{PLATFORM}_{platform.machine()}"
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", granted)
    fits = found is not None and (int(found[1]), int(found[2])) <= tuple(map(int, GLIBC.split(".")))
    if not fits or not wheel.stem.endswith(expected):
        raise RuntimeError(f"{wheel.name} needs {granted}, expected at most {expected}; auditwheel says: {shown}")
    size = wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        raise RuntimeError(f"{wheel.name} has {size} bytes, expected at most {MAX_WHEEL_BYTES}")
    print(f"{wheel}: {size / (1 << 20):.1f} MiB; auditwheel grants {granted}")


def pack(module: Path, binary: Path, folder: Path, *, tag: str, compression: int) -> Path:
    """Make a wheel of a module and a binary that are built already."""
    version = workspace_version()
    info = f"{NAME}-{version}.dist-info"
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
    files[f"{info}/licenses/LICENSE"] = ((WORKSPACE / "LICENSE").read_bytes(), False)
    files[f"{info}/entry_points.txt"] = (entry_points(), False)
    record = io.StringIO()
    for name, (data, _) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.write(f"{name},sha256={digest},{len(data)}\n")
    record.write(f"{info}/RECORD,,\n")
    files[f"{info}/RECORD"] = (record.getvalue().encode(), False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, (data, is_executable) in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if is_executable else 0o100644) << 16
            archive.writestr(entry, data, compression)
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
    parser = argparse.ArgumentParser(description="Builds a release, or packs what is built already.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make a wheel of a module and a binary")
    packing.add_argument("--module", type=Path, required=True)
    packing.add_argument("--binary", type=Path, required=True)
    packing.add_argument("--out", type=Path, required=True)
    sdist = commands.add_parser("sdist", help="make an sdist")
    sdist.add_argument("--out", type=Path, required=True)
    releasing = commands.add_parser("release", help="build an sdist and a manylinux wheel")
    releasing.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "release":
        release(arguments.out.absolute())
    elif arguments.command == "pack":
        # Stored, not compressed: packing and installing then take a fraction of the time.
        tag = f"cp310-abi3-linux_{platform.machine()}"
        found = pack(arguments.module, arguments.binary, arguments.out, tag=tag, compression=zipfile.ZIP_STORED)
        print(found)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        print(arguments.out / build_sdist(str(arguments.out)))


if __name__ == "__main__":
    sys.exit(main())
