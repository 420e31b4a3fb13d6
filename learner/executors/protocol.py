"""What an executor is: it starts replicas as jobs, watches them, and says how each ended.

A job's failure is data (``ReplicaResult``); what the executor itself cannot do is an ``ExecutorError``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

EXIT_TIMEOUT = 124
"""Exit code of a job that took longer than its ``timeout_s``."""
EXIT_KILLED = 128 + signal.SIGKILL
"""Exit code of a job that was killed."""
ERROR_CHARS = 500


class ExecutorError(Exception):
    """What was asked cannot be done; the text is one line and says why."""


class Unreachable(ExecutorError):
    """The service did not answer, or not well; later it may."""


class ReplicaState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether nothing of it runs, or will."""
        return self not in (ReplicaState.QUEUED, ReplicaState.RUNNING)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A job to start. Nothing in it is secret: of secrets it holds the names."""

    index: int
    """Number of the replica, from 0."""
    command: tuple[str, ...]
    """What to run; see ``replica_entrypoint.command``."""
    timeout_s: float
    """Seconds after which it is ended."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment that anybody may read."""
    secrets: tuple[str, ...] = ()
    """Names of variables whose values it gets from the environment of who launches it."""
    hardware: str | None = None
    """A flavor of Hugging Face's (``a10g-small``) or a GPU of Modal's (``A100``); None: a small CPU machine."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Folder in the job -> name of the bucket (``owner/name``) or volume that it shows. What lies elsewhere is lost
    with the job."""


@dataclass(frozen=True, slots=True)
class ReplicaHandle:
    """A job that was started."""

    id: str
    """What its service calls it."""
    index: int
    """Number of the replica."""


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """Where a job is, and how it ended if it did."""

    index: int
    state: ReplicaState
    exit_code: int | None = None
    """As a shell gives it: 128 + n for signal n. None when it is not known."""
    error: str | None = None
    """One line; None when there is nothing to complain of."""


class ServerlessExecutor(Protocol):
    """Starts replicas somewhere. All its waits have a deadline."""

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at a job that it can bear."""
        ...

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> tuple[ReplicaHandle, ...]:
        """Start all, or none: raises ``ExecutorError`` after it has cancelled those that it had started."""
        ...

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Where a job is now. Raises ``ExecutorError``."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, timeout_s: float) -> Iterator[str]:
        """The lines that a job writes, from its first; ends when the job does, or after ``timeout_s``.

        Raises ``ExecutorError``. A line is cut after ``waiting.LINE_CHARS``.
        """
        ...

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """End these jobs and all that they started; those that are over stay as they are.

        Raises ``ExecutorError`` after it has tried all.
        """
        ...

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout_s: float) -> tuple[ReplicaResult, ...]:
        """Wait until all are over, ``timeout_s`` at most; the results in the same order. Never raises for a job."""
        ...


def secret_values(names: Sequence[str]) -> dict[str, str]:
    """The values of secrets, from this process's environment. ``ExecutorError`` for one that is not there."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ExecutorError(f"the secret {', '.join(missing)} is not set in the environment")
    return {name: os.environ[name] for name in names}


def explain(exit_code: int | None, last_line: str, *, timeout_s: float | None = None) -> str:
    """Why a job failed, in one line: what it said last, unless it was not given the time to say it."""
    if exit_code == EXIT_TIMEOUT:
        return "took longer than it may" if timeout_s is None else f"took longer than {timeout_s:g} s"
    if exit_code is not None and exit_code > 128:
        return f"was killed by {_signal(exit_code - 128)}"
    said = " ".join(last_line.split())[-ERROR_CHARS:]
    return said or ("failed" if exit_code is None else f"ended with exit code {exit_code}")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
