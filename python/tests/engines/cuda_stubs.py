"""Writes stand-ins for the CUDA libraries that PyPI's torch is linked with, for hosts without a GPU.

`import torch` needs thirteen shared objects of nvidia-* wheels, about 2 GB. On a host without a GPU none of their
functions does anything. The stand-ins have the same sonames, version nodes and function names; every function
returns 100, CUDA's code for "no device".
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Not libcuda.so.1, the driver: a program that looks for it must not find a stand-in.
LIBRARIES = re.compile(r"lib(?!cuda\.)(?:cu[a-zA-Z]+|nccl|nvrtc|nvshmem_host)\.so\.\d+$")
FUNCTIONS = re.compile(r"_*(?:cu|nccl|nvrtc|nvshmem|nvml)", re.IGNORECASE)
# torchvision calls it while it is imported; torch does not name it.
EXTRA = {"libcudart.so.13": ["__cudaInitModule"]}


def write_stubs(folder: Path) -> list[str]:
    """Writes a stand-in into torch's library folder for each CUDA library that is missing there.

    Returns their sonames. Raises OSError if a program of binutils or the C compiler is missing, and
    CalledProcessError if one fails.
    """
    libraries = sorted(path for path in folder.glob("*.so") if path.is_file())
    wanted: dict[str, set[str]] = {}
    for library in libraries:
        for soname in _needed(library):
            if LIBRARIES.match(soname):
                wanted.setdefault(soname, set())
        for soname, version in _versions(library):
            if soname in wanted:
                wanted[soname].add(version)
    versioned, plain = _undefined(libraries)
    missing = [soname for soname in sorted(wanted) if not (folder / soname).exists()]
    for number, soname in enumerate(missing):
        nodes = sorted(wanted[soname])
        names = {name for name, version in versioned if version in nodes} | set(EXTRA.get(soname, ()))
        # A name without a version binds to any library.
        if number == 0:
            names |= plain
        _compile(folder / soname, sorted(names), nodes)
    return missing


def _compile(target: Path, names: list[str], nodes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work) / "stub.c", Path(work) / "stub.map"
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names) or "int unused;\n")
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(target), f"-Wl,-soname,{target.name}"]
        if nodes:
            script.write_text("".join(f"{node} {{ global: *; }};\n" for node in nodes))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, str(source)], check=True)


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-dW", library))


def _versions(library: Path) -> list[tuple[str, str]]:
    """Pairs of a soname and a version of it that ``library`` needs."""
    found, soname = [], ""
    for line in _output("readelf", "-VW", library).splitlines():
        if match := re.search(r"File: (\S+)", line):
            soname = match[1]
        elif soname and (match := re.search(r"Name: (\S+)", line)):
            found.append((soname, match[1]))
    return found


def _undefined(libraries: list[Path]) -> tuple[set[tuple[str, str]], set[str]]:
    """Undefined functions: pairs of a name and a version, and names of CUDA without a version."""
    versioned: set[tuple[str, str]] = set()
    plain: set[str] = set()
    for library in libraries:
        for name in _output("nm", "-D", "--undefined-only", "-P", library).splitlines():
            name, _, version = name.split()[0].partition("@")
            if version:
                versioned.add((name, version.lstrip("@")))
            elif FUNCTIONS.match(name):
                plain.add(name)
    return versioned, plain


def _output(program: str, *arguments: str | Path) -> str:
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print("\n".join(write_stubs(Path(sys.argv[1]))))
