"""Reading fields of foreign JSON, of which nothing is certain but that it is JSON."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from hintloop.replay.ingest.lines import dumps, loads

IMAGE = "[image]"
"""Stands where an image was."""


def text_of(value: Any) -> str:
    """A string as it is; empty for anything else."""
    return value if isinstance(value, str) else ""


def dict_of(value: Any) -> dict[str, Any]:
    """An object as it is; empty for anything else."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """An array as it is; empty for anything else."""
    return value if isinstance(value, list) else []


def integer_of(value: Any) -> int | None:
    """A whole number that fits 32 bits."""
    return value if type(value) is int and abs(value) < 1 << 31 else None


def seconds_of(value: Any) -> float:
    """A duration; 0 for what is none."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e9 else 0.0


def unix_time(value: Any) -> float | None:
    """An ISO 8601 time; None for anything else."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def arguments_of(value: Any) -> str:
    """Arguments of a call as JSON text. A string that is JSON already stays as it is."""
    if isinstance(value, str):
        try:
            loads(value)
        except ValueError:
            return dumps(value)
        return value
    try:
        return dumps(value)
    except RecursionError:
        return dumps("[arguments nested too deep]")


def joined(parts: Iterable[str]) -> str:
    """The parts that are not empty, a line break between them."""
    return "\n".join(filter(None, parts))
