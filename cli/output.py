"""Tables for people and JSON for programs, from the same rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]


def show(rows: Sequence[Row], *, as_json: bool, title: str | None = None) -> None:
    """Print rows with the same keys: as a table, or as a JSON array."""
    if as_json:
        show_json([dict(row) for row in rows])
    else:
        Console().print(table(rows, title=title))


def show_json(data: Any) -> None:
    """Print JSON, indented."""
    sys.stdout.write(json.dumps(data, indent=1, default=str) + "\n")


def table(rows: Sequence[Row], *, title: str | None = None) -> Table:
    """A table whose columns are the keys of the first row; numbers to the right."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for name, value in (rows[0] if rows else {}).items():
        justify: Literal["left", "right"] = "right" if isinstance(value, (int, float)) else "left"
        made.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell(value)) for value in row.values()))
    return made


def cell(value: Any) -> str:
    """A value in few characters; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
