"""JSON lines from a file of any size, whatever state it is in.

Memory is bounded by the longest line that is accepted. A line that is not JSON is mended where that takes no
guess (NUL bytes, bytes that are not UTF-8, two records in one line) and counted where it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from hintloop.replay.ingest.report import Refused, Report

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_loads: Callable[[str | bytes], Any]
_encode_plain: Callable[[Any], str]
try:
    import orjson
except ImportError:  # an optional speed-up
    _loads, _encode_plain = json.loads, _encode
else:
    _loads, _encode_plain = orjson.loads, lambda value: orjson.dumps(value).decode()

MAX_LINE_BYTES = 32 << 20
"""A longer line is skipped. Parsed, one can take four times this."""
_MAX_SPLICED_BYTES = 8 << 20
_MAX_PIECES = 16
"""Places that a broken line is taken apart at, at most: each costs a parse."""
_PLAIN = frozenset([str, int, bool, type(None)])
"""Types of which there is only one way to write a value; not so for float."""
_BOM = b"\xef\xbb\xbf"
_RECORD_START = re.compile(
    rb'(?<=\})\{"|(?<=.)\{"(?:parentUuid|type|timestamp|uuid|isSidechain|sessionId|record_type)":'
)

Record = dict[str, Any]


class Located(NamedTuple):
    """A record and where its bytes are, for ``reread``."""

    record: Record
    start: int
    size: int


def read_records(stream: BinaryIO, report: Report) -> Iterator[Located]:
    """The records of ``stream`` from its beginning. ``report`` counts what is found, and what had to be skipped."""
    stream.seek(0)
    position = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        start, position = position, position + len(line)
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            position += _skip_line(stream)
            report.read += 1
            report.skip("line_too_long")
            continue
        try:
            record = loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            report.read += 1
            yield Located(record, start, len(line))
            continue
        if start == 0 and line.startswith(_BOM):
            line, start = line[len(_BOM) :], len(_BOM)
            report.note("byte_order_mark")
        if line.isspace() or not line:
            continue
        yield from _line_records(line, start, report)


def reread(stream: BinaryIO, start: int, size: int) -> Record:
    """A record that ``read_records`` found before in the same file; ``Refused`` when it is gone."""
    stream.seek(start)
    data = stream.read(size)
    try:
        record = loads(data)
    except ValueError:
        record, _ = parse(data)
    if not isinstance(record, dict):
        raise Refused(f"the file changed while it was read: there is no record at byte {start}")
    return record


def dumps(value: Any) -> str:
    """Compact JSON text, non-ASCII characters as they are."""
    if isinstance(value, dict) and _PLAIN.issuperset(map(type, value.values())):
        try:
            return _encode_plain(value)
        except TypeError:
            pass  # half of a surrogate pair, or a number of more than 64 bits
    return _encode(value)


def loads(text: str | bytes) -> Any:
    """Parse JSON. ``ValueError`` for anything else, text nested too deep for this program included."""
    try:
        return _loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deep") from error


def parse(data: bytes) -> tuple[Any, str]:
    """A JSON value and what had to be mended: empty, ``nul_bytes``, ``not_utf8``, ``odd_json`` or ``broken``."""
    mended = ""
    if b"\0" in data:
        data, mended = data.replace(b"\0", b""), "nul_bytes"
    try:
        return loads(data), mended
    except ValueError:
        pass
    text = data.decode("utf-8", "replace")
    mended = mended or ("not_utf8" if "\ufffd" in text and "\ufffd".encode() not in data else "odd_json")
    try:
        return _without_surrogates(json.loads(text)), mended
    except (ValueError, RecursionError):
        return None, "broken"


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of the line; the bytes passed over."""
    passed = 0
    while piece := stream.readline(1 << 20):
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
    return passed


def _line_records(line: bytes, start: int, report: Report) -> Iterator[Located]:
    """The records of a line that is more or less than one JSON object."""
    found, mended = parse(line)
    if mended != "broken":
        report.read += 1
        if mended:
            report.note(mended)
        if isinstance(found, dict):
            yield Located(found, start, len(line))
        else:
            report.skip("not_an_object")
        return
    pieces = _taken_apart(line)
    for record, at, size in pieces:
        report.read += 1
        yield Located(record, start + at, size)
    whole = sum(len(line[at : at + size].strip()) for _, at, size in pieces)
    if whole < len(line.strip()):
        report.read += 1
        report.skip("cut_record" if line.endswith(b"\n") else "cut_last_record")
    elif pieces:
        report.note("spliced_line")


def _taken_apart(line: bytes) -> list[Located]:
    """The whole records in a line that has more than one, or pieces of one."""
    if len(line) > _MAX_SPLICED_BYTES:
        return []
    starts = [0, *(match.start() for match in _RECORD_START.finditer(line))][:_MAX_PIECES]
    found: list[Located] = []
    free = 0
    for start in starts:
        if start < free:
            continue
        for end in [len(line), *(other for other in reversed(starts) if other > start)]:
            record, mended = parse(line[start:end])
            if mended != "broken" and isinstance(record, dict):
                found.append(Located(record, start, end - start))
                free = end
                break
    return found


def _without_surrogates(value: Any) -> Any:
    """Halves of surrogate pairs as U+FFFD: no UTF-8 text can hold them."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value
