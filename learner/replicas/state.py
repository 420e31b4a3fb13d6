"""Nested state as bytes: tensors in safetensors, the rest in JSON beside them. Nothing in it can run code."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

_SKELETON = "skeleton"


def to_bytes(state: Any) -> bytes:
    """Encode dicts, lists, tuples, tensors, strings, numbers, booleans and None, however nested.

    Dicts may have keys that are not strings. ``TypeError`` for anything else.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(_encode(state, tensors)).encode()
    return save({**tensors, _SKELETON: torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)})


def from_bytes(data: bytes) -> Any:
    """The inverse of ``to_bytes``, with tensors on the CPU. ``ValueError`` for anything but its output."""
    try:
        tensors = load(data)
        return _decode(json.loads(tensors[_SKELETON].numpy().tobytes()), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a state: {error!r}") from error


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Containers as a list that begins with their kind; a tensor as its name among ``tensors``."""
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", *([_encode(k, tensors), _encode(v, tensors)] for k, v in value.items())]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_encode(each, tensors) for each in value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be part of a state")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in parts}
    items = [_decode(part, tensors) for part in parts]
    return items if kind == "list" else tuple(items)
