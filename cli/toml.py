"""Writes the small part of TOML that configs need: tables of scalars, arrays and inline tables.

``None`` is written as the string ``"none"``, which ``hintloop.cli.config`` reads back as None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Two levels, table by table; ``tomllib`` reads the same values back. ``TypeError`` for other types."""
    parts = []
    for name, table in tables.items():
        lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items()]
        parts.append("\n".join([f"[{_key(name)}]", *lines]) + "\n")
    return "\n".join(parts)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")
