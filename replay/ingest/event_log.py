"""Logs of events, as OpenHands keeps them: one file per event, lines, an array, or the ``history`` of a result row.

Event files of one folder, with the state file beside the folder, are one recording: they are read as if each were
a line of one file, in the order of their numbers.
"""

from __future__ import annotations

import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hintloop.replay.ingest.document import Unusable, converted, whole
from hintloop.replay.ingest.lines import MAX_LINE_BYTES, Record, dumps, read_records, reread
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Trace

MAX_LOG_BYTES = 64 << 20
"""Events of one conversation beyond this are left out."""
_EVENT_FILE = re.compile(r"event-(\d{5,})-[0-9a-fA-F-]{8,}\.json")
_STATE_FILE = "base_state.json"
MISSING = "event_file_missing"
"""Type of the record that stands where the numbers of the event files have a gap."""

Convert = Callable[[list[Record], Record, Report], list[Trace]]
"""The conversations of a log, and of the row that it is in (empty for a log by itself); counts the events."""


def gathered(files: Iterable[Path]) -> list[Path]:
    """The files, with the first event file of each folder in place of all, and without the state files beside them."""
    found: dict[Path, None] = {}
    firsts: dict[Path, Path | None] = {}
    for file in files:
        folder = _event_folder(file)
        if folder is not None and folder not in firsts:
            firsts[folder] = min(_events_in(folder), default=(0, None))[1]
        first = None if folder is None else firsts[folder]
        found[file if first is None else first] = None
    return list(found)


def size_of(file: Path) -> int:
    """Bytes of a file, or of all the event files that it stands for. ``OSError``."""
    folder = _event_folder(file)
    paths = [path for _, path in _events_in(folder)] if folder is not None else []
    return sum(path.stat().st_size for path in paths or [file])


def joined_events(file: Path) -> BinaryIO | None:
    """The log that an event file is part of, as lines in an unnamed file; None for any other file. ``OSError``."""
    if _EVENT_FILE.fullmatch(file.name) is None:
        return None
    log: Any = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    state = file.parent.parent / _STATE_FILE
    if state.is_file():
        _append(log, state)
    expected = 0
    for number, path in sorted(_events_in(file.parent)):
        if number > expected:
            log.write(dumps({"kind": MISSING, "count": number - expected}).encode() + b"\n")
        expected = number + 1
        _append(log, path)
    log.seek(0)
    found: BinaryIO = log
    return found


def read_log(stream: BinaryIO, report: Report, convert: Convert) -> Iterator[Trace]:
    """The conversations of a log in any of its forms. For ``detect.Format.read``; rows are read twice."""
    found = whole(stream)
    if found is not None:
        value, mended = found
        report.note(mended, int(bool(mended)))
        traces = _of_document(value, convert, report)
        report.judge()
        yield from traces
        return
    events: list[Record] = []
    rows, taken = array("q"), 0
    for record, start, size in read_records(stream, report):
        if isinstance(record.get("history"), list):
            if converted(record, lambda row, to: _of_row(row, convert, to), report):
                rows.extend((start, size))
        elif (taken := taken + size) > MAX_LOG_BYTES:
            report.ignore("events_beyond_limit")
        else:
            events.append(record)
    traces = convert(events, {}, report) if events else []
    report.judge()
    yield from traces
    for at in range(0, len(rows), 2):
        yield from _of_row(reread(stream, rows[at], rows[at + 1]), convert, Report())


def _of_document(value: Any, convert: Convert, report: Report) -> list[Trace]:
    if isinstance(value, dict) and isinstance(value.get("history"), list):
        report.read += 1
        return converted(value, lambda row, to: _of_row(row, convert, to), report)
    if isinstance(value, dict) and isinstance(value.get("trajectory"), list):
        value = value["trajectory"]
    elements = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict) and isinstance(each.get("history"), list) for each in elements):
        traces = []
        for row in _objects(elements, report):
            traces += converted(row, lambda each, to: _of_row(each, convert, to), report)
        return traces
    return convert(_objects(elements, report), {}, report)


def _of_row(row: Record, convert: Convert, report: Report) -> list[Trace]:
    history = row.get("history")
    if not isinstance(history, list):
        raise Unusable("unknown_type")
    # Older rows have pairs of an action and what it gave.
    flat = [each for part in history for each in (part if isinstance(part, list) else [part])]
    return convert(_objects(flat, report), row, report)


def _objects(values: Iterable[Any], report: Report) -> list[Record]:
    kept = []
    for value in values:
        report.read += 1
        if isinstance(value, dict):
            kept.append(value)
        else:
            report.skip("not_an_object")
    return kept


def _event_folder(file: Path) -> Path | None:
    """The folder of the event files that a file belongs to."""
    if file.name == _STATE_FILE:
        return file.parent / "events"
    return file.parent if _EVENT_FILE.fullmatch(file.name) else None


def _events_in(folder: Path) -> Iterator[tuple[int, Path]]:
    if folder.is_dir():
        for path in folder.iterdir():
            match = _EVENT_FILE.fullmatch(path.name)
            if match and path.is_file() and not path.is_symlink():
                yield int(match[1]), path


def _append(log: BinaryIO, path: Path) -> None:
    """One file as one line; a line break in JSON is only space."""
    with path.open("rb") as file:
        data = file.read(MAX_LINE_BYTES + 1)
    log.write(data.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
