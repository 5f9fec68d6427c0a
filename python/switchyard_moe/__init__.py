"""Experts of Mixture-of-Experts models as a service.

:class:`Client` sends the tokens of a layer to expert servers and returns the weighted sums of their answers.
:class:`LocalCluster` starts a control plane and expert servers on this host, for tests and notebooks.

Importing this package starts nothing: no thread, no process, no connection.
"""

from __future__ import annotations

from switchyard_moe._client import Client
from switchyard_moe._errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    ClosedError,
    ClusterError,
    ConfigError,
    ControlPlaneError,
    ControlPlaneUnavailableError,
    Error,
    ForkedError,
    ModelMismatchError,
    NoReplicaError,
    NotReady,
    PeerError,
    RefusedError,
)
from switchyard_moe._native import Handle, Report, ServerReport, __version__
from switchyard_moe.cluster import LocalCluster

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BusyError",
    "Client",
    "ClosedError",
    "ClusterError",
    "ConfigError",
    "ControlPlaneError",
    "ControlPlaneUnavailableError",
    "Error",
    "ForkedError",
    "Handle",
    "LocalCluster",
    "ModelMismatchError",
    "NoReplicaError",
    "NotReady",
    "PeerError",
    "RefusedError",
    "Report",
    "ServerReport",
    "__version__",
]
