"""How fast a journal is appended to, listed and read, and recordings are taken into one; and in how much memory.

For each number of segments: a journal of 16 writers with one episode in each segment, first with one file per
segment, then merged, then while somebody appends to it. For each number of megabytes: a Claude Code file of that size
(compactions, results stored twice as the tool does, some errors) is taken into new journals. Times are processor times,
but for appends, which wait for the disk. Prints one JSON object per measurement. Each size has a process of its own;
``peak_mb`` is the peak of its resident memory until then.

    python benchmarks/replay.py --segments 100 10000 100000 --megabytes 200
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from parts import WORDS, WRITERS, episode, link_segments

from hintloop.cli.traces import GC_THRESHOLD
from hintloop.replay.ingest.ingest import ingest
from hintloop.replay.ingest.lines import read_records
from hintloop.replay.ingest.report import Report
from hintloop.replay.journal import Journal
from hintloop.replay.listing import segment_name

READ = 5_000
"""Segments that are read at most."""
APPENDS = 300
ROUNDS = 5
"""Times that a recording is parsed, and taken in."""
COMPACT_EVERY_CALLS = 400
"""Calls between two compactions of the recorded conversation: about a megabyte of text."""


def records(seed: int = 0) -> Iterator[dict[str, Any]]:
    """An endless session of Claude Code."""
    rng = random.Random(seed)
    parent: str | None = None
    number = 0

    def record(kind: str, message: dict[str, Any], **more: Any) -> dict[str, Any]:
        nonlocal parent, number
        number += 1
        uuid = f"{number:08x}-0000-4000-8000-{number:012x}"
        made = {
            "parentUuid": parent,
            "isSidechain": False,
            "userType": "external",
            "cwd": "/home/user/project",
            "sessionId": "5c0375b4-57a5-4f26-b12d-d022ee4e51b7",
            "version": "2.1.206",
            "gitBranch": "main",
            "type": kind,
            "message": message,
            "uuid": uuid,
            "timestamp": "2025-09-07T09:52:03.071Z",
            **more,
        }
        parent = uuid
        return made

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    while True:
        parent = None
        yield record("user", {"role": "user", "content": text(300)})
        for call in range(COMPACT_EVERY_CALLS):
            head = {"id": f"msg_{number:024x}", "type": "message", "role": "assistant", "model": "claude-x"}
            yield record("assistant", {**head, "content": [{"type": "text", "text": text(40)}]})
            use = {
                "type": "tool_use",
                "id": f"toolu_{number:024x}",
                "name": "Bash",
                "input": {"command": text(30)},
            }
            yield record("assistant", {**head, "content": [use]})
            output = text(rng.choice((20, 200, 2000)))
            failed = call % 20 == 0
            block = {
                "type": "tool_result",
                "tool_use_id": use["id"],
                "is_error": failed,
                "content": f"Exit code 1\nSyntaxError: {output}" if failed else output,
            }
            said: Any = {"stdout": output, "stderr": "", "interrupted": False}
            yield record("user", {"role": "user", "content": [block]}, toolUseResult=said)


def write(path: Path, size: int) -> None:
    """A recording of at least ``size`` bytes."""
    with path.open("w", encoding="utf-8") as file:
        for record in records():
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            if file.tell() >= size:
                return


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time in seconds, and what came out."""
    started = time.process_time()
    found = do()
    return time.process_time() - started, found


def spread(size: float, seconds: list[float]) -> dict[str, float]:
    """Rates over several rounds."""
    rates = sorted(size / each for each in seconds)
    return {"median": round(median(rates), 1), "lowest": round(rates[0], 1), "highest": round(rates[-1], 1)}


def look(journal: Journal, segments: int) -> dict[str, Any]:
    """List a journal, see that nothing is new, open one segment, read the first ones."""
    list_s, files = timed(journal.files)
    end = {f"w{number}": len(range(number, segments, WRITERS)) for number in range(WRITERS)}
    poll_s, nothing = timed(journal.reader(end).poll)
    assert not nothing
    middle = files[len(files) // 2]
    open_s, _ = timed(lambda: Journal(journal.uri).read(segment_name(middle.writer, middle.first)))
    reader, count = journal.reader(), min(segments, READ)
    reader.poll_segment()  # makes the plan
    read_s, _ = timed(lambda: sum(1 for _ in range(count - 1) if reader.poll_segment()))
    return {
        "files": len(files),
        "list_ms": round(1e3 * list_s, 1),
        "poll_without_news_ms": round(1e3 * poll_s, 1),
        "open_one_ms": round(1e3 * open_s, 1),
        "read_per_s": round((count - 1) / read_s),
    }


def measure_journal(folder: Path, segments: int) -> Iterator[dict[str, Any]]:
    """A journal before and after its files are merged, and appends to it."""
    link_segments(folder / "journal", segments)
    journal = Journal(folder / "journal")
    yield {"state": "one file per segment", **look(journal, segments), "peak_mb": round(peak_mb())}
    compact_s, done = timed(journal.compact)
    compacted = {"compact_s": round(compact_s, 1), "compact_segments_per_s": round(segments / compact_s)}
    assert not done.left
    yield {"state": "merged", **look(journal, segments), **compacted, "peak_mb": round(peak_mb())}
    groups = [[episode(number)] for number in range(APPENDS)]
    writer = journal.writer("new")
    started = time.perf_counter()
    cpu_s, _ = timed(lambda: [writer.append(group) for group in groups])
    append_s = time.perf_counter() - started
    rates = {"append_per_s": round(APPENDS / append_s), "append_per_cpu_s": round(APPENDS / cpu_s)}
    yield {"state": "appends", **rates, "peak_mb": round(peak_mb())}


def measure_ingest(folder: Path, megabytes: int) -> Iterator[dict[str, Any]]:
    """A recording into a journal."""
    path, first = folder / "trace.jsonl", folder / "first.jsonl"
    write(path, megabytes * 1_000_000)
    write(first, 100_000)
    list(ingest([first], Journal(folder / "first")))  # loads all that it needs
    before = peak_mb()
    gc.freeze()  # as the command does, and so is this
    gc.set_threshold(GC_THRESHOLD)
    parse_s, ingest_s, peaks = [], [], []
    for number in range(ROUNDS):
        with path.open("rb", buffering=1 << 20) as file:
            seconds, count = timed(lambda file=file: sum(1 for _ in read_records(file, Report())))
        parse_s.append(seconds)
        journal = Journal(folder / f"journal-{number}")
        seconds, (report,) = timed(lambda journal=journal: list(ingest([path], journal)))
        ingest_s.append(seconds)
        peaks.append(round(peak_mb()))
    size = path.stat().st_size / 1e6
    yield {
        "records": count,
        "episodes": report.episodes,
        "sites": report.sites,
        "parse_mb_per_s": spread(size, parse_s),
        "ingest_mb_per_s": spread(size, ingest_s),
        "peak_mb": peaks[0],
        "peak_mb_of_all_rounds": peaks[-1],
        "peak_mb_before": round(before),
    }


MEASURES: dict[str, Callable[[Path, int], Iterator[dict[str, Any]]]] = {
    "segments": measure_journal,
    "megabytes": measure_ingest,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--segments", type=int, nargs="*", default=[100, 10_000, 100_000])
    parser.add_argument("--megabytes", type=int, nargs="*", default=[200])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, size = options.child[0], int(options.child[1])
        with tempfile.TemporaryDirectory() as folder:
            for found in MEASURES[what](Path(folder), size):
                print(json.dumps({what: size, **found}), flush=True)
        return
    for what in MEASURES:
        for size in getattr(options, what):
            subprocess.run([sys.executable, __file__, "--child", what, str(size)], check=True)


if __name__ == "__main__":
    main()
