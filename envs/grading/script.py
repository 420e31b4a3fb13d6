"""One run of a task's script, in a fresh sandbox that no process of the agent has seen.

The hand-in is laid over the task's own files, the tests come last, and the verdict is read when every process is dead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hintloop.envs.grading import hygiene
from hintloop.envs.grading.evidence import REPORT, Run, outcomes
from hintloop.envs.sandbox.base import Sandbox, SandboxProvider, Status
from hintloop.envs.task import RepositoryTests, Task

REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""The first that exists counts."""
_CLEAN_UP_SECONDS = 30.0
_SAID = 2000
"""Characters of output that are kept for the task's author."""
_GRACE = 0.3
"""Seconds that processes get to end by themselves after the script."""
_HARDENED = {
    "HOME": "/tmp",
    "PYTHONNOUSERSITE": "1",
    "PYTHONBREAKPOINT": "0",
    "PYTEST_ADDOPTS": f"-p no:cacheprovider --tb=short --junitxml={REPORT}",
}
"""Nothing that lies in the working directory is a start-up file or a debugger."""


def run_script(
    provider: SandboxProvider,
    task: Task,
    tests: RepositoryTests,
    test_files: Mapping[str, str],
    files: Mapping[str, str | None],
) -> Run:
    """Run the script on ``files``, with ``test_files`` for tests. Raises ``SandboxDead``, and never scores that."""
    sandbox = provider.start(task.files, task.sandbox)
    try:
        planted = _lay_over(sandbox, tests, files)
        for path, text in test_files.items():
            sandbox.write(f"/tests/{path}", text.encode("utf-8", "surrogateescape"))
        command = f"mkdir -p /logs/verifier\n{tests.script.command}"
        env = {**_HARDENED, **tests.script.env}
        result = sandbox.exec(command, timeout=tests.script.timeout, env=env, grace=_GRACE)
        reward, problem = (0.0, "timeout") if result.status is Status.TIMEOUT else _verdict(sandbox)
        found = outcomes(_text(sandbox, REPORT) or "")
    finally:
        sandbox.close()
    return Run(reward, problem, result.left_running, planted, found, result.output[-_SAID:])


def _lay_over(sandbox: Sandbox, tests: RepositoryTests, files: Mapping[str, str | None]) -> int:
    """Make the hand-in's changes to the task's own files, all but those that are planted; how many those are."""
    planted = hygiene.refused(files, lambda path: _text(sandbox, path), tests.artifacts)
    removed = [path for path, text in files.items() if text is None and path not in planted]
    if removed:
        names = b"\0".join(path.encode("utf-8", "surrogateescape") for path in removed)
        sandbox.exec("xargs -0 rm -f --", timeout=_CLEAN_UP_SECONDS, stdin=names)
    for path, text in files.items():
        if text is not None and path not in planted:
            try:
                sandbox.write(path, text.encode("utf-8", "surrogateescape"))
            except (
                PermissionError
            ):  # no room, or a folder of that name: what the tests find then is their verdict
                continue
    return len(planted)


def _text(sandbox: Sandbox, path: str) -> str | None:
    try:
        return sandbox.read(path).decode("utf-8", "surrogateescape")
    except (FileNotFoundError, PermissionError):
        return None


def _verdict(sandbox: Sandbox) -> tuple[float, str | None]:
    """The reward that the script has left, or 0 and what is wrong with it."""
    for path in REWARD_FILES:
        try:
            text = sandbox.read(path).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            continue
        except PermissionError:  # a link, or no regular file
            return 0.0, "bad_reward"
        reward = _number(text, path.endswith(".json"))
        return (0.0, "bad_reward") if reward is None else (reward, None)
    return 0.0, "no_reward"


def _number(text: str, is_json: bool) -> float | None:
    """A number in [0, 1]; in JSON it may be the only entry of an object, or the one named ``reward``."""
    try:
        value: Any = json.loads(text) if is_json else float(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= 1:
        return None
    return float(value)
