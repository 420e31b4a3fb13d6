"""What a learner leaves on disk beside its checkpoints: line files, cut back on resume, and a heartbeat."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hintloop.learner.batch import COUNTED
from hintloop.replay.storage import Store

BEAT_SECONDS = 2.0
"""A heartbeat with nothing new to say is written again after this long."""


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one JSON line and flush it to the disk. ``ValueError`` when the record holds NaN or infinity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove what was written after ``step``, a torn last line included; gives the records that stay."""
    if not path.exists():
        return []
    kept: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a crash; it belongs to a step that is not in the checkpoint
        if record["step"] <= step:
            kept.append(record)
    text = "".join(json.dumps(record) + "\n" for record in kept)
    Store(path.parent).replace(path.name, text.encode())
    return kept


class Records:
    """What was trained, and what was measured: a line per step in each of two files."""

    def __init__(self, run_dir: Path) -> None:
        self._trained, self._metrics = run_dir / "trained.jsonl", run_dir / "metrics" / "learner.jsonl"
        self.counts: Counter[str] = Counter()
        """Sums over all steps of what ``COUNTED`` names."""
        self.episodes = 0
        """Episodes of all steps."""

    def cut(self, step: int) -> list[dict[str, Any]]:
        """Forget what came after a step; gives what was trained until then."""
        self.counts.clear()
        for metrics in cut_lines(self._metrics, step):
            self._count(metrics)
        trained = cut_lines(self._trained, step)
        self.episodes = sum(len(record["episodes"]) for record in trained)
        return trained

    def add(self, trained: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Write down a step."""
        append_line(self._trained, trained)
        append_line(self._metrics, metrics)
        self._count(metrics)
        self.episodes += len(trained["episodes"])

    def _count(self, metrics: dict[str, Any]) -> None:
        self.counts.update({name: int(metrics.get(name, 0)) for name in COUNTED})


class Heartbeat:
    """Tells whoever looks what the learner is doing; readers see a whole file always."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = ""
        self._since = 0.0
        self._written = 0.0

    def beat(self, state: str, *, step: int, version: int) -> None:
        """Say the state; the same state again only moves ``updated``, and at most every ``BEAT_SECONDS``."""
        now = time.time()
        if state == self._state and now - self._written < BEAT_SECONDS:
            return
        if state != self._state:
            self._state, self._since = state, now
        self._written = now
        record = {
            "state": state,
            "since": self._since,
            "updated": now,
            "step": step,
            "version": version,
            "pid": os.getpid(),
        }
        Store(self._path.parent).replace(self._path.name, json.dumps(record).encode())
