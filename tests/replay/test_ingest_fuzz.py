"""Damaged recordings: no crash, every record accounted for, and no result attributed to a call it is not of."""

from __future__ import annotations

import io
import json
import random
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import total_allocated_bytes as arrow_bytes

from hintloop.replay.ingest.detect import FORMATS, detect
from hintloop.replay.ingest.document import whole
from hintloop.replay.ingest.episodes import to_episode
from hintloop.replay.ingest.ingest import ingest
from hintloop.replay.ingest.redact import redact_trace
from hintloop.replay.ingest.report import Refused, Report
from hintloop.replay.journal import Journal
from hintloop.replay.segment import decode, encode

from .recordings import Claude, balanced, small_claude
from .samples import DOCUMENTS, FORMS, files

FUZZED = 10_000
FILE_SECONDS = 20.0
"""For a file that takes some milliseconds, on a busy machine."""
INGESTED_SHARE = 20
"""One of so many files also goes the whole way into a journal."""
GROWTH_KIB = 32 << 10
ODD = [None, 5, -1.5, True, "", "x", [], {}, [1], {"a": 1}, ["x", {"type": "text"}], "\ud800", "🙂", 1 << 70]


def rich_claude() -> list[dict[str, Any]]:
    made: Claude = small_claude()
    made.user("you are a sub-agent", isSidechain=True, parent=None)
    made.calls("s1", "m10", isSidechain=True)
    made.gets("s1", [{"type": "text", "text": "Exit code 1\nno"}], True, isSidechain=True)
    kept = {"headUuid": "x", "anchorUuid": "y"}
    made.add("system", subtype="compact_boundary", parent=None, compactMetadata={"preservedSegment": kept})
    made.user("summary", isCompactSummary=True)
    made.says("on", "m11")
    return made.records


SEEDS: dict[str, tuple[str, Any]] = {
    **FORMS,
    "claude_code lines": ("claude_code", rich_claude()),
    **DOCUMENTS,
}


def damaged_values(record: Any, random_: random.Random) -> Any:
    """The record with one value somewhere in it replaced or removed."""
    if isinstance(record, dict) and record:
        name = random_.choice(list(record))
        if random_.random() < 0.4:
            return {**record, name: random_.choice(ODD)}
        if random_.random() < 0.2:
            return {key: value for key, value in record.items() if key != name}
        return {**record, name: damaged_values(record[name], random_)}
    if isinstance(record, list) and record:
        at = random_.randrange(len(record))
        return [*record[:at], damaged_values(record[at], random_), *record[at + 1 :]]
    return random_.choice(ODD)


def damaged_file(name: str, seed: int) -> bytes:
    """A file of a form with some damage that the seed decides."""
    random_ = random.Random(seed)
    _, value = SEEDS[name]
    if name in FORMS:
        return damaged(value, random_)
    for _ in range(random_.choice((0, 1, 2, 4, 8))):
        value = damaged_values(value, random_)
    indent = random_.choice((None, None, 1))
    return damaged_bytes(json.dumps(value, indent=indent).encode(), random_)


def damaged(records: list[Any], random_: random.Random) -> bytes:
    """A file with some damage to values, to the order of lines, and to bytes."""
    records = [damaged_values(r, random_) if random_.random() < 0.15 else r for r in records]
    for _ in range(random_.randrange(3)):
        at = random_.randrange(len(records))
        records.insert(random_.randrange(len(records)), records[at])
    if random_.random() < 0.2:
        random_.shuffle(records)
    return damaged_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records), random_)


def damaged_bytes(original: bytes, random_: random.Random) -> bytes:
    """A few bytes are other ones, or gone."""
    data = bytearray(original)
    for _ in range(random_.choice((0, 0, 0, 1, 3))):
        at = random_.randrange(len(data) + 1)
        end = at + random_.choice((0, 1, 5, 200))
        data[at:end] = random_.choice((b"", b"\0" * 9, b"\xff", b"\n", b"}{", b'"', b"{"))
    return bytes(data)


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """``TimeoutError`` in the middle of what takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{what} takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_kib() -> int:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(data: bytes, format: str) -> None:
    report = Report()
    try:
        traces = list(FORMATS[format].read(io.BytesIO(data), report))
    except Refused:
        assert sum(report.skipped.values()) > 0
        return
    assert balanced(report)
    if whole(io.BytesIO(data)) is None:
        assert report.read >= sum(bool(line.strip()) for line in data.split(b"\n"))
    seen: set[bytes] = set()
    made = [to_episode(redact_trace(trace, Counter()), seen, report) for trace in traces]
    assert sum(len(episode.hint_sites) for episode in made) == report.sites
    for trace in traces:
        assert any(message.role == "assistant" for message in trace.messages)
    if made:
        assert len(decode(encode(made), "segment")) == len(made)


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 40))
def test_damaged_files_are_read_or_refused(name: str, seed: int) -> None:
    check(damaged_file(name, seed), SEEDS[name][0])


@given(name=st.sampled_from(sorted(files())), format=st.sampled_from(sorted(FORMATS)))
def test_a_file_of_another_format_is_read_or_refused(name: str, format: str) -> None:
    check(files()[name][1], format)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_ten_thousand_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Each within its time, all in the same memory, and of each there is one report."""
    count, journal = FUZZED // len(SEEDS) + 1, Journal(tmp_path / "journal")
    reports: list[Report] = []
    for seed in range(count):
        data = damaged_file(name, seed)
        with deadline(FILE_SECONDS, f"seed {seed}"):
            check(data, SEEDS[name][0])
        if seed % INGESTED_SHARE == 0:
            path = tmp_path / f"{seed}.json"
            path.write_bytes(data)
            with deadline(FILE_SECONDS, f"seed {seed}"):
                reports += ingest([path], journal)
        if seed == count // 4:
            before = peak_kib(), arrow_bytes()
    assert peak_kib() - before[0] < GROWTH_KIB
    assert arrow_bytes() - before[1] < GROWTH_KIB << 10
    assert len(reports) == len(range(0, count, INGESTED_SHARE))
    assert all(report.refused or balanced(report) for report in reports)
    assert len(journal.episode_ids()) == sum(report.episodes for report in reports)


@given(st.binary(max_size=400))
def test_any_bytes_are_of_a_format_or_refused(data: bytes) -> None:
    try:
        found = detect(io.BytesIO(data))
    except Refused:
        return
    assert found.score >= 0.5
