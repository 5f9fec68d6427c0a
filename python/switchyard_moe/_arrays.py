"""The arrays that calls take."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Array"]


class Array(Protocol):
    """An array that other libraries can read through DLPack: numpy's, torch's, jax's and others."""

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        """Return the array as a capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return kind and number of the array's device."""
        ...
