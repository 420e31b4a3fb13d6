"""The files of a run, by name, and how to read those that are still being written."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hintloop.cli.errors import UserError

PARTS = ("rollout", "learner")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``runs/<name>/``."""

    path: Path

    @property
    def config(self) -> Path:
        """The effective config."""
        return self.path / "config.toml"

    @property
    def student(self) -> Path:
        """The start model."""
        return self.path / "student"

    @property
    def journal(self) -> Path:
        """All finished episodes."""
        return self.path / "journal"

    @property
    def weights(self) -> Path:
        """Published versions."""
        return self.path / "weights"

    @property
    def plays(self) -> Path:
        """One line for each time that the run was started."""
        return self.path / "plays.jsonl"

    @property
    def evaluation(self) -> Path:
        """One line per evaluation."""
        return self.path / "evaluation.jsonl"

    def log(self, name: str) -> Path:
        """Output of a process."""
        return self.path / "logs" / f"{name}.log"

    def ready(self, name: str) -> Path:
        """The URL of a server, while it is up."""
        return self.path / "status" / f"{name}.url"

    def metrics(self, part: str) -> Path:
        """One line per group (rollout; those played anew: resampled) or step (learner)."""
        return self.path / "metrics" / f"{part}.jsonl"

    def status(self, part: str) -> dict[str, Any] | None:
        """What the part last said it does; None before it said anything."""
        try:
            found = json.loads((self.path / "status" / f"{part}.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def is_run(self) -> bool:
        """Whether a run was ever started here."""
        return self.config.is_file()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process. ``UserError`` when another one holds it."""
        with (self.path / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another hintloop play is at work on {self.path}") from None
            yield


def existing(path: Path) -> RunFolder:
    """The folder of a run that was started. ``UserError`` when there is none."""
    folder = RunFolder(path)
    if not folder.is_run():
        raise UserError(f"{path} is not the folder of a run (it has no config.toml)")
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole JSON lines; what a crash cut off is left out. Empty when there is no file."""
    tail = LineTail(path)
    tail.read()
    return tail.lines


class LineTail:
    """Follows a file of JSON lines; ``lines`` holds the newest ``keep`` of them (None: all)."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self._path = path
        self._keep = keep
        self._offset = 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take up what has come since; from the start when the file became shorter."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self.lines = 0, []
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += [line for text in whole.splitlines() if (line := _parse(text)) is not None]
        if self._keep is not None:
            del self.lines[: -self._keep]


def append_line(path: Path, **values: Any) -> None:
    """Add one JSON line with the time."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one piece."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
