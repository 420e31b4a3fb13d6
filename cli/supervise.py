"""Starts the processes of a run, watches them, and ends them: none is ever left behind.

Workers end by themselves; servers run until they are told to stop. When anything ends that should not, all
the others are stopped: SIGTERM first, SIGKILL for the whole process group after a deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from hintloop.cli import leash

POLL_S = 0.2
TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to run. Its output is appended to ``log``."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    server: bool = False
    """It runs until it is told to stop."""


class ChildFailed(Exception):
    """A child ended that should not have, or was not ready in time."""

    def __init__(self, name: str, what: str, tail: str):
        """``tail`` are the last lines of its log."""
        super().__init__(f"{name} {what}")
        self.name = name
        self.tail = tail


class Stopped(Exception):
    """Somebody asked to stop."""


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes]
    log_start: int
    """Where its own output begins in the log, in bytes."""

    def tail(self, lines: int = 8) -> str:
        """The last lines that it wrote."""
        with self.spec.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs. What it started ends with it."""
        if self.process.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.process.pid, options) is not None:
                self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """Kill the whole process group and reap the child; until then its id cannot be another's."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Supervisor:
    """The children of one run; as a context manager it stops them all at the end."""

    def __init__(self, tick: Callable[[], None] = lambda: None, *, stop_s: float = 60.0) -> None:
        """``tick`` is called several times a second; ``stop_s``: how long a child may take after SIGTERM."""
        self._tick = tick
        self._stop_s = stop_s
        self._children: list[_Child] = []
        self._stop_asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, spec: ChildSpec) -> None:
        """Start a process in a group of its own. It dies with this process."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", leash.__file__, str(os.getpid()), *spec.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(spec.env),
                start_new_session=True,
            )
            self._children.append(_Child(spec, process, log.tell()))

    def wait_file(self, name: str, path: Path, *, timeout_s: float) -> str:
        """The text of a file that the child ``name`` writes when it is ready.

        Raises ``ChildFailed``, also after ``timeout_s``, and ``Stopped``.
        """
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            self._look()
            if time.monotonic() > deadline:
                raise ChildFailed(name, f"was not ready after {timeout_s:g} s", self._child(name).tail())
            time.sleep(POLL_S)
        return path.read_text().strip()

    def wait_end(self, name: str, *, timeout_s: float | None = None) -> None:
        """Return when the worker ``name`` has ended well. Raises ``ChildFailed``, also after ``timeout_s``
        (None: as long as it takes), and ``Stopped``.
        """
        child = self._child(name)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while child.exit_code() is None:
            self._look()
            if deadline is not None and time.monotonic() > deadline:
                raise ChildFailed(name, f"has not ended after {timeout_s:g} s", child.tail())
            time.sleep(POLL_S)
        self._look()

    def stop(self) -> None:
        """End all children: workers, then servers, which the workers may still need. Can be called again."""
        for servers in (False, True):
            self._stop([child for child in self._children if child.spec.server is servers])
        self._children.clear()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP ask to stop while this is open; a second one stops without waiting."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked += 1

    def _child(self, name: str) -> _Child:
        return next(child for child in self._children if child.spec.name == name)

    def _look(self) -> None:
        """One look at everything."""
        self._tick()
        if self._stop_asked:
            raise Stopped
        for child in self._children:
            code = child.exit_code()
            if code is not None and (code != 0 or child.spec.server):
                raise ChildFailed(child.spec.name, _how(code), child.tail())

    def _stop(self, children: Sequence[_Child]) -> None:
        for child in children:
            if child.exit_code() is None:
                child.process.terminate()
        deadline = time.monotonic() + self._stop_s
        while any(child.exit_code() is None for child in children):
            if time.monotonic() > deadline or self._stop_asked > 1:
                break
            self._tick()
            time.sleep(POLL_S / 4)
        for child in children:
            child.kill()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended unexpectedly with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
