"""The exceptions of this package."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BusyError",
    "ClosedError",
    "ClusterError",
    "ConfigError",
    "ControlPlaneError",
    "ControlPlaneUnavailableError",
    "Error",
    "ForkedError",
    "ModelMismatchError",
    "NoReplicaError",
    "NotReady",
    "PeerError",
    "RefusedError",
]


class Error(Exception):
    """Base of all exceptions of this package. Its text names what was found and what was expected."""


class ConfigError(Error, ValueError):
    """A setting is malformed or out of range."""


class ArgumentError(Error, ValueError):
    """An argument of a call has a wrong shape, stride, device or value. Nothing was sent."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is no array, or has an element type that the call does not take. Nothing was sent."""


class ClosedError(Error):
    """The object was closed before."""


class ForkedError(Error):
    """The object belongs to the process that this one was forked off. Make a new object in this process."""


class ControlPlaneError(Error, ConnectionError):
    """The control plane cannot be reached, refuses the token, or answers something else than expected."""


class ControlPlaneUnavailableError(ControlPlaneError):
    """The control plane cannot be reached, or cannot answer at present. A later attempt may succeed."""


class ModelMismatchError(Error):
    """The servers serve another model than the caller's."""


class NotReady(Error, TimeoutError):
    """The expert service was not ready within the timeout. The text says what is missing."""


class NoReplicaError(Error):
    """No live server holds an expert that the call needs, and none came within the client's timeout."""


class BusyError(Error):
    """As many calls are outstanding as the client has lanes, and none ended within the client's timeout."""


class RefusedError(Error):
    """A server refuses the request, and every replica would."""


class PeerError(Error):
    """A peer failed, and no other could replace it."""


class ClusterError(Error):
    """A process of a local cluster did not start, or ended. The text quotes its output."""
