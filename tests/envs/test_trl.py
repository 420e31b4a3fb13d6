"""The adapter for TRL: its methods are the tools, and its rewards are the environment's."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hintloop.envs.client import EnvironmentLost, Refused
from hintloop.envs.tools import TOOLS
from hintloop.envs.trl_environment import TrlEnvironment

from .serving import MENDED, PATH, TASK, serving


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("trl")) as running:
        yield running


def tools_of(env: TrlEnvironment) -> dict[str, Any]:
    """The methods that TRL offers to the model."""
    return {
        name: getattr(env, name)
        for name, _ in inspect.getmembers(type(env), inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    }


def test_its_tools_are_the_environments_with_the_same_parameters() -> None:
    utils = pytest.importorskip("transformers.utils")
    tools = tools_of(TrlEnvironment("http://127.0.0.1:1"))
    assert tools.keys() == TOOLS.keys()
    for name, tool in tools.items():
        schema = utils.get_json_schema(tool)["function"]
        parameters, expected = schema["parameters"], TOOLS[name]["parameters"]
        types = {key: value["type"] for key, value in parameters["properties"].items()}
        assert types == {key: value["type"] for key, value in expected["properties"].items()}
        assert parameters.get("required", []) == expected["required"]
        assert schema["description"] == TOOLS[name]["description"]


def test_a_rollout_earns_the_environments_reward(url: str) -> None:
    with TrlEnvironment(url) as env:
        instruction = env.reset(prompt=[{"role": "user", "content": ""}], task_id=TASK.task_id)
        assert instruction == TASK.instruction
        assert env.read_file(PATH).startswith("1: def triple")
        assert env.edit_file(PATH, "no such text", "").startswith("error: ")
        assert env.edit_file(PATH, "+", "*", 2) == "ok"
        assert env.run_tests() == "1/1 pass"
        assert env.bash("ls") == f"{PATH}\n"
        assert env.get_reward() == 0.0
        assert env.submit() == "submitted"
        assert env.get_reward() == 1.0
        assert env.result is not None
        assert env.result.reward_parts["tests"] == 1.0
        assert env.submit() == "error: the episode is over"
        assert env.get_reward() == 1.0


def test_it_is_reset_again_and_again_finished_or_not(url: str) -> None:
    with TrlEnvironment(url) as env:
        rewards = []
        for content in (MENDED, None, "def triple(x):\n    return 0\n", MENDED):
            env.reset(task_id=TASK.task_id)
            if content is not None:
                env.write_file(PATH, content)
                env.submit()
            rewards.append(env.get_reward())
    assert rewards == [1.0, 0.0, 0.0, 1.0]


def test_a_reset_without_a_task_id_gets_one(url: str) -> None:
    with TrlEnvironment(url) as env:
        assert env.reset() == TASK.instruction


def test_an_unknown_task_is_refused(url: str) -> None:
    with TrlEnvironment(url) as env, pytest.raises(Refused, match="served/nope"):
        env.reset(task_id="served/nope")


def test_a_lost_environment_has_no_reward_and_the_next_reset_finds_a_new_one(url: str) -> None:
    with TrlEnvironment(url, message_timeout_s=1.0) as env:
        env.reset(task_id=TASK.task_id)
        assert env.bash("sleep 5") == "error: the environment is gone"
        assert env.run_tests() == "error: the environment is gone"
        assert env.get_reward() is None
        assert env.reset(task_id=TASK.task_id) == TASK.instruction
        assert env.get_reward() == 0.0


def test_without_a_server_reset_gives_up_by_its_deadline() -> None:
    with (
        TrlEnvironment("http://127.0.0.1:1", wait_s=0.2) as env,
        pytest.raises(EnvironmentLost, match=r"no episode within 0\.2 s"),
    ):
        env.reset(task_id=TASK.task_id)


def test_a_full_server_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-sessions", "1") as url, TrlEnvironment(url, wait_s=0.2) as waiting:
        with TrlEnvironment(url) as holder:
            holder.reset(task_id=TASK.task_id)
            with pytest.raises(EnvironmentLost, match="capacity"):
                waiting.reset(task_id=TASK.task_id)
        with TrlEnvironment(url) as patient:
            assert patient.reset(task_id=TASK.task_id) == TASK.instruction


@pytest.mark.slow
def test_a_grpo_step_of_trl_trains_the_student(url: str, repository: Path) -> None:
    command = [sys.executable, "examples/trl_environment.py", url, "--steps", "1"]
    ran = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("step 1: reward ")]
    assert float(line.split()[3].rstrip(",")) <= 1.0
    assert float(line.split()[4]) >= 1.0, "no tool calls"
