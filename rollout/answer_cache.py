"""Answers of teachers on disk, found by everything that was asked: the same question costs nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from hintloop.rollout.offload import aside

DISK_S = 2.0
"""What a look into the cache may take; then the question is asked, and nothing is kept until the disk answers."""
T = TypeVar("T")
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
    account of the size. Threads may share it; ``find`` and ``keep`` are for an event loop, which never waits for the
    disk.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.counts = CacheCounts()
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._hangs = False
        self._sizes: OrderedDict[str, int] = OrderedDict()
        for path, stat in sorted(_entries(folder), key=lambda entry: entry[1].st_mtime_ns):
            self._sizes[path.stem] = stat.st_size
        self._total = sum(self._sizes.values())
        self._shrink()

    async def find(self, key: str, read: Callable[[str], T]) -> T | None:
        """``get`` in a thread; a disk that does not answer has no answer."""
        return await self._aside(partial(self.get, key, read))

    async def keep(self, key: str, answer: str) -> None:
        """``put`` in a thread; a disk that does not answer keeps nothing."""
        await self._aside(partial(self.put, key, answer))

    def get(self, key: str, read: Callable[[str], T]) -> T | None:
        """What ``read`` makes of the text kept for a key of ``cache_key``; None when there is none that it can read."""
        with self._lock:
            path = self._path(key)
            try:
                found = read(path.read_text(encoding="utf-8"))
                os.utime(path)  # its place in the order survives a restart
            except (OSError, ValueError):
                self._forget(key)
                self.counts.misses += 1
                return None
            if key in self._sizes:
                self._sizes.move_to_end(key)
            self.counts.hits += 1
            return found

    def put(self, key: str, answer: str) -> None:
        """Keep a text. A disk that is full costs the entry and nothing else."""
        data = answer.encode()
        if len(data) <= self._max_bytes:
            with self._lock:
                self._put(key, data)

    async def _aside(self, call: Callable[[], T]) -> T | None:
        if self._hangs:
            return None

        def work() -> T:
            made = call()
            self._hangs = False
            return made

        try:
            return await aside(work, name="answers", limit_s=DISK_S)
        except TimeoutError:
            self._hangs = True
            return None

    def _put(self, key: str, data: bytes) -> None:
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
