"""What became of every record of a file, and when a file is too damaged to be trusted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

MAX_SKIPPED_SHARE = 0.2
"""A file is refused when more of its records than this could not be read or understood."""


class Refused(ValueError):
    """A file that nothing is taken from; the message says why, in one line."""


@dataclass(slots=True)
class Report:
    """Counts of one file. Each record read is used, ignored or skipped: ``read`` is the sum of the three."""

    path: str = ""
    format: str = ""
    size: int = 0
    """Bytes."""
    read: int = 0
    """Records found; where a line holds two, both count, and so does each broken piece."""
    used: int = 0
    """Records that are part of a trace."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Records in order that are no part of a trace, by reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Records that are damaged or of no known kind, by reason."""
    notes: Counter[str] = field(default_factory=Counter)
    """What was seen inside of the records that were used: unpaired calls, images, ..."""
    traces: int = 0
    """Conversations that were read."""
    episodes: int = 0
    """Those that were new, and were written."""
    sites: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Failed turns as ``cause/kind``."""
    secrets: Counter[str] = field(default_factory=Counter)
    """Secrets that were replaced, by kind."""
    refused: str = ""
    """Why nothing was taken from the file; empty when something was."""

    def ignore(self, reason: str) -> None:
        self.ignored[reason] += 1

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def note(self, what: str, count: int = 1) -> None:
        """Count something that is worth saying; nothing happens for a count of 0."""
        if count:
            self.notes[what] += count

    def judge(self) -> None:
        """``Refused`` when too large a share was skipped. For a reader to call before it gives its first trace."""
        skipped = sum(self.skipped.values())
        if skipped > MAX_SKIPPED_SHARE * self.read:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common(4))
            raise Refused(f"{skipped} of {self.read} records cannot be used: {reasons}")

    def plain(self) -> dict[str, Any]:
        """The same as dicts and numbers, ready for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}
