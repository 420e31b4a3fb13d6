"""Which format a file is of: by what its first records look like, never by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, Protocol

from hintloop.replay.ingest.atif import Atif
from hintloop.replay.ingest.claude_code import ClaudeCode
from hintloop.replay.ingest.codex import Codex
from hintloop.replay.ingest.document import whole
from hintloop.replay.ingest.gemini_cli import GeminiCli
from hintloop.replay.ingest.head import Head
from hintloop.replay.ingest.lines import read_records
from hintloop.replay.ingest.mini_swe_agent import MiniSweAgent
from hintloop.replay.ingest.openai_messages import OpenAiMessages
from hintloop.replay.ingest.openenv import OpenEnv
from hintloop.replay.ingest.openhands import OpenHands
from hintloop.replay.ingest.openhands_v0 import OpenHandsV0
from hintloop.replay.ingest.report import Refused, Report
from hintloop.replay.ingest.swe_agent import SweAgent
from hintloop.replay.ingest.trace import Trace

HEAD_BYTES = 64 << 10
HEAD_RECORDS = 40
MIN_SCORE = 0.5


class Format(Protocol):
    """One kind of recording."""

    @property
    def name(self) -> str:
        """Short and constant: it is the ``source`` of the episodes."""

    def sniff(self, head: Head) -> float:
        """How likely a file that begins like this is of this format: 0 to 1."""

    def read(self, stream: BinaryIO, report: Report) -> Iterator[Trace]:
        """The conversations of a seekable file, one at a time.

        Counts every record in ``report``, and calls ``report.judge`` before it gives the first trace.
        """


_ALL: tuple[Format, ...] = (
    ClaudeCode(),
    Codex(),
    GeminiCli(),
    OpenHands(),
    OpenHandsV0(),
    SweAgent(),
    MiniSweAgent(),
    Atif(),
    OpenAiMessages(),
    OpenEnv(),
)
FORMATS: dict[str, Format] = {each.name: each for each in _ALL}
"""Every known format by name."""


@dataclass(frozen=True, slots=True)
class Detected:
    """The format of a file, and how sure that is."""

    format: Format
    score: float


def register(format: Format) -> None:
    """Add a format, or replace the one of that name."""
    FORMATS[format.name] = format


def detect(stream: BinaryIO) -> Detected:
    """The best match for a seekable file. ``Refused`` when no format is likely enough."""
    head = read_head(stream)
    scored = [Detected(each, each.sniff(head)) for each in FORMATS.values()]
    best = max(scored, key=lambda found: found.score)
    if best.score < MIN_SCORE:
        raise Refused(f"not a trace of a known format ({', '.join(FORMATS)})")
    return best


def read_head(stream: BinaryIO) -> Head:
    """The beginning of a seekable file."""
    stream.seek(0)
    data = stream.read(HEAD_BYTES)
    only = whole(stream)
    if only is not None:
        document, _ = only
        one_line = isinstance(document, dict) and b"\n" not in data.strip()
        return Head(data, (document,) if one_line else (), document)
    found = islice(read_records(stream, Report()), HEAD_RECORDS)
    # A document that is one JSON value over many lines has no record in its first lines; do not read on.
    looks_like_lines = data.lstrip(b"\xef\xbb\xbf\0 \t\r\n").startswith(b"{")
    return Head(data, tuple(each.record for each in found) if looks_like_lines else ())
