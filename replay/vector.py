"""Numbers of one machine type in one block of memory, which behave like a tuple and cost a copy of bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

N = TypeVar("N", int, float)


class Vector(Sequence[N]):
    """An immutable sequence; a slice is a plain tuple. ``np.asarray`` of it is a read-only view."""

    __slots__ = ("_array",)
    _array: npt.NDArray[Any]

    def __init__(self, values: Sequence[N] | npt.NDArray[Any], code: str) -> None:
        """``code`` is the machine type as the module ``array`` names it: ``i``, ``B`` or ``f``.

        An array of that type is taken as it is, without a copy. ``ValueError`` for what does not fit the type.
        """
        dtype = np.dtype(code)
        if isinstance(values, Vector):
            values = values._array
        if not isinstance(values, np.ndarray):
            try:
                values = np.frombuffer(array(code, values), dtype) if len(values) else np.empty(0, dtype)
            except (TypeError, OverflowError) as error:
                raise ValueError(f"other than {dtype.name} numbers: {error}") from None
        if values.dtype != dtype or values.ndim != 1:
            raise ValueError(f"other than {dtype.name} numbers in one row: {values.dtype} {values.shape}")
        self._array = values.view()
        self._array.flags.writeable = False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy or (dtype is not None and np.dtype(dtype) != self._array.dtype):
            return self._array.astype(dtype or self._array.dtype)
        return self._array

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[N]:
        return iter(self._array.tolist())

    @overload
    def __getitem__(self, at: int) -> N: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[N, ...]: ...
    def __getitem__(self, at: int | slice) -> N | tuple[N, ...]:
        found = self._array[at]
        return tuple(found.tolist()) if isinstance(at, slice) else found.item()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Vector):
            return np.array_equal(self._array, other._array)
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (np.array(self._array), self._array.dtype.char)
