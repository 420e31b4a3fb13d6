"""The sandbox protocol: the only place where model-written code runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Status(StrEnum):
    """How one execution ended."""

    OK = "ok"
    NONZERO = "nonzero"
    TIMEOUT = "timeout"
    OOM = "oom"
    OUTPUT_CAPPED = "output_capped"
    SANDBOX_DEAD = "sandbox_dead"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Outcome of a command; ``output`` is stdout and stderr together, decoded with replacement, head and tail kept."""

    status: Status
    exit_code: int | None
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CallResult:
    """Outcome of one function call in the sandbox: a JSON value, or the type name of what was raised."""

    value: Any = None
    error: str | None = None
    """Exception type and message in one line, or ``Timeout``; None when the call returned a plain JSON value."""


class SandboxDead(Exception):
    """The sandbox or its runner is gone: an infrastructure failure, never the agent's score."""


class Sandbox(Protocol):
    """One isolated working directory with processes of its own. All paths are relative to the working directory."""

    isolation: str

    def exec(self, command: str, *, timeout: float, stdin: bytes = b"") -> ExecResult:
        """Run a shell command; its whole process tree is dead when this returns.

        ``timeout`` in seconds. Raises ``SandboxDead``.
        """
        ...

    def call_function(
        self, path: str, function: str, calls: Sequence[Sequence[Any]], *, timeout: float
    ) -> list[CallResult]:
        """Import ``path`` in a fresh child process and call ``function`` once per argument list.

        One result per call, in order; only plain JSON data crosses the boundary, with exact types (bool is not
        int, int is not float). ``timeout`` (seconds) covers all calls together; those not reached get
        ``Timeout``. Raises ``SandboxDead``.
        """
        ...

    def read(self, path: str) -> bytes:
        """Content of a file.

        ``FileNotFoundError``, ``PermissionError`` (outside of the working directory, or too large), ``SandboxDead``.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making folders. ``PermissionError`` or ``SandboxDead``."""
        ...

    def list_files(self) -> list[str]:
        """All regular files, sorted, at most 1,000."""
        ...

    def fork(self) -> Sandbox:
        """A second sandbox of the same provider, with a copy of the working directory as it is now.

        Files, folders and links are copied with their modes and times; no process is alive that could be. What
        lies in the temp folder stays behind. Both go on apart. Raises ``SandboxDead``.
        """
        ...

    def close(self) -> None:
        """Kill every process and remove every file of the sandbox. Never raises; safe to call twice."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes of one kind."""

    isolation: str

    def start(self, files: dict[str, str]) -> Sandbox:
        """A fresh sandbox that holds ``files``.

        Raises ``SandboxDead`` when none can be started and ``ValueError`` when the files cannot fit.
        """
        ...

    def close(self) -> None:
        """Close all sandboxes that are still open."""
        ...
