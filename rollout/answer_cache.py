"""Answers of teachers on disk, found by everything that was asked: the same question costs nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hintloop.envs.models import ToolCall

STALE_S = 3600.0
"""A file that was begun so long ago belongs to a process that died."""


@dataclass(slots=True)
class CacheCounts:
    """What the cache did since it was opened."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    """Entries removed to stay within the size."""
    not_written: int = 0
    """Answers that the disk did not take."""


class AnswerCache:
    """At most ``max_bytes`` of answers in ``folder``, those used last; 0 keeps none.

    Several processes may share a folder: a file is there whole or not at all, and each process keeps its own
    account of the size.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.counts = CacheCounts()
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        for path, stat in sorted(_entries(folder), key=lambda entry: entry[1].st_mtime_ns):
            self._sizes[path.stem] = stat.st_size
        self._total = sum(self._sizes.values())
        self._shrink()

    def get(self, key: str) -> ToolCall | None:
        """The answer kept for a key of ``cache_key``, if any. One that cannot be read is none."""
        path = self._path(key)
        try:
            found = ToolCall.model_validate_json(path.read_bytes())
            os.utime(path)  # its place in the order survives a restart
        except (OSError, ValueError):
            self._forget(key)
            self.counts.misses += 1
            return None
        if key in self._sizes:
            self._sizes.move_to_end(key)
        self.counts.hits += 1
        return found

    def put(self, key: str, answer: ToolCall) -> None:
        """Keep an answer. A disk that is full costs the entry and nothing else."""
        data = answer.model_dump_json(include={"name", "arguments"}).encode()
        if len(data) > self._max_bytes:
            return
        path = self._path(key)
        part = path.with_name(f".{key}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
        except OSError:
            self.counts.not_written += 1
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return
        self._forget(key)
        self._sizes[key] = len(data)
        self._total += len(data)
        self._shrink()

    def snapshot(self) -> dict[str, Any]:
        """Counts and size as JSON data."""
        return {**asdict(self.counts), "entries": len(self._sizes), "bytes": self._total}

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"

    def _forget(self, key: str) -> None:
        self._total -= self._sizes.pop(key, 0)

    def _shrink(self) -> None:
        while self._total > self._max_bytes:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            with contextlib.suppress(OSError):  # gone already is as good
                self._path(oldest).unlink()
            self.counts.evicted += 1


def cache_key(url: str, body: dict[str, Any]) -> str:
    """The digest of a question: where it is asked, and the whole request (which holds no key)."""
    return sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


def _entries(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for part in folder.glob("??/.*.part"):
        with contextlib.suppress(OSError):
            if part.stat().st_mtime < time.time() - STALE_S:
                part.unlink()
    for path in folder.glob("??/*.json"):
        with contextlib.suppress(OSError):  # another process has just removed it
            found.append((path, path.stat()))
    return found
