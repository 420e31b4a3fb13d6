"""The rollout process with a program as its agent, on a real environment server: its groups are as any others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeLost, EpisodeSpec, Player
from hintloop.agent.external import open_external
from hintloop.agent.policy import load_renderer
from hintloop.envs.client import StepResult, step_result
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.registry import get_task, load_taskset
from hintloop.replay.episode import Outcome
from hintloop.replay.journal import Journal
from hintloop.replay.weights import WeightStore
from hintloop.rollout.config import EvaluationConfig, RolloutConfig, TeachersConfig
from hintloop.rollout.engines.scripted import ScriptedEngine
from hintloop.rollout.episodes import play_in
from hintloop.rollout.loading import Agent
from hintloop.rollout.run import run_rollout
from hintloop.rollout.watchdog import NOBODY, Pulse
from hintloop.rollout.weights import Fetched

PROGRAM = Path(__file__).parents[1] / "agent" / "agent_program.py"
SERVER = """
import sys
from pathlib import Path
from hintloop.envs import tasksets
from hintloop.envs.registry import load_taskset
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.server import serve
load_taskset("bugfix")
serve(LocalProvider(), port=0, max_sessions=4, ready_file=Path(sys.argv[1]))
"""


@pytest.fixture
def env_url(tmp_path: Path) -> Iterator[str]:
    ready = tmp_path / "url"
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(ready)])
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline, "the server is not ready after two minutes"
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        server.terminate()
        server.wait(30)


def publish_the_last_version(folder: Path, student: Path) -> None:
    """What a learner does once there is a group."""
    deadline = time.monotonic() + 120
    while not Journal(folder / "journal").segments() and time.monotonic() < deadline:
        time.sleep(0.05)
    WeightStore(folder / "weights").publish(1, student, metadata={"final": True})


def test_groups_and_evaluations_are_played_by_the_program(
    tmp_path: Path, student_folder: Path, env_url: str
) -> None:
    chat = load_renderer(student_folder)
    solutions = {
        task: get_task(task).solution["solution.py"] for task in load_taskset("bugfix").splits()["train"][:1]
    }
    (task_id,) = solutions
    write = f"cat > solution.py <<'END'\n{solutions[task_id]}\nEND"

    def load(first: Fetched) -> Agent:
        stop = chat.renderer.get_stop_token_ids()[0]
        texts = ("cat nowhere.py", write, "exit")
        return Agent(ScriptedEngine(chat.tokenizer, lambda session, turn: texts[turn], stop_id=stop), chat)

    WeightStore(tmp_path / "weights").publish(0, student_folder, metadata={})
    learner = threading.Thread(target=publish_the_last_version, args=(tmp_path, student_folder), daemon=True)
    learner.start()
    summary = run_rollout(
        run_dir=tmp_path,
        journal_uri=str(tmp_path / "journal"),
        weights_uri=str(tmp_path / "weights"),
        env_url=env_url,
        splits={"train": [task_id], "held": [task_id]},
        model="student",
        env="bugfix",
        seed=0,
        config=RolloutConfig(
            group_size=2,
            groups_per_step=1,
            episodes_in_flight=2,
            max_new_tokens=2000,
            max_tokens=6000,
            poll_s=0.05,
            agent=f'"{sys.executable}" -I -S "{PROGRAM}" shell',
        ),
        evaluation=EvaluationConfig(num_tasks=1, temperatures=(0.0,), in_flight=1),
        teachers=TeachersConfig(),
        load_agent=load,
    )
    learner.join(60)
    assert summary.stopped == "final"
    assert not summary.lost
    assert [row["solved"] for row in summary.evaluations] == [1, 1]
    episodes = Journal(tmp_path / "journal").reader().poll()
    assert len(episodes) >= 2
    for episode in episodes:
        assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0)
        assert [site.kind for site in episode.hint_sites] == ["file_not_found"]
        assert [turn.role for turn in episode.turns] == [
            "user",
            *["assistant", "user"] * 2,
            "assistant",
            "tool",
        ]
    status = json.loads((tmp_path / "status" / "rollout.json").read_text())
    assert status["hint_sites"] >= 2


def test_a_program_that_does_nothing_is_whom_its_episode_waits_for(student_folder: Path) -> None:
    chat = load_renderer(student_folder)
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: "", stop_id=0)
    player = Player(engine=engine, chat=chat, model="student", env="bugfix", max_tokens=4000)
    task = TaskInfo(task_id="bugfix/x", instruction="Do it", files=[], tools=[], tool_prompt="", max_turns=2)

    async def run() -> str:
        pulse, opened = Pulse("episode", "e"), asyncio.Event()

        class Opened:
            async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
                opened.set()
                return step_result(ToolResult(task=task))

            async def step(self, action: ToolCall) -> StepResult[ToolResult]:
                raise AssertionError("it makes no call")

        @contextlib.asynccontextmanager
        async def environment() -> AsyncIterator[Opened]:
            yield Opened()

        spec = EpisodeSpec("e", "g", task.task_id)
        async with open_external(player, "sleep 60", idle_s=1.0) as agent:
            playing = asyncio.create_task(play_in(environment, agent, spec, Sampling(1.0, 9), pulse=pulse))
            await opened.wait()
            await asyncio.sleep(0.1)
            seen = pulse.on
            with pytest.raises(EpisodeLost, match="more than 1 s"):
                await playing
        assert pulse.on == NOBODY
        return seen

    assert asyncio.run(run()) == "agent program"
