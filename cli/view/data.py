"""A run in numbers that fit into memory however long it goes on: its files are followed, never read again."""

from __future__ import annotations

import os
import time
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import loads
from pathlib import Path
from typing import IO, Any

from hintloop.cli.runfolder import PARTS, RunFolder

READ_BYTES = 4 << 20
"""Bytes of a file in memory at once. A longer line is left out."""
MAX_BUCKETS = 360
MAX_NAMES = 96
"""Numbers of one kind of line that are followed, by name; more are left out."""
MAX_NAME_CHARS = 120
MAX_NUMBER = 1e18
MAX_EVALUATIONS = 400
RECENT = 20
"""Lines that make up what is shown as the present."""
_EVALUATION = ("version", "temperature", "n", "solved", "rate", "low", "high", "seconds")
ERROR = "error:"
"""Prefix of the numbers that count tool errors by kind."""


class Follower:
    """Gives each JSON line of a growing file once, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = -1

    def read(self) -> Iterator[dict[str, Any] | None]:
        """The lines that have come since. None before them means: the file is another one, start anew."""
        try:
            with self._path.open("rb") as file:
                yield from self._rest(file)
        except OSError:
            return

    def _rest(self, file: IO[bytes]) -> Iterator[dict[str, Any] | None]:
        inode, size = os.fstat(file.fileno()).st_ino, file.seek(0, 2)
        if inode != self._inode or size < self._offset:
            self._inode, self._offset = inode, 0
            yield None
        file.seek(self._offset)
        while data := file.read(READ_BYTES):
            end = data.rfind(b"\n") + 1
            if not end and len(data) < READ_BYTES:
                return  # half a line: the rest is still to come
            self._offset += end or len(data)
            file.seek(self._offset)
            yield from filter(None, map(_parse, data[:end].splitlines()))


@dataclass(slots=True)
class Sum:
    """What became of one number: first value, count, total and maximum."""

    first: float
    count: int
    total: float
    most: float

    def take(self, value: float) -> None:
        """Take in one more."""
        self.count += 1
        self.total += value
        if value > self.most:
            self.most = value

    def add(self, other: Sum) -> None:
        """Take in what came later."""
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float:
        return self.total / self.count


Sums = dict[str, Sum]


class Track:
    """The lines of one metrics file, summed up along their order in few buckets, and over all of them.

    When the buckets are full, each two become one, so a long run is shown whole, and coarser.
    """

    def __init__(self, path: Path) -> None:
        self._follower = Follower(path)
        self._clear()

    def _clear(self) -> None:
        self.lines = 0
        self.sums: Sums = {}
        """Over all lines, as of the last refresh."""
        self.buckets: list[Sums] = []
        self.recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        self._names: set[str] = set()
        self._size, self._left = 1, 0

    def refresh(self) -> None:
        """Take up the new lines."""
        changed = False
        for line in self._follower.read():
            changed = True
            if line is None:
                self._clear()
            else:
                self._add(line)
        if changed:
            self.sums = _merged(self.buckets)

    def _add(self, line: Mapping[str, Any]) -> None:
        if not self._left:
            self._open_bucket()
        self._left -= 1
        self.lines += 1
        bucket, values = self.buckets[-1], {}
        for name, value in _numbers(line):
            if name not in self._names:
                if len(self._names) == MAX_NAMES or len(name) > MAX_NAME_CHARS:
                    continue
                self._names.add(name)
            values[name] = value
            if name in bucket:
                bucket[name].take(value)
            else:
                bucket[name] = Sum(value, 1, value, value)
        self.recent.append(values)

    def _open_bucket(self) -> None:
        if len(self.buckets) == MAX_BUCKETS:
            self.buckets = [_merged(self.buckets[at : at + 2]) for at in range(0, MAX_BUCKETS, 2)]
            self._size *= 2
        self.buckets.append({})
        self._left = self._size

    def total(self, name: str) -> float:
        """Sum over all lines; 0 when no line has it."""
        return self.sums[name].total if name in self.sums else 0.0

    def mean(self, name: str) -> float | None:
        """Mean over the lines that have it."""
        return self.sums[name].mean if name in self.sums else None

    def most(self, name: str) -> float | None:
        """Maximum."""
        return self.sums[name].most if name in self.sums else None

    def now(self, name: str) -> float | None:
        """Mean over the newest lines."""
        values = [line[name] for line in self.recent if name in line]
        return sum(values) / len(values) if values else None

    def last(self, name: str) -> float | None:
        """Of the newest line."""
        return self.recent[-1].get(name) if self.recent else None

    def errors(self) -> dict[str, int]:
        """Tool errors by kind, the most frequent first."""
        found = {name.removeprefix(ERROR): int(s.total) for name, s in self.sums.items() if ERROR in name}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(slots=True)
class RunData:
    """What is known of a run; ``refresh`` brings it up to date."""

    folder: RunFolder
    groups: Track = field(init=False)
    steps: Track = field(init=False)
    config: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)
    status: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)
    """Part -> what it last said; empty before it said anything."""
    evaluations: deque[dict[str, Any]] = field(init=False)
    plays: deque[dict[str, Any]] = field(init=False)
    _lists: list[tuple[Follower, deque[dict[str, Any]]]] = field(init=False)

    def __post_init__(self) -> None:
        self.groups, self.steps = (Track(self.folder.metrics(part)) for part in PARTS)
        self.evaluations, self.plays = deque(maxlen=MAX_EVALUATIONS), deque(maxlen=MAX_EVALUATIONS)
        self._lists = [
            (Follower(self.folder.evaluation), self.evaluations),
            (Follower(self.folder.plays), self.plays),
        ]

    def refresh(self) -> None:
        """Read what is new."""
        self.groups.refresh()
        self.steps.refresh()
        for follower, kept in self._lists:
            for line in follower.read():
                if line is None:
                    kept.clear()
                elif as_number(line.get("time")) is not None and (kept is self.plays or _is_evaluation(line)):
                    kept.append(line)
        self.status = {part: self.folder.status(part) or {} for part in PARTS}
        self.config = _config(self.folder.config)

    def setting(self, section: str, name: str) -> Any:
        """A value of the run's config; None when there is none."""
        found = self.config.get(section)
        return found.get(name) if isinstance(found, dict) else None

    @property
    def started(self) -> float:
        """When the run began, Unix time; now when nothing has happened yet."""
        times = [as_number(line["time"]) for line in self.plays]
        times += [track.sums["time"].first for track in (self.groups, self.steps) if "time" in track.sums]
        return min((value for value in times if value is not None), default=time.time())


def as_number(value: Any) -> float | None:
    """A number that can be drawn, or None for anything else."""
    if not isinstance(value, (int, float)):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if abs(made) < MAX_NUMBER else None  # not for NaN either


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return all(isinstance(line.get(key), str) for key in ("label", "split")) and all(
        as_number(line.get(key)) is not None for key in _EVALUATION
    )


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    errors = line.get("errors")
    counted = {f"{ERROR}{kind}": count for kind, count in errors.items()} if isinstance(errors, dict) else {}
    for name, value in {**line, **counted}.items():
        if (made := as_number(value)) is not None:
            yield name, made


def _merged(buckets: Sequence[Sums]) -> Sums:
    """All of them as one; they stay as they are."""
    made: Sums = {}
    for bucket in buckets:
        for name, one in bucket.items():
            if name in made:
                made[name].add(one)
            else:
                made[name] = replace(one)
    return made


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _config(path: Path) -> dict[str, dict[str, Any]]:
    """As it stands there: a run of another version of this program is shown all the same."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
