"""The sandbox protocol: the only place where model-written code runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from hintloop.envs.sandbox import limits


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
    left_running: bool = False
    """Whether processes that it had started outlived it, when that was asked for."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Outcome of one function call in the sandbox: a JSON value, or the type name of what was raised."""

    value: Any = None
    error: str | None = None
    """Exception type and message in one line, or ``Timeout``; None when the call returned a plain JSON value."""


class SandboxDead(Exception):
    """The sandbox or its runner is gone: an infrastructure failure, never the agent's score."""


class Unsupported(SandboxDead):
    """What a task asks for is not what this kind of sandbox can give; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Regular files of a working directory, as they differ from those that the sandbox began with; sorted."""

    changed: list[str]
    removed: list[str]
    left_out: int
    """How many more there are."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a task asks of its sandbox."""

    image: str | None = None
    """Container image that the working directory and the programs come from; None: the provider's own."""
    context: str | None = None
    """Folder on the server, with a Dockerfile, that the image is built from when the engine has none of its name."""
    env: dict[str, str] = field(default_factory=dict)
    """What every command finds in its environment beside what is always there."""
    memory: int = limits.MEMORY
    """Bytes of address space of each process."""
    disk: int = limits.DISK
    """Bytes of the working directory, and of the temp folder."""
    cpus: float = 1.0
    """Share of processors, where the provider can bound it."""


USUAL = SandboxSpec()
"""What a task asks for that says nothing of it."""


class Sandbox(Protocol):
    """One isolated working directory with processes of its own.

    Paths are relative to the working directory, or absolute below it, ``/tests``, ``/logs`` or ``/solution``. These
    three are empty at first; they are for who grades or solves.
    """

    isolation: str

    def exec(
        self,
        command: str,
        *,
        timeout: float,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        grace: float | None = None,
    ) -> ExecResult:
        """Run a shell command; its whole process tree is dead when this returns.

        ``timeout`` in seconds; ``env`` is added to the environment. ``grace``: seconds that other processes get to
        end by themselves after the command, for ``left_running``; None kills them at once. Raises ``SandboxDead``.
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

        ``FileNotFoundError``, ``PermissionError`` (outside of the folders, or too large), ``SandboxDead``.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making folders. ``PermissionError`` or ``SandboxDead``."""
        ...

    def list_files(self) -> list[str]:
        """All regular files of the working directory, sorted, at most 1,000."""
        ...

    def changes(self) -> Changes:
        """What is not as the sandbox was given out. A fork counts from the start of the first. ``SandboxDead``."""
        ...

    def fork(self) -> Sandbox:
        """A second sandbox of the same provider, with a copy of the working directory as it is now.

        Files, folders and links are copied with their modes and times; no process is alive that could be. What
        lies in other folders stays behind. Both go on apart. Raises ``SandboxDead``.
        """
        ...

    def close(self) -> None:
        """Kill every process and remove every file of the sandbox. Never raises; safe to call twice."""
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes of one kind."""

    isolation: str

    def start(self, files: dict[str, str], spec: SandboxSpec = USUAL) -> Sandbox:
        """A fresh sandbox that holds ``files``, as ``spec`` asks for it.

        Raises ``SandboxDead`` when none can be started (``Unsupported`` when none ever can) and ``ValueError`` when
        the files cannot fit.
        """
        ...

    def close(self) -> None:
        """Close all sandboxes that are still open."""
        ...
