"""What a format sees of a file before it is chosen to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hintloop.replay.ingest.lines import Record


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file."""

    data: bytes
    """The first bytes as they are."""
    records: tuple[Record, ...]
    """The first JSON objects that are one line each; none in a file that is not made of such lines."""
    document: Any = None
    """What the file is when all of it is one JSON object or array; None for lines, and for a document too long."""
