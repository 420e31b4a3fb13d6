"""Plain data as JSON text, exact: what JSON would change or refuse is an object with the one key ``"$"``.

``(1, 2)`` is ``{"$": ["tuple", 1, 2]}``. Types count exactly, so no method of a foreign class is ever called to
write a value, and nothing is executed to read one back. Equal sets have one text, whatever their order. Used on
both sides of the sandbox wall.
"""

from __future__ import annotations

import itertools
import json
import math
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from hintloop.envs.sandbox import limits

TAG = "$"
_EMPTY: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), "", set(), range(0), reversed([]))
_ITERATORS = (
    types.GeneratorType,
    map,
    filter,
    zip,
    enumerate,
    reversed,
    *(type(iter(empty)) for empty in _EMPTY),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class NotData(ValueError):
    """A value that cannot cross: one of a foreign type, too large, or nested too deeply."""


def _make_encode() -> Callable[..., str]:
    """All that ``encode`` needs is bound here, so that foreign code which patches builtins later cannot reach it."""
    kind_of, size, finite, ordered, too_big = type, len, math.isfinite, sorted, ValueError
    t_none, t_bool, t_int, t_float, t_str, t_bytes, t_complex = (
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        complex,
    )
    t_list, t_tuple, t_dict, t_set, t_frozenset = list, tuple, dict, set, frozenset
    t_counter, t_defaultdict, t_ordered, iterators = Counter, defaultdict, OrderedDict, _ITERATORS
    items_of, values_of, ordered_items = dict.items, dict.values, OrderedDict.items
    name_of = type.__dict__["__name__"].__get__
    dumps, not_data = json.JSONEncoder(allow_nan=False).encode, NotData
    max_depth, max_items = limits.VALUE_DEPTH, limits.VALUE // 3

    def is_json(value: Any, depth: int) -> bool:
        """Whether a list or dict can be written as it is, which is the usual case and the faster one."""
        kind = kind_of(value)
        if kind is t_dict:
            for key in value:
                if kind_of(key) is not t_str or key == TAG:
                    return False
            value = values_of(value)
        elif kind is not t_list:
            return False
        for item in value:
            kind = kind_of(item)
            if kind is t_int or kind is t_str or kind is t_bool or kind is t_none:
                continue
            if kind is t_float:
                if not finite(item):
                    return False
            elif depth == 0 or not is_json(item, depth - 1):
                return False
        return True

    def pack(value: Any, depth: int) -> Any:
        kind = kind_of(value)
        if kind is t_str or kind is t_int or kind is t_bool or kind is t_none:
            return value
        if kind is t_float:
            if finite(value):
                return value
            return {TAG: ["float", "nan" if value != value else "inf" if value > 0 else "-inf"]}
        if depth == 0:
            raise not_data("nested too deeply")
        if kind is t_list:
            return [pack(item, depth - 1) for item in value]
        if kind is t_dict:
            return pack_dict(value, depth - 1)
        return {TAG: tagged(kind, value, depth - 1)}

    def pack_dict(value: dict[Any, Any], depth: int) -> Any:
        packed = {}
        for key, item in items_of(value):
            if kind_of(key) is not t_str or key == TAG:
                return {TAG: ["dict", *pairs(items_of(value), depth)]}
            packed[key] = pack(item, depth)
        return packed

    def pairs(items: Any, depth: int) -> list[Any]:
        return [[pack(key, depth), pack(item, depth)] for key, item in items]

    def tagged(kind: Any, value: Any, depth: int) -> list[Any]:
        if kind is t_tuple:
            return ["tuple", *[pack(item, depth) for item in value]]
        if kind is t_set or kind is t_frozenset:
            name = "set" if kind is t_set else "frozenset"
            return [name, *ordered([pack(item, depth) for item in value], key=dumps)]
        if kind is t_bytes:
            return ["bytes", value.hex()]
        if kind is t_complex:
            return ["complex", pack(value.real, depth), pack(value.imag, depth)]
        if kind is t_counter or kind is t_defaultdict:
            return ["Counter" if kind is t_counter else "defaultdict", *pairs(items_of(value), depth)]
        if kind is t_ordered:
            return ["OrderedDict", *pairs(ordered_items(value), depth)]
        for iterator in iterators:
            if kind is iterator:
                return ["iterator", *drained(value, depth)]
        raise not_data("unsupported type " + name_of(kind))

    def drained(value: Any, depth: int) -> list[Any]:
        packed: list[Any] = []
        for item in value:
            packed.append(pack(item, depth))
            if size(packed) > max_items:
                raise not_data("too large")
        return packed

    def encode(value: Any, max_chars: int = limits.VALUE) -> str:
        packed = value if is_json(value, max_depth - 1) else pack(value, max_depth)
        try:
            text = dumps(packed)
        except too_big as error:  # an integer of too many digits
            raise not_data(str(error)) from None
        if size(text) > max_chars:
            raise not_data("too large")
        return text

    return encode


encode: Callable[..., str] = _make_encode()
"""``encode(value, max_chars=limits.VALUE)``: the value as ASCII text of at most so many characters, or ``NotData``.

Plain data is None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, and the standard
library's Counter, OrderedDict and defaultdict (which loses its factory). A generator, or another iterator of
Python's own, is consumed and read back as an iterator over the same items.
"""


def decode(text: str) -> Any:
    """The value of a text by ``encode``. ``ValueError`` or ``RecursionError`` for any other text."""
    try:
        return _decode(text)
    except (TypeError, KeyError) as error:
        raise ValueError(f"no value has this text: {error!r}") from None


def _restore(packed: dict[str, Any]) -> Any:
    if TAG not in packed:
        return packed
    tag, *items = packed[TAG]
    if len(packed) != 1:
        raise ValueError("a tagged value has one key")
    return _RESTORE[tag](items)


def _bytes(items: list[Any]) -> bytes:
    (text,) = items
    return bytes.fromhex(text)


def _float(items: list[Any]) -> float:
    (name,) = items
    return _NONFINITE[name]


def _complex(items: list[Any]) -> complex:
    real, imag = items
    return complex(real, imag)


def _hashed(items: list[Any]) -> list[Any]:
    """The items, unless so many share a hash that a set of them would take forever to build."""
    if len(set(map(hash, items))) * 4 < len(items) - 16:
        raise ValueError("too many items of one hash")
    return items


def _pairs(pairs: list[Any]) -> dict[Any, Any]:
    _hashed([key for key, _ in pairs])
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_RESTORE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": lambda items: set(_hashed(items)),
    "frozenset": lambda items: frozenset(_hashed(items)),
    "bytes": _bytes,
    "float": _float,
    "complex": _complex,
    "dict": _pairs,
    "Counter": lambda items: Counter(_pairs(items)),
    "defaultdict": lambda items: defaultdict(None, _pairs(items)),
    "OrderedDict": lambda items: OrderedDict(_pairs(items)),
    "iterator": iter,
}
_decode = json.JSONDecoder(object_hook=_restore, parse_constant=_no_constant).decode
