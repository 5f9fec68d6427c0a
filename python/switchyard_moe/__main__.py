"""``python -m switchyard_moe`` runs the ``switchyard`` binary."""

from __future__ import annotations

import os
import sys

from switchyard_moe._binary import find_binary
from switchyard_moe._errors import ConfigError


def main() -> None:
    """Replace this process by the binary, with the same arguments."""
    try:
        binary = find_binary()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    os.execv(binary, [binary, *sys.argv[1:]])


if __name__ == "__main__":
    main()
