"""What the commands on recorded traces share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hintloop.replay.episode import Episode
    from hintloop.replay.journal import Journal

JournalUri = Annotated[str, typer.Option("--journal", metavar="URI", help="Journal of recorded episodes.")]


def segments(journal: Journal) -> Iterator[list[Episode]]:
    """The segments that can be read; the journal warns of others."""
    reader = journal.reader()
    while segment := reader.poll_segment():
        yield segment.episodes
