"""JSON lines in any state: what can be mended is, what cannot is counted."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.replay.ingest import lines as module
from hintloop.replay.ingest.lines import read_records, reread
from hintloop.replay.ingest.report import Refused, Report


def found(data: bytes) -> tuple[list[Any], Report]:
    report, stream = Report(), io.BytesIO(data)
    located = list(read_records(stream, report))
    for record, start, size in located:
        assert reread(stream, start, size) == record
    return [each.record for each in located], report


def test_reads_records_with_any_line_end_and_blank_lines() -> None:
    records, report = found(b'{"a": 1}\r\n\n  \n{"a": 2}\n{"a": 3}')
    assert records == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert (report.read, report.skipped) == (3, {})


@pytest.mark.parametrize(
    ("data", "record", "note"),
    [
        (b'\xef\xbb\xbf{"a": 1}\n', {"a": 1}, "byte_order_mark"),
        (b'\0\0\0{"a":\0 1}\n', {"a": 1}, "nul_bytes"),
        (b'{"a": "\xe9t\xe9"}\n', {"a": "\ufffdt\ufffd"}, "not_utf8"),
        (b'{"a": "\\ud83d"}\n', {"a": "\ufffd"}, "odd_json"),
    ],
)
def test_mends_what_takes_no_guess(data: bytes, record: dict[str, Any], note: str) -> None:
    records, report = found(data)
    assert records == [record]
    assert report.notes == {note: 1}


@pytest.mark.parametrize("line", [b'"massive error"', b"42", b"[1]", b"null"])
def test_a_line_that_is_no_object_is_skipped(line: bytes) -> None:
    records, report = found(line + b'\n{"a": 1}\n')
    assert records == [{"a": 1}]
    assert (report.read, report.skipped) == (2, {"not_an_object": 1})


def test_a_cut_last_line_is_told_from_a_broken_one() -> None:
    _, report = found(b'{"a": 1}\n{"a": "br\n{"a": "cu')
    assert report.skipped == {"cut_record": 1, "cut_last_record": 1}


def test_two_records_in_one_line_are_both_read() -> None:
    records, report = found(b'{"a": 1}{"b": {"c": 2}}\n')
    assert records == [{"a": 1}, {"b": {"c": 2}}]
    assert (report.read, report.notes) == (2, {"spliced_line": 1})


def test_a_record_behind_a_cut_one_is_read_and_the_cut_one_counted() -> None:
    records, report = found(b'{"type": "user", "text": "ab{"parentUuid":null,"type":"user"}\n')
    assert records == [{"parentUuid": None, "type": "user"}]
    assert (report.read, report.skipped) == (2, {"cut_record": 1})


def test_a_line_above_the_limit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    long = json.dumps({"a": "x" * 3_000_000}).encode()
    records, report = found(b'{"a": 1}\n' + long + b'\n{"a": 2}\n' + b"\0" * 2_000_000)
    assert records == [{"a": 1}, {"a": 2}]
    assert report.skipped == {"line_too_long": 2}


def test_json_nested_too_deep_is_skipped() -> None:
    records, report = found(b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b'\n{"a": 1}\n')
    assert records == [{"a": 1}]
    assert report.read == 1 + sum(report.skipped.values())


def test_the_standard_parser_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loads", json.loads)
    records, report = found(b'{"a": "\xc3\xa9"}\n{"b": "\xe9"}\n{"c": 1}{"d": 2}\n{"cut')
    assert records == [{"a": "é"}, {"b": "\ufffd"}, {"c": 1}, {"d": 2}]
    assert report.read == 4 + sum(report.skipped.values())


def test_a_file_that_changes_while_it_is_read_is_refused() -> None:
    with pytest.raises(Refused, match="changed while it was read"):
        reread(io.BytesIO(b"xxxxxxxx"), 0, 8)


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers(-9, 9)), max_size=5), st.booleans())
def test_what_json_writes_comes_back(records: list[dict[str, Any]], ascii_only: bool) -> None:
    text = "\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    read, report = found(text.encode())
    assert read == records
    assert (report.read, report.skipped, report.notes) == (len(records), {}, {})


@given(st.binary(max_size=300))
def test_any_bytes_are_accounted_for(data: bytes) -> None:
    records, report = found(data)
    assert report.read == len(records) + sum(report.skipped.values())
