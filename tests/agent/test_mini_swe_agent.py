"""mini-swe-agent as the agent, in a real sandbox, on a scripted model."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeSpec, Player
from hintloop.agent.external import open_external
from hintloop.agent.policy import ChatFormat
from hintloop.envs.client import StepResult, step_result
from hintloop.envs.environment import CodingEnvironment
from hintloop.envs.models import ToolCall, ToolResult
from hintloop.envs.registry import get_task, load_taskset
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.replay.episode import Outcome
from hintloop.rollout.engines.scripted import ScriptedEngine

MINI = Path(sys.executable).with_name("mini")
"""Of the extra `dev`."""
SCRIPT = Path(__file__).parents[2] / "examples" / "mini-swe-agent" / "run.sh"


class InProcess:
    """The coding environment without a server between."""

    def __init__(self, environment: CodingEnvironment):
        self._environment = environment
        self.calls: list[ToolCall] = []

    async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
        return step_result(await asyncio.to_thread(lambda: self._environment.reset(**kwargs)))

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        self.calls.append(action)
        return step_result(await asyncio.to_thread(self._environment.step, action))


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_mini_swe_agent_solves_a_task_in_the_sandbox(chat: ChatFormat) -> None:
    load_taskset("bugfix")
    task = get_task(load_taskset("bugfix").splits()["train"][0])
    solution = task.solution["solution.py"]
    texts = [
        bash("cat nowhere.py"),
        "no call at all",
        bash("ls"),
        bash(f"cat > solution.py <<'END'\n{solution.rstrip()}\nEND"),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    stop = chat.renderer.get_stop_token_ids()[0]
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: texts[turn], stop_id=stop)
    player = Player(engine=engine, chat=chat, model="student", env="bugfix", max_tokens=40_000)
    provider = LocalProvider()
    environment = CodingEnvironment(provider)
    env, spec = InProcess(environment), EpisodeSpec("g000000-0", "g000000", task.task_id)

    async def run() -> Any:
        async with open_external(player, f'MINI="{MINI}" sh "{SCRIPT}"', idle_s=300) as agent:
            return await agent.play(env, spec, Sampling(1.0, 2000))

    try:
        played = asyncio.run(run())
    finally:
        environment.close()
        provider.close()
    episode = played.episode
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0)
    assert [call.name for call in env.calls] == ["bash"] * 4 + ["submit"]
    assert [(site.kind, site.turn) for site in episode.hint_sites] == [("file_not_found", 2)]
    assert episode.hint_sites[0].hint == "Hint: files are solution.py"
    said = [turn.text for turn in episode.turns if turn.role == "assistant"]
    assert said == [texts[0], *texts[2:]], "mini-swe-agent takes back what has no call in it"
    assert episode.reward_parts["lines"] == 2.0
    assert '"returncode": 1' in chat.tokenizer.decode(list(episode.token_ids))
    assert sum(episode.loss_mask) == sum(
        turn.end - turn.start for turn in episode.turns if turn.role == "assistant"
    )
