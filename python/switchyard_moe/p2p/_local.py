"""How two processes of one host find each other by the name of a device."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from switchyard_moe.p2p._errors import ConfigError, TransferTimeoutError


def device_name(pci_bdf: str | None, engine_id: int) -> str:
    """Returns the PCI address of a GPU, or a name of the engine if it publishes no GPU."""
    return pci_bdf or f"cpu-{engine_id:016x}"


def publish(device: str, metadata: bytes) -> Path:
    """Publishes an endpoint of this process under the name of its device. Returns the file to remove later."""
    folder = _folder()
    path = folder / f"{_plain(device)}.{os.getpid()}"
    draft = folder / f".{os.getpid()}.{time.monotonic_ns()}"
    draft.write_bytes(metadata)
    draft.replace(path)
    return path


def find(device: str, timeout: float) -> list[bytes]:
    """Returns the metadata of the endpoints published under a name, the newest first. Waits until there is one."""
    end = time.monotonic() + timeout
    while True:
        found: list[tuple[int, bytes]] = []
        for path in _folder().glob(f"{_plain(device)}.*"):
            try:
                if _is_running(int(path.suffix[1:])):
                    found.append((path.stat().st_mtime_ns, path.read_bytes()))
                else:
                    path.unlink(missing_ok=True)
            except (OSError, ValueError):
                continue
        if found:
            return [metadata for _, metadata in sorted(found, reverse=True)]
        if time.monotonic() >= end:
            raise TransferTimeoutError(
                f"no process of this host has published {device!r} within {timeout} s: call accept_local() there, "
                "and give the third part of its parse_metadata()"
            )
        time.sleep(0.005)


def _folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"switchyard-p2p-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(f"{folder} belongs to another user or is open to others: remove it, or set XDG_RUNTIME_DIR")
    return folder


def _plain(device: str) -> str:
    return re.sub(r"[^0-9A-Za-z:_-]", "_", device)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
