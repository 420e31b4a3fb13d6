"""What the rollout tests share: a chat format, and an environment in this process with a script of faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hintloop.agent.episode import Player
from hintloop.agent.policy import ChatFormat, load_renderer
from hintloop.agent.student.tokenizer import train_tokenizer
from hintloop.envs.client import EnvironmentLost, StepResult, step_result
from hintloop.envs.errors import tool_error
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.tools import TOOL_PROMPT, TOOLS, failure
from hintloop.rollout.engines.scripted import Script, ScriptedEngine


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


READ_THEN_SUBMIT = (call_text("read_file", path="nowhere.py"), call_text("submit"))
"""One error of the agent, then the end."""
RUN_S, STOP_S = 240.0, 60.0
"""For a test with whole runs in this process, and for such a run to stop."""


@dataclass
class TinyWorld:
    """Opens environments where tests and reading fail and submitting ends; ``reward`` decides by episode id.

    ``lose`` says for an episode id whether its environment breaks at the first step.
    """

    reward: Callable[[str], float] = lambda episode_id: 1.0
    lose: Callable[[str], bool] = lambda episode_id: False
    seconds: float = 0.0
    open: int = 0
    most_open: int = 0
    played: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[TinyEnvironment]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            yield TinyEnvironment(self)
        finally:
            self.open -= 1


@dataclass
class TinyEnvironment:
    world: TinyWorld
    episode_id: str = ""

    async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
        self.episode_id = kwargs["episode_id"]
        self.world.played[kwargs["task_id"]] += 1
        return step_result(
            ToolResult(
                task=TaskInfo(
                    task_id=kwargs["task_id"],
                    instruction="Fix solution.py: f should give: the sum",
                    files=["solution.py"],
                    tools=list(TOOLS.values()),
                    tool_prompt=TOOL_PROMPT,
                    max_turns=8,
                )
            )
        )

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        await asyncio.sleep(self.world.seconds)
        if self.world.lose(self.episode_id):
            raise EnvironmentLost("the socket was closed")
        if action.name == "submit":
            return step_result(
                ToolResult(output="submitted", done=True, reward=self.world.reward(self.episode_id))
            )
        if action.name == "run_tests":
            return step_result(failure(tool_error("test_failure", "0/4 pass")))
        error = tool_error(
            "file_not_found", "no such file: nowhere.py", path="nowhere.py", files=["solution.py"]
        )
        return step_result(failure(error))


@pytest.fixture
def within_time() -> Iterator[None]:
    """A run in this process that hangs is asked to stop, as a user would; one that does not stop ends the process."""
    ended = threading.Event()

    def watch() -> None:
        for seconds, number in ((RUN_S, signal.SIGTERM), (STOP_S, signal.SIGKILL)):
            if ended.wait(seconds):
                return
            os.kill(os.getpid(), number)

    watching = threading.Thread(target=watch, name="within_time", daemon=True)
    watching.start()
    yield
    ended.set()
    watching.join()


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    texts = ['", "arguments": {"path": "solution.py"}}', "read_file", "edit_file"] * 8
    train_tokenizer(texts).save_pretrained(folder)
    (folder / "hintloop.json").write_text(json.dumps({"renderer": "qwen3", "prompt": "one_line"}))
    return folder


@pytest.fixture(scope="session")
def chat(student_folder: Path) -> ChatFormat:
    return load_renderer(student_folder)


@pytest.fixture
def make_player(chat: ChatFormat) -> Callable[..., Player]:
    """``make_player(script=..., version=...)``: a player with a scripted engine."""

    def make(script: Script = lambda session, turn: READ_THEN_SUBMIT[turn], *, version: int = 0) -> Player:
        stop = chat.renderer.get_stop_token_ids()[0]
        engine = ScriptedEngine(chat.tokenizer, script, stop_id=stop, version=version)
        return Player(engine=engine, chat=chat, model="student", env="tiny", max_tokens=4000)

    return make


@pytest.fixture
def world() -> Callable[..., TinyWorld]:
    return TinyWorld
