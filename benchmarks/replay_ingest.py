"""How fast a recorded Claude Code file is taken into a journal, and in how much memory.

Writes a file of about the given size (main conversation with compactions, sub-agents, results stored twice as
the tool does, some errors), ingests it in this process, and prints one JSON object. ``peak_mb`` is the peak of the
resident memory above that of the process with everything imported.

    python benchmarks/replay_ingest.py --megabytes 200
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hintloop.replay.ingest.ingest import ingest
from hintloop.replay.ingest.lines import read_records
from hintloop.replay.ingest.report import Report
from hintloop.replay.journal import Journal

COMPACT_EVERY = 400
"""Calls between two compactions: about a megabyte of text."""
WORDS = [
    "def",
    "return",
    "value",
    "=",
    "self",
    "token",
    "path",
    "for",
    "in",
    "if",
    "not",
    "import",
    "class",
    "the",
    "of",
    "to",
    "line",
    "print",
    "(",
    ")",
    ":",
    "[",
    "]",
    "{",
    "}",
    "\\n",
]


def records(seed: int = 0) -> Iterator[dict[str, Any]]:
    """An endless session."""
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
        for call in range(COMPACT_EVERY):
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
    """A file of at least ``size`` bytes."""
    with path.open("w", encoding="utf-8") as file:
        for record in records():
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            if file.tell() >= size:
                return


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    size = parser.parse_args().megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write(path, size)
        before = peak_mb()
        gc.freeze()  # as the command does
        started = time.process_time()
        with path.open("rb", buffering=1 << 20) as file:
            count = sum(1 for _ in read_records(file, Report()))
        parsed = time.process_time() - started
        started = time.process_time()
        (report,) = ingest([path], Journal(Path(folder) / "journal"))
        seconds = time.process_time() - started
        megabytes = path.stat().st_size / 1e6
        result = {
            "megabytes": round(megabytes),
            "records": count,
            "episodes": report.episodes,
            "sites": report.sites,
            "parse_mb_per_s": round(megabytes / parsed, 1),
            "ingest_mb_per_s": round(megabytes / seconds, 1),
            "peak_mb": round(peak_mb()),
            "peak_mb_before": round(before),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
