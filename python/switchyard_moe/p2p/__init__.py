"""Messages, one-sided reads and writes, and notifications between processes.

`Endpoint` has the method names of UCCL P2P, over Switchyard's message engine. `collective` has copy-only collectives
and point-to-point calls by rank. `compression` has a lossless codec for arrays of floats.
"""

from __future__ import annotations

from switchyard_moe.p2p._base import ConnectionInfo
from switchyard_moe.p2p._endpoint import Endpoint, Notification
from switchyard_moe.p2p._errors import (
    ArgumentError,
    ClosedError,
    CodecError,
    ConfigError,
    ConnectError,
    Error,
    ForkedError,
    MemoryRegionError,
    PeerError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
    TruncatedError,
)

__all__ = [
    "ArgumentError",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "ConnectError",
    "ConnectionInfo",
    "Endpoint",
    "Error",
    "ForkedError",
    "MemoryRegionError",
    "Notification",
    "PeerError",
    "PeerLostError",
    "TransferError",
    "TransferTimeoutError",
    "TruncatedError",
]
