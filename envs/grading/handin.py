"""What of an agent's work is graded, read from its sandbox: bounded, and told when something did not fit."""

from __future__ import annotations

from dataclasses import dataclass

from hintloop.envs.sandbox.base import Sandbox, SandboxProvider, Status
from hintloop.envs.task import RepositoryTests, Script, Task

MAX_FILES = 500
MAX_BYTES = 8 * 1024 * 1024
"""Of all files together."""

Files = dict[str, str | None]
"""Path in the working directory -> content, None when the agent has removed it; bytes that are not UTF-8 are
surrogate escapes. What is not there is as it was at first."""


@dataclass(frozen=True, slots=True)
class HandIn:
    """An agent's work."""

    files: Files
    left_out: int
    """How many files could not be taken along: too many, too large, or without a readable name."""


class SolutionFailed(Exception):
    """The script of a reference solution does not end well."""


def hand_in(task: Task, sandbox: Sandbox) -> HandIn:
    """What the task grades of the work in ``sandbox``. Raises ``SandboxDead``."""
    if isinstance(task.tests, RepositoryTests):
        return _changes(task.tests, sandbox)
    wanted = sorted({*task.files, task.tests.path})
    files, unread = _read(sandbox, wanted)
    present = set(sandbox.list_files()) if unread else set()
    return HandIn({**dict.fromkeys(unread), **files}, len(present.intersection(unread)))


def solved(provider: SandboxProvider, task: Task) -> Files:
    """What the reference solution hands in. Raises ``SolutionFailed`` and ``SandboxDead``."""
    if isinstance(task.solution, dict):
        return {**task.files, **task.solution}
    sandbox = start_solved(provider, task)
    try:
        return hand_in(task, sandbox).files
    finally:
        sandbox.close()


def start_solved(provider: SandboxProvider, task: Task) -> Sandbox:
    """A sandbox in which the reference solution has done its work. Raises ``SolutionFailed`` and ``SandboxDead``."""
    if isinstance(task.solution, dict):
        return provider.start({**task.files, **task.solution}, task.sandbox)
    sandbox = provider.start(task.files, task.sandbox)
    try:
        _run(task.solution, sandbox)
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def _run(script: Script, sandbox: Sandbox) -> None:
    for path, text in script.files.items():
        sandbox.write(f"/solution/{path}", text.encode("utf-8", "surrogateescape"))
    result = sandbox.exec(script.command, timeout=script.timeout, env=script.env)
    if result.status not in (Status.OK, Status.OUTPUT_CAPPED):
        raise SolutionFailed(f"the solution's script fails: {result.status}, {result.output[-300:]!r}")


def _changes(tests: RepositoryTests, sandbox: Sandbox) -> HandIn:
    changes = sandbox.changes()
    changed = [path for path in changes.changed if _is_declared(path, tests.artifacts)]
    removed = [path for path in changes.removed if _is_declared(path, tests.artifacts)]
    files, unread = _read(sandbox, changed)
    return HandIn({**dict.fromkeys(removed), **files}, changes.left_out + len(unread))


def _is_declared(path: str, artifacts: tuple[str, ...]) -> bool:
    names = [name.rstrip("/") for name in artifacts]
    return not names or any(name in (path, ".") or path.startswith(f"{name}/") for name in names)


def _read(sandbox: Sandbox, paths: list[str]) -> tuple[Files, list[str]]:
    """The contents, and the paths that could not be read or no longer fit."""
    files: Files = {}
    unread: list[str] = []
    left = MAX_BYTES
    for path in paths:
        try:
            data = sandbox.read(path) if len(files) < MAX_FILES else None
        except (FileNotFoundError, PermissionError):
            data = None
        if data is None or len(data) > left:
            unread.append(path)
        else:
            left -= len(data)
            files[path] = data.decode("utf-8", "surrogateescape")
    return files, unread
