"""Exceptions of `switchyard_moe.p2p`, below those of the package."""

from __future__ import annotations

from switchyard_moe._errors import ArgumentError, ClosedError, ConfigError, Error, ForkedError, PeerError

__all__ = [
    "ArgumentError",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "ConnectError",
    "Error",
    "ForkedError",
    "MemoryRegionError",
    "PeerError",
    "PeerLostError",
    "TransferError",
    "TransferTimeoutError",
    "TruncatedError",
]


class TransferError(Error):
    """A transfer failed. The destination's content is undefined."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer, a connection or another wait did not end in time."""


class TruncatedError(TransferError):
    """A message is longer than the buffer of its receive. Nothing was written. Both sides get this error."""


class PeerLostError(TransferError, PeerError, ConnectionError):
    """The peer closed the connection, died, or broke the protocol."""


class ConnectError(PeerError, ConnectionError):
    """A connection could not be made."""


class MemoryRegionError(Error):
    """Memory could not be registered, or is still in use and could not be deregistered."""


class CodecError(Error, ValueError):
    """Bytes are no frame of the codec of floats. They may come from a peer."""
