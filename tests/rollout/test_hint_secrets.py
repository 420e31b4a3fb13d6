"""No hint holds anything of a task's solution or of its hidden tests, nor what it is made from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hintloop.agent import hints
from hintloop.envs.environment import CodingEnvironment
from hintloop.envs.errors import KINDS, Cause, ToolError
from hintloop.envs.models import ToolCall
from hintloop.envs.registry import register_task, taskset_names
from hintloop.envs.sandbox.base import SandboxSpec
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import Case, FunctionTests

from . import double_task
from .double_task import PATH

SECRET = "zq7secret"
TESTS = FunctionTests(PATH, "double", (Case((3,), 6),), (Case((SECRET,), 2 * SECRET),))
TASK = replace(
    double_task.TASK,
    task_id="secrets/double",
    tests=TESTS,
    solution={PATH: f"def double(x):\n    return x * 2  # {SECRET}\n", f"{SECRET}.py": ""},
    sandbox=SandboxSpec(),
    max_turns=40,
)
if "secrets" not in taskset_names():
    register_task(TASK)


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


CALLS = [
    ToolCall(name="read", arguments={"path": PATH}),
    ToolCall(malformed='<tool_call>{"name": '),
    ToolCall(name="read_file", arguments={"path": 3}),
    ToolCall(name="read_file", arguments={"path": "solution.py"}),
    ToolCall(name="read_file", arguments={"path": "solution.py"}),
    ToolCall(name="edit_file", arguments={"path": PATH, "line": 1, "old": "x * 2", "new": "y"}),
    bash("no-such-program"),
    bash("cat nowhere.py"),
    bash("python -c 'x ='"),
    bash("python -c '1/0'"),
    bash("grep -rn secret . ; false"),
    ToolCall(name="run_tests"),
]


@pytest.fixture(scope="module")
def seen() -> list[tuple[ToolError, dict[str, Any], str]]:
    """Errors as a real sandbox gives them, each with what a hint may know of it and what the agent sees."""
    with LocalProvider() as provider:
        env = CodingEnvironment(provider)
        info = env.reset(task_id=TASK.task_id).task
        assert info is not None
        found = []
        for call in CALLS:
            result = env.step(call)
            assert result.error is not None, call
            known = hints.context(info.tools, call, result.output, info.files)
            found.append((result.error, known, result.output))
        env.close()
    return found


def test_errors_of_a_real_task_are_of_many_kinds_and_tell_nothing_hidden(seen: Any) -> None:
    assert len({error.kind for error, _, _ in seen}) >= 8
    for error, known, output in seen:
        assert SECRET not in f"{error!r} {known!r} {output}"


@pytest.mark.parametrize("kind", [kind for kind, cause in KINDS.items() if cause is not Cause.INFRA])
def test_no_hint_tells_of_the_solution_or_the_hidden_tests(seen: Any, kind: str) -> None:
    own = [(error, known) for error, known, _ in seen if error.kind == kind]
    # A kind that no call above gives gets what the others know.
    told = own or [(error.model_copy(update={"kind": kind}), known) for error, known, _ in seen]
    for error, known in told:
        # Also what usually gets no hint, as the agent is not to blame.
        hint = hints.dispatch(error.model_copy(update={"cause": Cause.MODEL}), known)
        assert hint is not None
        assert SECRET not in hint
