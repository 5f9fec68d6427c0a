"""Installs the engines that the tests run: vLLM, transformers and, on request, SGLang and the next vLLM.

Usage: python3.11 install.py [--sglang] [--vllm-next] [--folder FOLDER]

Everything comes from PyPI and is pinned by hash. The environment needs 2.8 GiB and lies in the user's cache, in a
folder that is named after the pins. The script prints that folder and does nothing more if it is complete. Exit
code 3: this host cannot have it; the last line of standard error says why.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from cuda_stubs import write_stubs

HERE = Path(__file__).parent
MAIN, SGLANG, VLLM_NEXT = "requirements.txt", "requirements-sglang.txt", "requirements-vllm-next.txt"
# Bytes on disk, with the downloaded wheels that pip unpacks meanwhile.
NEEDED_BYTES = 5 << 30
CANNOT = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", action="store_true", help="install SGLang too")
    parser.add_argument("--vllm-next", action="store_true", help="install the next vLLM's Python files too")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        install(arguments.folder, arguments.sglang, arguments.vllm_next)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the engines cannot be installed: {error}", file=sys.stderr)
        return CANNOT
    print(arguments.folder)
    return 0


def default_folder() -> Path:
    """Returns the folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    pins = b"".join((HERE / name).read_bytes() for name in (MAIN, SGLANG, "cuda_stubs.py"))
    return Path(cache) / "switchyard" / f"engines-{hashlib.sha256(pins).hexdigest()[:12]}"


def install(folder: Path, sglang: bool, vllm_next: bool) -> None:
    """Makes `folder` complete: `venv/`, and if asked for, `sglang/` and `vllm-next/`, folders for PYTHONPATH."""
    if not (folder / "venv.complete").exists():
        check_host(folder)
        shutil.rmtree(folder / "venv", ignore_errors=True)
        venv.create(folder / "venv", with_pip=True)
        pip(folder, MAIN)
        library = next((folder / "venv/lib").glob("python3*")) / "site-packages/torch/lib"
        write_stubs(library)
        (folder / "venv.complete").touch()
    if sglang and not (folder / "sglang.complete").exists():
        shutil.rmtree(folder / "sglang", ignore_errors=True)
        pip(folder, SGLANG, "--target", str(folder / "sglang"))
        (folder / "sglang.complete").touch()
    pins = (HERE / VLLM_NEXT).read_text()
    mark = folder / "vllm-next.complete"
    if vllm_next and not (mark.exists() and mark.read_text() == pins):
        add_vllm_next(folder)
        mark.write_text(pins)


def add_vllm_next(folder: Path) -> None:
    """Writes the next vLLM's Python files into `vllm-next/`, with the compiled code of the environment's vLLM."""
    target = folder / "vllm-next"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pip(folder, VLLM_NEXT, "--dest", temporary, command="download")
        with zipfile.ZipFile(next(Path(temporary).glob("vllm-*.whl"))) as wheel:
            kept = [name for name in wheel.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name]
            wheel.extractall(target, kept)
    compiled = next((folder / "venv/lib").glob("python3*")) / "site-packages/vllm"
    for library in compiled.glob("*.so"):
        (target / "vllm" / library.name).symlink_to(library)


def pip(folder: Path, requirements: str, *arguments: str, command: str = "install") -> None:
    # Without --no-deps, packages that need torch bring the nvidia-* wheels and triton, another 3.4 GiB.
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir", "--quiet"]
    program = [folder / "venv/bin/python", "-m", "pip", command, "--disable-pip-version-check", *options, *arguments]
    subprocess.run([*program, "-r", HERE / requirements], check=True, stdout=sys.stderr)


def check_host(folder: Path) -> None:
    """Raises OSError with the reason if the pinned wheels do not fit this host."""
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    if sys.version_info[:2] != (3, 11) or found.split()[0] != "CPython" or platform.machine() != "x86_64":
        raise OSError(f"the pins are for CPython 3.11 on x86_64, found {found}")
    for program in ("cc", "nm", "readelf"):
        if shutil.which(program) is None:
            raise OSError(f"{program} is missing, which writes stand-ins for CUDA libraries: install gcc and binutils")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise OSError(f"{folder} has {free >> 20} MiB free, expected {NEEDED_BYTES >> 20}")


if __name__ == "__main__":
    sys.exit(main())
