"""Formats are told by content, and no two of them claim the same file."""

from __future__ import annotations

import io
import json

import pytest

from hintloop.replay.ingest.detect import FORMATS, MIN_SCORE, detect, read_head
from hintloop.replay.ingest.report import Refused

from .recordings import balanced, read
from .samples import files

FILES = files()


@pytest.mark.parametrize("name", FILES)
def test_exactly_one_format_claims_a_file(name: str) -> None:
    format, data = FILES[name]
    head = read_head(io.BytesIO(data))
    scores = {each.name: each.sniff(head) for each in FORMATS.values()}
    assert {name for name, score in scores.items() if score >= MIN_SCORE} == {format}
    assert scores[format] >= 0.9
    assert max([score for name, score in scores.items() if name != format]) < 0.1
    assert detect(io.BytesIO(data)).format.name == format


def test_every_format_has_a_sample() -> None:
    assert {format for format, _ in FILES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", FILES)
def test_an_undamaged_file_is_read_whole(name: str) -> None:
    format, data = FILES[name]
    traces, report = read(data, format)
    assert not report.skipped
    assert balanced(report)
    assert bool(traces) == (name.partition(",")[0] not in ("openhands event", "openhands state"))


@pytest.mark.parametrize("name", FILES)
def test_nul_bytes_and_a_byte_order_mark_do_not_change_what_is_read(name: str) -> None:
    format, data = FILES[name]
    end = data.rstrip().rfind(b"}")
    marred = b"\xef\xbb\xbf" + data[:end] + b"\0\0\0" + data[end:]
    assert read(marred, format)[0] == read(data, format)[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"   \n",
        b"[]",
        b"{}",
        b"5",
        b'"text"',
        b"[1, 2]",
        b"[[[]]]",
        b'{"messages": []}',
        b'{"messages": "x"}',
        b'{"steps": [], "agent": {}, "schema_version": "ATIF-v1.8"}',
        b'{"history": []}',
        b'{"turns": [{"a": 1}]}',
        b'{"name": "left-pad", "version": "1.0.0", "dependencies": {}}',
        b'[{"role": "admin", "content": "x"}]',
        json.dumps([{"role": "user"}] * 3).encode(),
        b'{"messages": [{"role": "user", "content": "cut',
        b"[" * 100_000,
    ],
)
def test_garbage_is_refused_with_one_line_that_names_the_formats(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        detect(io.BytesIO(data))
    assert str(caught.value) == f"not a trace of a known format ({', '.join(FORMATS)})"
    assert "\n" not in str(caught.value)


def test_a_document_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = FILES["swe_agent document, indented"]
    monkeypatch.setattr("hintloop.replay.ingest.document.MAX_DOCUMENT_BYTES", len(data) - 1)
    with pytest.raises(Refused):
        detect(io.BytesIO(data))
