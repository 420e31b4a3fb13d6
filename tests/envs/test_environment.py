"""The coding environment itself, without a server: what ends an episode, and what never counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from hintloop.envs.environment import CodingEnvironment
from hintloop.envs.errors import Cause
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.registry import register_taskset, taskset_names
from hintloop.envs.sandbox.base import USUAL, Sandbox, SandboxDead, SandboxSpec
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import Case, FunctionTests, Task

PATH = "double.py"
MENDED = "def double(x):\n    return x + x\n"
TASK = Task(
    "envtest/double",
    "make double double",
    {PATH: "def double(x):\n    return x + 2\n"},
    FunctionTests(PATH, "double", (Case((2,), 4),), tuple(Case((x,), 2 * x) for x in range(4))),
    {PATH: MENDED},
    max_turns=4,
)
READ = ToolCall(name="read_file", arguments={"path": PATH})
MEND = ToolCall(name="write_file", arguments={"path": PATH, "content": MENDED})
SUBMIT = ToolCall(name="submit")


class EnvTest:
    """A task set of one task."""

    name = "envtest"
    description = "for tests"

    def splits(self) -> dict[str, Sequence[str]]:
        return {"all": [TASK.task_id]}

    def get(self, task_id: str) -> Task:
        return {TASK.task_id: TASK}[task_id]


if "envtest" not in taskset_names():
    register_taskset("envtest", EnvTest)


@pytest.fixture(scope="module")
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as local:
        yield local


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


def is_infra(result: ToolResult) -> bool:
    return (
        result.done
        and result.reward is None
        and result.error is not None
        and result.error.cause is Cause.INFRA
    )


@pytest.mark.parametrize("command", [f"rm {PATH}", f"ln -sf /etc/passwd {PATH}", f"printf '\\377' > {PATH}"])
def test_a_submission_without_a_readable_file_fails(provider: LocalProvider, command: str) -> None:
    env = CodingEnvironment(provider)
    env.reset(task_id=TASK.task_id)
    env.step(bash(command))
    last = env.step(SUBMIT)
    assert last.done
    assert last.reward == 0.0
    assert (last.reward_parts["tests"], last.reward_parts["submitted"]) == (0.0, 1.0)


def test_rubrics_tell_what_the_reward_is_made_of(provider: LocalProvider) -> None:
    env, seen = CodingEnvironment(provider), []
    assert env.rubric is not None
    env.rubric.register_forward_hook(lambda rubric, action, observation, reward: seen.append(reward))
    for calls, scores in (
        (
            [ToolCall(malformed="{"), MEND, SUBMIT],
            {"tests": 1.0, "submitted": 1.0, "format": 2 / 3, "cost": 0.75},
        ),
        ([MEND] * 4, {"tests": 1.0, "submitted": 0.0, "format": 1.0, "cost": 1.0}),
        ([SUBMIT], {"tests": 0.25, "submitted": 1.0, "format": 1.0, "cost": 0.25}),
    ):
        env.reset(task_id=TASK.task_id)
        last = [env.step(call) for call in calls][-1]
        assert (
            last.reward_parts
            == scores
            == {name: part.last_score for name, part in env.rubric.named_children()}
        )
    assert seen == [1.0, 0.0, 0.0]


def test_nothing_of_the_agent_is_alive_when_its_work_is_graded(provider: LocalProvider) -> None:
    watcher = Crumbling(provider)
    env = CodingEnvironment(watcher)
    env.reset(task_id=TASK.task_id)
    agents = watcher.last
    env.step(MEND)
    assert env.step(SUBMIT).reward == 1.0
    assert watcher.last is not agents
    assert agents is not None
    with pytest.raises(SandboxDead):
        agents.list_files()


def test_a_call_that_is_not_unicode_is_an_error_of_the_agent(provider: LocalProvider) -> None:
    env = CodingEnvironment(provider)
    env.reset(task_id=TASK.task_id)
    result = env.step(ToolCall(name="write_file", arguments={"path": PATH, "content": "\ud800"}))
    env.close()
    assert result.error is not None
    assert result.error.kind == "type_error"
    assert not result.done


def test_a_closed_environment_starts_no_sandbox(provider: LocalProvider) -> None:
    env = CodingEnvironment(provider)
    env.close()
    assert is_infra(env.reset(task_id=TASK.task_id))
    assert is_infra(env.step(READ))


@dataclass
class Crumbling:
    """A provider whose sandboxes can be killed from outside, and that can be told to fail."""

    inner: LocalProvider
    refuse: Exception | None = None
    last: Sandbox | None = None
    isolation: str = "test"

    def start(self, files: dict[str, str], spec: SandboxSpec = USUAL) -> Sandbox:
        if self.refuse is not None:
            raise self.refuse
        self.last = self.inner.start(files, spec)
        return self.last

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("error", [SandboxDead("/secret"), OSError(28, "/secret"), RuntimeError("/secret")])
@pytest.mark.parametrize("moment", ["start", "step", "grading"])
def test_a_failure_of_the_machinery_is_never_scored(
    provider: LocalProvider, moment: str, error: Exception
) -> None:
    crumbling = Crumbling(provider, refuse=error if moment == "start" else None)
    env = CodingEnvironment(crumbling)
    result = env.reset(task_id=TASK.task_id)
    if moment == "grading":
        crumbling.refuse = error
        result = env.step(SUBMIT)
    elif moment == "step":
        assert crumbling.last is not None
        crumbling.last.close()
        result = env.step(READ)
    assert is_infra(result)
    assert "secret" not in result.model_dump_json()
    assert is_infra(env.step(READ))
    crumbling.refuse = None
    assert not env.reset(task_id=TASK.task_id).done
    env.close()
