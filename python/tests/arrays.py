"""An array library as DLPack's standard asks for it: it knows versions, and its arrays cannot be written."""

from __future__ import annotations

from typing import Any

import numpy as np


class FrozenArray:
    """An immutable array over one of numpy."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)
        self._values.flags.writeable = False

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None) -> Any:
        return self._values.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self._values.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Namespace

    def numpy(self) -> Any:
        return self._values


class OldArray:
    """An array that knows neither versions nor a namespace."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._values.__dlpack__()

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self._values.__dlpack_device__()


class Namespace:
    """The functions of the library."""

    @staticmethod
    def from_dlpack(array: Any) -> FrozenArray:
        return FrozenArray(np.from_dlpack(array))
