"""The desk of agent programs over real HTTP, in every dialect that OpenEnv's capture layer translates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from hintloop.agent.endpoint import MAX_BODY_BYTES, Desk
from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeSpec, Player
from hintloop.agent.policy import ChatFormat, retaining
from hintloop.agent.visit import Visit
from hintloop.envs.client import StepResult, step_result
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.tools import TOOL_PROMPT, TOOLS
from hintloop.replay.episode import Outcome
from hintloop.rollout.engines.scripted import ScriptedEngine

TASK = TaskInfo(
    task_id="bugfix/x",
    instruction="Fix it",
    files=["solution.py"],
    tools=list(TOOLS.values()),
    tool_prompt=TOOL_PROMPT,
    max_turns=8,
)
BASH = {"type": "function", "function": TOOLS["bash"]}
LOOK = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>'


class Environment:
    async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
        return step_result(ToolResult(task=TASK))

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        if action.name == "submit":
            return step_result(ToolResult(output="submitted", done=True, reward=1.0))
        return step_result(ToolResult(output="solution.py", exit_code=0))


@dataclass
class Guest:
    """A client with a key, and its episode."""

    client: httpx.AsyncClient
    visit: Visit
    key: str
    url: str

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        headers = headers or {"Authorization": f"Bearer {self.key}"}
        return await self.client.post(self.url + path, json=body, headers=headers)

    async def chat(self, **body: Any) -> Any:
        response = await self.post("/v1/chat/completions", {"model": "any", **body})
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def guest(chat: ChatFormat, texts: Sequence[str]) -> AsyncIterator[Guest]:
    stop = chat.renderer.get_stop_token_ids()[0]
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: texts[turn], stop_id=stop, version=5)
    player = Player(engine=engine, chat=retaining(chat), model="student", env="coding", max_tokens=4000)
    spec = EpisodeSpec("g000000-0", "g000000", TASK.task_id)
    visit = Visit(player, Environment(), spec, TASK, Sampling(1.0, 400), None, None, refuse_sampling=False)
    desk = Desk("student")
    async with desk.open(), httpx.AsyncClient(timeout=60) as client:
        with desk.admit(visit) as key:
            yield Guest(client, visit, key, desk.url)


def talk(chat: ChatFormat, texts: Sequence[str], talking: Callable[[Guest], Awaitable[None]]) -> None:
    async def run() -> None:
        async with guest(chat, texts) as one:
            await talking(one)

    asyncio.run(run())


def test_nothing_is_answered_without_the_key_of_a_running_episode(chat: ChatFormat) -> None:
    async def talking(one: Guest) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for path in ("/v1/chat/completions", "/v1/messages", "/sandbox/call", "/sessions"):
            for headers in ({"Authorization": "Bearer nonsense"}, {"X-Other": "x"}):
                assert (await one.post(path, body, **headers)).status_code == 401
        for path in ("/sandbox/task", "/v1/models"):
            assert (await one.client.get(one.url + path)).status_code == 401
        await one.visit.close()
        assert (await one.post("/v1/chat/completions", body)).status_code == 410
        assert (await one.post("/sandbox/call", {"name": "bash"})).status_code == 410
        assert one.visit.num_answers == 0

    talk(chat, [], talking)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, []),
        (400, {}),
        (400, {"messages": []}),
        (400, {"messages": [{"role": "king", "content": "x"}]}),
        (400, {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        (400, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (400, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
        (413, {"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_and_the_episode_goes_on(
    chat: ChatFormat, status: int, body: Any
) -> None:
    async def talking(one: Guest) -> None:
        assert (await one.post("/v1/chat/completions", body)).status_code == status
        made = await one.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        assert made["choices"][0]["message"]["content"] == "hello"
        assert (await one.post("/sandbox/call", {"name": 3})).status_code == 400

    talk(chat, ["hello"], talking)


def test_every_dialect_gets_the_same_answer(chat: ChatFormat) -> None:
    async def talking(one: Guest) -> None:
        words = [{"role": "user", "content": "look"}]
        made = await one.chat(messages=words, tools=[BASH])
        (call,) = made["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "bash",
            {"command": "ls -la"},
        )
        assert made["choices"][0]["finish_reason"] == "tool_calls"
        assert "prompt_token_ids" not in made
        spec = {"name": "bash", "description": "Run.", "input_schema": TOOLS["bash"]["parameters"]}
        body = {"model": "x", "max_tokens": 300, "messages": words, "tools": [spec]}
        said = (await one.post("/v1/messages", body, **{"x-api-key": one.key})).json()
        (block,) = [block for block in said["content"] if block["type"] == "tool_use"]
        assert (block["name"], block["input"]) == ("bash", {"command": "ls -la"})
        body = {"model": "x", "input": "look", "instructions": "be brief"}
        said = (await one.post("/v1/responses", body)).json()
        assert "hello" in json.dumps(said["output"])
        body = {"contents": [{"role": "user", "parts": [{"text": "look"}]}]}
        path = "/v1beta/models/x:generateContent"
        said = (await one.post(path, body, **{"x-goog-api-key": one.key})).json()
        assert said["candidates"][0]["content"]["parts"][0]["text"] == "hello"
        assert one.visit.num_answers == 4

    talk(chat, [LOOK, LOOK, "hello", "hello"], talking)


def test_an_answer_can_be_streamed(chat: ChatFormat) -> None:
    async def talking(one: Guest) -> None:
        body = {
            "model": "x",
            "stream": True,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 100,
        }
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = await one.post(path, body)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert "hello" in response.text
        refused = await one.post("/v1/chat/completions", {"stream": True, "messages": []})
        assert refused.status_code == 400

    talk(chat, ["hello", "hello"], talking)


def test_openenvs_capture_server_in_between_records_the_same_tokens(chat: ChatFormat) -> None:
    from openenv.core.harness.capture.server import create_app

    async def talking(one: Guest) -> None:
        app = create_app(llm_url=one.url, model="student", api_key=one.key, capture_level="tokens")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://capture") as proxy:
            session = (await proxy.post("/sessions", json={})).json()["session_id"]
            headers = {"Authorization": f"Bearer {session}"}
            messages: list[Any] = [{"role": "user", "content": "look"}]
            for _ in range(3):
                body = {"messages": messages, "tools": [BASH], "model": "x"}
                made = (await proxy.post("/v1/chat/completions", json=body, headers=headers)).json()
                messages.append(made["choices"][0]["message"])
                for call in messages[-1].get("tool_calls") or ():
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "solution.py"})
            document = (await proxy.get(f"/sessions/{session}/rollout")).json()
        episode = (await one.visit.finish(submit=True)).episode
        (row,) = document["sequences"]
        assert document["trainable"]
        assert row["input_ids"] == list(episode.token_ids)
        assert row["loss_mask"] == list(episode.loss_mask)
        assert row["logprobs"] == pytest.approx(list(episode.logprobs))
        assert episode.outcome is Outcome.SOLVED

    talk(chat, [LOOK, LOOK, "done"], talking)
