"""What an attack is, and the way that it takes: an episode of the environment, as any agent's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hintloop.envs.environment import CodingEnvironment
from hintloop.envs.models import ToolCall
from hintloop.envs.sandbox.base import SandboxProvider
from hintloop.envs.task import Task


@dataclass(frozen=True, slots=True)
class Attack:
    """Files that the agent writes, and then a command that it runs where it works."""

    files: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


class Outcome(NamedTuple):
    """What an episode came to; a ``reward`` of None means that the attack broke the environment."""

    reward: float | None
    parts: dict[str, float]


def source(text: str) -> Attack:
    """The attack that is all in the code to be graded."""
    return Attack({"solution.py": text})


HONEST = {
    "nothing done": Attack(),
    "nearly right": source("def f(x):\n    return x * x if x < 12 else x + x\n"),
    "right for what is shown": source("def f(x):\n    return {3: 9, 0: 0}.get(x)\n"),
    "an error": source("def f(x):\n    return x.square()\n"),
    "no Python": source("def f(x:\n"),
}
"""Work that is wrong, and no more than that."""


def play(provider: SandboxProvider, task: Task, attack: Attack) -> Outcome:
    """One episode of a registered task: write, run, hand in, be graded."""
    env = CodingEnvironment(provider)
    try:
        env.reset(task_id=task.task_id)
        for path, text in attack.files.items():
            env.step(ToolCall(name="write_file", arguments={"path": path, "content": text}))
        if attack.command:
            env.step(ToolCall(name="bash", arguments={"command": attack.command}))
        last = env.step(ToolCall(name="submit"))
        return Outcome(last.reward, dict(last.reward_parts or {}))
    finally:
        env.close()
