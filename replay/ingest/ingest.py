"""Files with recorded traces into a journal: each conversation once, however often and after whatever crash.

An episode's id follows from its content, so what the journal has is left out. Episodes are appended in segments
of a few megabytes, so that memory is bounded by one conversation and one segment.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from hintloop.replay.episode import Episode
from hintloop.replay.ingest.detect import FORMATS, detect
from hintloop.replay.ingest.episodes import known_sites, to_episode
from hintloop.replay.ingest.event_log import gathered, joined_events
from hintloop.replay.ingest.redact import redact_trace
from hintloop.replay.ingest.report import Refused, Report
from hintloop.replay.ingest.trace import Trace
from hintloop.replay.journal import Filter, Journal, JournalWriter

WRITER = "ingest"
BUFFER_BYTES = 1 << 20
SEGMENT_CHARS = 8 << 20
"""A segment is written once its episodes hold this much text."""

Progress = Callable[[int], None]
"""Told how many bytes more of a file have been read, the first time."""


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and all regular files in the folders, sorted; links are not followed.

    One file stands for a folder of events. ``FileNotFoundError`` for a path that does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(2, "no such file or folder", str(path))
        inside = path.rglob("*") if path.is_dir() else [path]
        found.update({each: None for each in sorted(inside) if each.is_file() and not each.is_symlink()})
    return gathered(found)


def ingest(
    files: Iterable[Path],
    journal: Journal,
    *,
    keep_secrets: bool = False,
    progress: Progress = lambda _: None,
) -> Iterator[Report]:
    """Take the files one after the other; a report on each as soon as all of it is in the journal.

    A file that cannot be read, is of no known format or too damaged is reported as refused. Errors of
    ``JournalWriter.append``.
    """
    store = _Store(journal)
    for file in files:
        report = Report(path=str(file))
        try:
            for trace in read_traces(file, report, keep_secrets=keep_secrets, progress=progress):
                store.add(trace, report)
        except (Refused, OSError) as error:
            report.refused = str(error)
        store.flush()
        yield report


def read_traces(
    file: Path, report: Report, *, keep_secrets: bool = False, progress: Progress = lambda _: None
) -> Iterator[Trace]:
    """The conversations of one file, one at a time. ``Refused``, and then nothing was given; ``OSError``."""
    with _open(file, progress) as stream:
        report.size = os.fstat(stream.fileno()).st_size
        format = detect(stream).format
        report.format = format.name
        for trace in format.read(stream, report):
            report.traces += 1
            yield trace if keep_secrets else redact_trace(trace, report.secrets)


class _Store:
    """What goes to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._writer: JournalWriter = journal.writer(WRITER)
        self._ids = journal.episode_ids()
        self._seen = known_sites(_recorded(journal))
        self._pending: list[Episode] = []
        self._chars = 0

    def add(self, trace: Trace, report: Report) -> None:
        episode = to_episode(trace, self._seen, report)
        if episode.episode_id in self._ids:
            report.note("known_already")
            return
        self._ids.add(episode.episode_id)
        report.episodes += 1
        self._pending.append(episode)
        self._chars += sum(len(turn.text) + len(turn.tool_arguments or "") for turn in episode.turns)
        if self._chars > SEGMENT_CHARS:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._writer.append(self._pending)
        self._pending, self._chars = [], 0


def _recorded(journal: Journal) -> Iterator[Episode]:
    """Episodes in damaged segments are not in ``episode_ids`` either, so they are taken again."""
    reader = journal.reader(only=Filter(sources=tuple(FORMATS)))
    while segment := reader.poll_segment():
        yield from segment.episodes


class _Watched(io.FileIO):
    """A file that tells how far it has been read."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path)
        self._progress, self._furthest = progress, 0

    def readinto(self, buffer: bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        count = super().readinto(buffer)
        if (here := self.tell()) > self._furthest:
            self._progress(here - self._furthest)
            self._furthest = here
        return count


def _open(file: Path, progress: Progress) -> BinaryIO:
    log = joined_events(file)
    if log is not None:
        progress(os.fstat(log.fileno()).st_size)
        return log
    return io.BufferedReader(_Watched(file, progress), BUFFER_BYTES)
