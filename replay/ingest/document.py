"""Files that are one JSON document, or have one document per line.

A document and each message in it count as records, so that a file of many documents says what became of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO

from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import MAX_LINE_BYTES, Record, parse, read_records, reread
from hintloop.replay.ingest.report import Report
from hintloop.replay.ingest.trace import Trace

MAX_DOCUMENT_BYTES = 64 << 20
"""A longer document is not read: parsed, one can take four times this."""
HEAD_VALUES = 40
_BOM = b"\xef\xbb\xbf"
_BLANK = b"\0 \t\r\n"

Convert = Callable[[Any, Report], list[Trace]]
"""The conversations of one document; counts what is inside of it. Raises ``Unusable``."""


class Unusable(ValueError):
    """A value that is no document of the format; the text is the reason to count it by."""


def whole(stream: BinaryIO) -> tuple[Any, str] | None:
    """The object or array that a seekable file is, and what had to be mended (see ``lines.parse``).

    None for lines of JSON, for what is too long, and for what is not JSON. A long file of lines is not read on.
    """
    stream.seek(0)
    first = stream.readline(MAX_LINE_BYTES + 1)
    if not first.removeprefix(_BOM).lstrip(_BLANK).startswith((b"{", b"[")) and first.strip(_BOM + _BLANK):
        return None
    value, mended = parse(first.removeprefix(_BOM))
    if mended == "broken" or not first.strip(_BOM + _BLANK):
        stream.seek(0)
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            return None
        value, mended = parse(data.removeprefix(_BOM))
    elif _has_more(stream):
        return None
    return (value, mended) if isinstance(value, (dict, list)) else None


def _has_more(stream: BinaryIO) -> bool:
    while piece := stream.read(1 << 16):
        if piece.strip(_BLANK):
            return True
    return False


def values_of(head: Head) -> Sequence[Any]:
    """What a file holds at its beginning: documents, or the elements of an array, or the records of its lines."""
    if isinstance(head.document, list):
        return head.document[:HEAD_VALUES]
    return [head.document] if head.document is not None else head.records


def share(values: Iterable[Any], test: Callable[[Any], bool]) -> float:
    """Share of the first values that pass; 0 for none."""
    found = [test(value) for value in islice(values, HEAD_VALUES)]
    return sum(found) / len(found) if found else 0.0


def read_documents(stream: BinaryIO, report: Report, convert: Convert) -> Iterator[Trace]:
    """The conversations of a file that is one document, or lines of them; lines are read twice.

    For ``detect.Format.read``: counts every record and judges before the first trace.
    """
    found = whole(stream)
    if found is not None:
        value, mended = found
        if mended:
            report.note(mended)
        report.read += 1
        traces = converted(value, convert, report)
        report.judge()
        yield from traces
        return
    places = array("q")
    for record, start, size in read_records(stream, report):
        if converted(record, convert, report):
            places.extend((start, size))
    report.judge()
    for at in range(0, len(places), 2):
        yield from convert(reread(stream, places[at], places[at + 1]), Report())


def converted(value: Any, convert: Convert, report: Report) -> list[Trace]:
    """The conversations of a document that has been counted as read; nothing, and a skip, when it is none."""
    try:
        traces = convert(value, report)
    except Unusable as error:
        report.skip(str(error))
        return []
    report.used += 1
    return traces


def records_of(values: Any, report: Report) -> Iterator[Record]:
    """The objects of an array, all counted as read, and the others as skipped."""
    for value in values if isinstance(values, list) else []:
        report.read += 1
        if isinstance(value, dict):
            yield value
        else:
            report.skip("not_an_object")
