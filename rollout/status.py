"""What the rollout side is doing, for people and for ``hintloop status``: one small file, ever rewritten."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from hintloop.agent.episode import EpisodeNotes
from hintloop.replay.episode import Episode, Outcome
from hintloop.rollout.failures import Part
from hintloop.rollout.offload import aside

_log = structlog.get_logger(__name__)

BEAT_S = 0.5
WRITE_S = 5.0
"""What writing the file may take."""
RECENT_GROUPS = 20
RATE_WINDOW_S = 30.0
MAX_REASONS = 50
"""Reasons counted by name; the rest is counted as ``other``, so that the file stays small."""


@dataclass(slots=True)
class Board:
    """Counts since the start of this process, and the state in words: who waits for whom."""

    state: str = "starting"
    since: float = field(default_factory=time.time)
    evaluation: str | None = None
    started_at: float = field(default_factory=time.time)
    episodes: int = 0
    in_flight: int = 0
    waiting_for_environment: int = 0
    """Episodes in flight that have no environment yet."""
    groups_started: int = 0
    groups_dropped: int = 0
    groups_equal: int = 0
    """Groups in the journal whose rewards are all equal."""
    groups_resampled: int = 0
    """Groups with equal rewards that were played anew with another task."""
    lost: Counter[str] = field(default_factory=Counter)
    """Episodes lost, by reason."""
    failures: Counter[str] = field(default_factory=Counter)
    """Whatever failed, by the part that did; most cost an episode, some only a retry or its pairs."""
    hint_sites: int = 0
    pairs: int = 0
    dropped_sites: Counter[str] = field(default_factory=Counter)
    render_failures: int = 0
    sampling_overridden: Counter[str] = field(default_factory=Counter)
    tool_errors: Counter[str] = field(default_factory=Counter)
    details: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Further entries by name, computed at each beat."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_GROUPS))
    _finished_at: deque[float] = field(default_factory=lambda: deque(maxlen=4096))

    def say(self, state: str) -> None:
        """Set the state; ``since`` stays when it is the same."""
        if state != self.state:
            self.state, self.since = state, time.time()

    def lose(self, reason: str) -> None:
        """Count a lost episode."""
        _count(self.lost, reason, 1)

    def lose_to(self, part: Part, reason: str) -> None:
        """Count an episode that a part lost."""
        self.fail(part)
        self.lose(reason)

    def fail(self, part: Part) -> None:
        """Count a failure of a part."""
        self.failures[str(part)] += 1

    def episode_done(self, episode: Episode, notes: EpisodeNotes) -> None:
        """Count a finished episode."""
        self.episodes += 1
        self._finished_at.append(time.monotonic())
        self.hint_sites += len(episode.hint_sites)
        self.render_failures += notes.render_failures
        for reason, count in notes.dropped_sites.items():
            _count(self.dropped_sites, reason, count)
        for setting, count in notes.overridden.items():
            _count(self.sampling_overridden, setting, count)
        for kind, count in notes.errors.items():
            _count(self.tool_errors, kind, count)

    def group_done(self, group: list[Episode], *, equal: bool = False) -> None:
        """Count a group that is in the journal; ``equal``: its rewards say nothing."""
        self.groups_equal += equal
        self.pairs += sum(len(episode.pairs) for episode in group)
        solved = sum(episode.outcome is Outcome.SOLVED for episode in group)
        self._recent.append(solved / len(group))

    @property
    def success_rate(self) -> float | None:
        """Share of solved episodes in the last groups; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def episodes_per_s(self) -> float:
        """Finished episodes per second, over the last half minute."""
        now = time.monotonic()
        while self._finished_at and now - self._finished_at[0] > RATE_WINDOW_S:
            self._finished_at.popleft()
        if len(self._finished_at) < 2:
            return 0.0
        return len(self._finished_at) / max(now - self._finished_at[0], 1e-6)

    def _words(self) -> str:
        state = self.state
        if 0 < self.in_flight == self.waiting_for_environment:
            state += "; all of them wait for the environment server"
        return state if self.evaluation is None else f"{state}; {self.evaluation}"

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON data."""
        return {
            "updated": time.time(),
            "pid": os.getpid(),
            "started_at": self.started_at,
            "state": self._words(),
            "since": self.since,
            "episodes": self.episodes,
            "episodes_per_s": round(self.episodes_per_s, 2),
            "success_rate": self.success_rate,
            "in_flight": self.in_flight,
            "waiting_for_environment": self.waiting_for_environment,
            "groups_started": self.groups_started,
            "groups_dropped": self.groups_dropped,
            "groups_equal": self.groups_equal,
            "groups_resampled": self.groups_resampled,
            "lost": dict(self.lost),
            "failures": dict(self.failures),
            "hint_sites": self.hint_sites,
            "pairs": self.pairs,
            "dropped_sites": dict(self.dropped_sites),
            "render_failures": self.render_failures,
            "sampling_overridden": dict(self.sampling_overridden),
            "tool_errors": dict(self.tool_errors),
            **{name: read() for name, read in self.details.items()},
        }


class StatusFile:
    """Writes a board to a file: at each beat, and from another thread when there are none."""

    def __init__(self, board: Board, path: Path) -> None:
        self._board = board
        self._path = path
        self._last: dict[str, Any] = {}
        self._lock = threading.Lock()

    async def beat(self) -> None:
        """Write until cancelled."""
        while True:
            writing = asyncio.ensure_future(self._write_aside())
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait({writing}, timeout=WRITE_S)
                raise
            await asyncio.sleep(BEAT_S)

    def write(self) -> None:
        """Write the board as it is now."""
        self._last = self._board.snapshot()
        self._put(self._last)

    def write_blocked(self, loop: dict[str, Any]) -> None:
        """Write what was known when the event loop stopped, and ``loop``: what it is doing since. For any thread."""
        if self._last:
            self._put({**self._last, "loop": loop})

    async def _write_aside(self) -> None:
        self._last = snapshot = self._board.snapshot()
        try:
            await aside(lambda: self._put(snapshot), name="status", limit_s=WRITE_S)
        except TimeoutError:
            _log.warning("status_not_written", path=str(self._path), error="the disk does not answer")

    def _put(self, snapshot: dict[str, Any]) -> None:
        if not self._lock.acquire(timeout=WRITE_S):
            return  # the write before it hangs
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, snapshot)
        except OSError as error:
            _log.warning("status_not_written", path=str(self._path), error=str(error))
        finally:
            self._lock.release()


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace ``path`` in one piece; a reader never sees half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data))
    part.replace(path)


def append_line(path: Path, data: dict[str, Any]) -> None:
    """Append one JSON line, whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(data).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise


def _count(counter: Counter[str], name: str, by: int) -> None:
    counter[name if name in counter or len(counter) < MAX_REASONS else "other"] += by
