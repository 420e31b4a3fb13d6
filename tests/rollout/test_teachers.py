"""Teachers: an answer is always data, and the expert server is asked exactly as a real teacher is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import respx
from pydantic import ValidationError

from hintloop.envs.models import ToolCall
from hintloop.envs.tools import TOOLS
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.expert_server import completion, create_app
from hintloop.rollout.teachers import Teacher, TeacherAnswer

URL = "http://teacher.test/v1"
CALL = ToolCall(name="read_file", arguments={"path": "solution.py"})
MESSAGES = [{"role": "user", "content": "Fix solution.py"}]


def ask(
    spec: TeacherSpec | None = None,
    *,
    client: httpx.AsyncClient | None = None,
    timeout_s: float = 5.0,
    attempts: int = 1,
) -> TeacherAnswer:
    async def run() -> TeacherAnswer:
        async with client or httpx.AsyncClient() as http:
            chosen = spec or TeacherSpec(name="one", base_url=URL, model="m")
            teacher = Teacher(chosen, http, timeout_s=timeout_s, attempts=attempts, in_flight=2)
            return await teacher.ask(MESSAGES, list(TOOLS.values()))

    return asyncio.run(run())


def reply(call: ToolCall | None = CALL) -> dict[str, Any]:
    return completion(MESSAGES, call)


@respx.mock
def test_a_tool_call_is_the_answer_and_its_cost_follows_from_the_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    body = {**reply(), "usage": {"prompt_tokens": 2000, "completion_tokens": 100}}
    route = respx.post(f"{URL}/chat/completions").respond(json=body)
    spec = TeacherSpec(
        name="one", base_url=URL, model="m", api_key_env="TEACHER_KEY", usd_per_mtok_in=3, usd_per_mtok_out=15
    )
    answer = ask(spec)
    assert (answer.call, answer.error) == (CALL, None)
    assert answer.cost_usd == pytest.approx(0.0075)
    request = route.calls[0].request
    sent = json.loads(request.content)
    assert request.headers["authorization"] == "Bearer secret"
    assert sent["messages"] == MESSAGES
    assert [tool["function"]["name"] for tool in sent["tools"]] == list(TOOLS)
    assert "secret" not in repr(answer)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(401, text="no key"), "401"),
        (httpx.Response(500), "500"),
        (httpx.Response(200, text="<html>"), "JSON"),
        (httpx.Response(200, json=[1]), "no JSON object"),
        (httpx.Response(200, json=reply(None)), "no tool call"),
        (httpx.Response(200, json={"choices": []}), "no tool call"),
        (httpx.Response(200, json={**reply(), "usage": {"prompt_tokens": None}}), ""),
    ],
)
@respx.mock
def test_every_failure_is_data(response: httpx.Response, said: str) -> None:
    respx.post(f"{URL}/chat/completions").mock(return_value=response)
    answer = ask()
    assert (answer.call is None) == bool(said)
    assert said in (answer.error or "")
    assert answer.cost_usd == 0


@respx.mock
def test_a_broken_argument_text_is_an_error() -> None:
    body = reply()
    body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"path": '
    respx.post(f"{URL}/chat/completions").respond(json=body)
    assert ask().call is None
    assert ask().error is not None


@respx.mock
def test_an_overloaded_or_unreachable_teacher_is_asked_again() -> None:
    route = respx.post(f"{URL}/chat/completions")
    route.side_effect = [
        httpx.Response(429, headers={"retry-after": "0"}),
        httpx.ConnectError("refused"),
        httpx.Response(200, json=reply()),
    ]
    assert ask(attempts=3).call == CALL
    assert route.call_count == 3


def test_a_teacher_that_hangs_is_given_up_after_its_time() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    answer = ask(client=httpx.AsyncClient(transport=httpx.MockTransport(hang)), timeout_s=0.1)
    assert answer.error == "no answer within 0.1 s"
    assert answer.seconds < 5


def test_a_missing_key_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ValueError, match="TEACHER_KEY is not set"):
        ask(TeacherSpec(name="one", base_url=URL, model="m", api_key_env="TEACHER_KEY"))


def test_an_unknown_field_of_a_spec_is_refused() -> None:
    with pytest.raises(ValidationError):
        TeacherSpec.model_validate({"name": "one", "base_url": URL, "model": "m", "key": "secret"})


def expert_client(expert: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(expert)))


def test_the_expert_server_answers_the_client_that_real_teachers_get() -> None:
    seen: list[Any] = []

    def expert(messages: Any) -> ToolCall:
        seen.append(messages)
        return CALL

    assert ask(client=expert_client(expert)).call == CALL
    assert seen == [MESSAGES]
    assert (
        ask(client=expert_client(lambda messages: None)).error == "ValueError: the answer holds no tool call"
    )


def test_the_expert_server_refuses_what_is_no_request() -> None:
    async def run() -> list[int]:
        async with expert_client(lambda messages: CALL) as client:
            url = f"{URL}/chat/completions"
            answers = [
                await client.post(url, content=b"{"),
                await client.post(url, json={"no": "messages"}),
                await client.post(url, json={"messages": []}),
                await client.get("http://teacher.test/health"),
                await client.get(f"{URL}/models"),
            ]
            return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [400, 400, 200, 200, 200]
