"""The ``switchyard`` binary that comes with this package."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from switchyard_moe._errors import ConfigError

__all__ = ["find_binary"]


def find_binary() -> str:
    """Return the path of the ``switchyard`` binary.

    It is looked for in this order: ``SWITCHYARD_BINARY``, beside the interpreter and in the scripts folders of this
    installation, on the search path.

    :raises ConfigError: there is none.
    """
    named = os.environ.get("SWITCHYARD_BINARY")
    if named:
        if os.access(named, os.X_OK):
            return named
        raise ConfigError(f"SWITCHYARD_BINARY is {named!r}, which is no program; expected the path of `switchyard`")
    package = Path(__file__).resolve().parent
    folders = [
        Path(sysconfig.get_path("scripts")),
        Path(sysconfig.get_path("scripts", "posix_user")),
        # `pip install --target`: scripts lie in `bin` beside the packages.
        package.parent / "bin",
        Path(sys.executable).parent,
    ]
    for folder in folders:
        path = folder / "switchyard"
        if os.access(path, os.X_OK):
            return str(path)
    found = shutil.which("switchyard")
    if found is None:
        raise ConfigError(
            "the program `switchyard` is not installed: install the wheel of switchyard-moe, or set SWITCHYARD_BINARY "
            "to its path"
        )
    return found
