"""Replicas as processes of this machine: none outlives the executor, and none leaves anything behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from hintloop.learner.executors import guard
from hintloop.learner.executors.protocol import (
    EXIT_KILLED,
    EXIT_TIMEOUT,
    ExecutorError,
    ReplicaHandle,
    ReplicaResult,
    ReplicaSpec,
    ReplicaState,
    explain,
    secret_values,
)
from hintloop.learner.executors.waiting import LINE_CHARS, collected

_LOOK_S = 0.1
_REAP_S = 10.0
_TAIL_BYTES = 16_384


class LocalProcessExecutor:
    """Starts each replica in a process group of its own; its output is appended to ``LOGS/replica-N.log``.

    A context manager: at its end all are cancelled. When this process dies, of SIGKILL too, all are killed.
    """

    poll_s = 0.2

    def __init__(self, logs: Path, *, stop_s: float = 30.0) -> None:
        """``stop_s``: how long a replica that is cancelled may take to save what it has."""
        self._logs, self._stop_s = logs, stop_s
        self._children: dict[str, _Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stop(list(self._children.values()))
        finally:
            for child in self._children.values():
                child.kill()

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> tuple[ReplicaHandle, ...]:
        """Start all, or none. ``ExecutorError`` also for what only a service elsewhere can give."""
        for spec in specs:
            if spec.hardware or spec.volumes:
                raise ExecutorError(
                    f"replica {spec.index} has this machine's hardware and folders, no others"
                )
        environments = [{**os.environ, **spec.env, **secret_values(spec.secrets)} for spec in specs]
        started: list[_Child] = []
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            for spec, environment in zip(specs, environments, strict=True):
                started.append(_Child(spec, environment, self._logs / f"replica-{spec.index}.log"))
        except OSError as error:
            raise ExecutorError(f"cannot start replicas: {error}") from error
        finally:
            if len(started) < len(specs):
                for child in started:
                    child.kill()
        handles = tuple(ReplicaHandle(str(child.pid), child.spec.index) for child in started)
        self._children |= {handle.id: child for handle, child in zip(handles, started, strict=True)}
        return handles

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Where the process is now."""
        return self._child(handle).result().state

    def stream_logs(self, handle: ReplicaHandle, *, timeout_s: float) -> Iterator[str]:
        """The lines that it writes, from its first; ends with it, or after ``timeout_s``."""
        return self._child(handle).lines(timeout_s)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """SIGTERM to the groups of those that run, SIGKILL to what is left after ``stop_s``. Returns when all ended."""
        self._stop([self._child(handle) for handle in handles])

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout_s: float) -> tuple[ReplicaResult, ...]:
        """Wait until all are over, ``timeout_s`` at most; the results in the same order."""
        return collected(
            lambda handle: self._child(handle).result(), handles, timeout_s=timeout_s, poll_s=self.poll_s
        )

    def _child(self, handle: ReplicaHandle) -> _Child:
        if handle.id not in self._children:
            raise ExecutorError(
                f"process {handle.id} was not started by this executor, with which it would end"
            )
        return self._children[handle.id]

    def _stop(self, children: Sequence[_Child]) -> None:
        for child in children:
            child.ask_to_end()
        deadline = time.monotonic() + self._stop_s
        while time.monotonic() < deadline and not all(child.over() for child in children):
            time.sleep(_LOOK_S)
        for child in children:
            child.kill()


class _Child:
    """A process under a guard; may be looked at from several threads."""

    def __init__(self, spec: ReplicaSpec, environment: dict[str, str], log: Path) -> None:
        self.spec, self._log = spec, log
        self._lock = threading.Lock()
        self._cancelled = False
        self._status: str | None = None
        """What the guard said; None before the end."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            with theirs, log.open("ab") as file:
                self._log_start = file.tell()
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    [*_guarded(spec.timeout_s), *spec.command],
                    stdin=theirs.fileno(),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise

    @property
    def pid(self) -> int:
        """Of the guard, and of the process group."""
        return self._process.pid

    def over(self) -> bool:
        """Whether it has ended; what it had started is then gone, too."""
        with self._lock:
            if self._status is None and self._guard_ended():
                self._reap()
            return self._status is not None

    def ask_to_end(self) -> None:
        """SIGTERM to all of it, if it runs."""
        if self.over():
            return
        with self._lock:
            if self._status is None:
                self._cancelled = True
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of it, if it runs."""
        if self.over():
            return
        with self._lock:
            if self._status is None:
                self._cancelled = True
                self._reap()

    def result(self) -> ReplicaResult:
        """Where it is, and how it ended."""
        index = self.spec.index
        if not self.over():
            return ReplicaResult(index, ReplicaState.RUNNING)
        assert self._status is not None
        code = EXIT_TIMEOUT if self._status == guard.TIMEOUT else int(self._status or EXIT_KILLED)
        if code == 0:
            return ReplicaResult(index, ReplicaState.SUCCEEDED, 0)
        if self._cancelled:
            return ReplicaResult(index, ReplicaState.CANCELLED, code)
        timeout_s = self.spec.timeout_s if self._status == guard.TIMEOUT else None
        return ReplicaResult(
            index, ReplicaState.FAILED, code, explain(code, self._last_line(), timeout_s=timeout_s)
        )

    def lines(self, timeout_s: float) -> Iterator[str]:
        """Its output, line by line, as it comes."""
        deadline = time.monotonic() + timeout_s
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            rest = b""
            while True:
                over = self.over()  # asked first: then all that it wrote can be read
                for line in _read_lines(file, rest):
                    rest = b"" if line.endswith(b"\n") else line
                    if not rest:
                        yield _text(line)
                    if time.monotonic() > deadline:
                        return
                if over or time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_S)
            if rest:
                yield _text(rest)

    def _guard_ended(self) -> bool:
        """It is not reaped by that, so its group cannot be another's yet."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_REAP_S)
        with self._channel:
            try:
                self._status = self._channel.recv(16).decode()
            except OSError:  # it was killed before it could say anything
                self._status = ""

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")


def _guarded(timeout_s: float) -> list[str]:
    return [sys.executable, "-I", "-S", guard.__file__, str(timeout_s)]


def _read_lines(file: BinaryIO, rest: bytes) -> Iterator[bytes]:
    """Lines as far as there are any, the first after ``rest``; one that is too long in pieces."""
    while more := file.readline(max(1, LINE_CHARS - len(rest))):
        line, rest = rest + more, b""
        yield line if len(line) < LINE_CHARS or line.endswith(b"\n") else line + b"\n"


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
