"""Teachers: an answer is always data, and the expert server is asked exactly as a real teacher is."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hintloop.envs.models import ToolCall
from hintloop.envs.tools import TOOLS
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.expert_server import completion, create_app
from hintloop.rollout.ledger import Ledger
from hintloop.rollout.pace import Pace, seconds_to_wait
from hintloop.rollout.teachers import PROMPT_MARGIN, Bill, Teacher, TeacherAnswer

from .teacher_server import HANG, HANG_UP, Reply, TeacherServer, says, says_all, teaching

URL = "http://teacher.test/v1"
CALL = ToolCall(name="read_file", arguments={"path": "solution.py"})
MESSAGES = [{"role": "user", "content": "Fix solution.py"}]


def ask(
    spec: TeacherSpec | None = None,
    *,
    client: httpx.AsyncClient | None = None,
    timeout_s: float = 30.0,
    attempts: int = 1,
    ledger: Ledger | None = None,
    bill: Bill | None = None,
) -> TeacherAnswer:
    async def run() -> TeacherAnswer:
        async with client or httpx.AsyncClient() as http:
            chosen = spec or TeacherSpec(name="one", base_url=URL, model="m")
            teacher = Teacher(
                chosen, http, timeout_s=timeout_s, attempts=attempts, in_flight=2, ledger=ledger
            )
            return await teacher.ask(MESSAGES, list(TOOLS.values()), bill)

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
    assert (answer.calls, answer.error) == ((CALL,), None)
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
    assert (not answer.calls) == bool(said)
    assert said in (answer.error or "")
    assert answer.cost_usd == 0


@respx.mock
def test_a_broken_argument_text_is_an_error() -> None:
    body = reply()
    body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"path": '
    respx.post(f"{URL}/chat/completions").respond(json=body)
    assert ask().calls == ()
    assert ask().error is not None


def test_all_calls_of_an_answer_are_one_turn_and_each_must_be_readable(parrot: Any) -> None:
    server, holder = parrot
    other = ToolCall(name="bash", arguments={"command": "ls"})
    holder.append(says_all(CALL, other))
    assert ask(priced(server)).calls == (CALL, other)
    body = json.loads(holder[-1].body)
    body["choices"][0]["message"]["tool_calls"][1]["function"]["arguments"] = "{"
    holder.append(Reply(json.dumps(body).encode()))
    assert (ask(priced(server)).calls, ask(priced(server)).unusable) == ((), True)


@respx.mock
def test_an_overloaded_or_unreachable_teacher_is_asked_again() -> None:
    route = respx.post(f"{URL}/chat/completions")
    route.side_effect = [
        httpx.Response(429, headers={"retry-after": "0"}),
        httpx.ConnectError("refused"),
        httpx.Response(200, json=reply()),
    ]
    assert ask(attempts=3).calls == (CALL,)
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
    with pytest.raises(ValidationError) as raised:
        TeacherSpec.model_validate({"name": "one", "base_url": URL, "model": "m", "key": "secret"})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["teacher.test/v1", "file:///v1", "https://me:secret@teacher.test/v1"])
def test_a_url_that_is_none_or_holds_a_password_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TeacherSpec(name="one", base_url=url, model="m")
    assert "secret" not in str(raised.value)
    assert "teacher.test" not in str(raised.value)


def expert_client(expert: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(expert)))


def test_the_expert_server_answers_the_client_that_real_teachers_get() -> None:
    seen: list[Any] = []

    def expert(messages: Any) -> ToolCall:
        seen.append(messages)
        return CALL

    assert ask(client=expert_client(expert)).calls == (CALL,)
    assert seen == [MESSAGES]
    assert ask(client=expert_client(lambda messages: None)).error == "the answer holds no tool call"


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


PRICED = {
    "name": "one",
    "model": "m",
    "usd_per_mtok_in": 10.0,
    "usd_per_mtok_out": 100.0,
    "max_answer_tokens": 50,
}


def priced(server: TeacherServer, **more: Any) -> TeacherSpec:
    return TeacherSpec(base_url=server.url, **{**PRICED, **more})


def worst_case(server: TeacherServer) -> float:
    """Of one request: a token for each of its bytes, and the longest answer."""
    size = len(json.dumps(server.requests[0]).encode())
    return ((size + PROMPT_MARGIN) * 10 + 50 * 100) / 1e6


GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "tool_calls", "function", "name", "arguments", "usage"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def parrot() -> Any:
    """A teacher that answers what ``parrot.reply`` is."""
    holder: list[Reply] = []
    with teaching(lambda number, body: holder[-1]) as server:
        yield server, holder


@settings(max_examples=20)
@given(
    GARBAGE
    | st.builds(lambda call: {"choices": [{"message": {"tool_calls": [{"function": call}]}}]}, GARBAGE)
)
def test_garbage_is_an_error_and_never_more(parrot: Any, garbage: Any) -> None:
    server, holder = parrot
    holder.append(Reply(json.dumps(garbage).encode()))
    answer = ask(priced(server))
    assert (not answer.calls) != (answer.error is None)
    assert answer.cost_usd > 0  # it may have been paid for


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"x": NaN}', "no valid JSON text"),
        ('{"x": "\\ud800"}', "no valid JSON text"),
        ("[" * 100_000, "no JSON"),
        (json.dumps({"x": "y" * 60_000}), "longer than 50000 characters"),
        ("[1]", "no arguments"),
    ],
)
def test_arguments_that_nobody_can_use_are_an_error(parrot: Any, arguments: str, said: str) -> None:
    server, holder = parrot
    message = {"tool_calls": [{"function": {"name": "bash", "arguments": arguments}}]}
    holder.append(Reply(json.dumps({"choices": [{"message": message}]}).encode()))
    answer = ask(priced(server))
    assert answer.calls == ()
    assert said in (answer.error or "")


def test_an_endless_answer_is_cut_off(parrot: Any) -> None:
    server, holder = parrot
    holder.append(Reply(b"[" + b" " * 2_000_000))
    assert "larger than" in (ask(priced(server)).error or "")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where nothing waits for a disk, if there is one."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("reply", "share"),
    [
        (says(CALL, {"prompt_tokens": 100, "completion_tokens": 10}), None),
        (says(CALL, {"prompt_tokens": -1, "completion_tokens": 10}), 1),
        (says(CALL, {"prompt_tokens": True, "completion_tokens": 10}), 1),
        (says(CALL, {}), 1),
        (Reply(b"oops"), 1),
        (Reply(b"", 500), 1),
        (HANG_UP, 1),
        (HANG, 1),
        (Reply(b"", 400), 0),
        (Reply(b"", 401), 0),
        (Reply(b"", 429), 0),
        (Reply(b"", 503), 0),
    ],
)
def test_what_is_not_known_to_cost_less_costs_the_worst_case(
    memory: Path, reply: Reply, share: int | None
) -> None:
    ledger = Ledger(memory / "ledger.jsonl", budget_usd=1.0)
    with teaching(lambda number, body: reply) as server:
        bill = Bill("e0")
        answer = ask(priced(server), timeout_s=1.0 if reply is HANG else 30, ledger=ledger, bill=bill)
        cost = 0.002 if share is None else share * worst_case(server)
    assert answer.cost_usd == bill.usd == pytest.approx(cost)
    assert ledger.spent_usd == pytest.approx(cost, abs=1e-8)
    assert ledger.reserved_usd == 0
    ledger.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)


def test_a_question_that_could_exceed_the_budget_is_not_asked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", budget_usd=0.01)
    with teaching(lambda number, body: says(CALL, {"prompt_tokens": 1, "completion_tokens": 1})) as server:
        answer = ask(priced(server), ledger=ledger)
        assert (answer.calls, answer.over_budget, answer.cost_usd) == ((), True, 0.0)
        assert "more than is left of the budget" in (answer.error or "")
        assert server.requests == []
        assert ask(TeacherSpec(name="free", base_url=server.url, model="m"), ledger=ledger).calls == (CALL,)
    ledger.close()


def test_a_ledger_that_fails_stops_the_question_with_one_clear_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    with teaching(lambda number, body: says(CALL)) as server:
        answer = ask(priced(server), ledger=ledger)
        assert server.requests == []
    assert (answer.error or "").startswith("the ledger ")


def test_a_disk_that_hangs_ends_the_question_in_time_and_keeps_the_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, goes_on, fsync = Ledger(tmp_path / "ledger.jsonl", budget_usd=1.0), threading.Event(), os.fsync

    def stall(file: int) -> None:
        assert goes_on.wait(60)
        fsync(file)

    monkeypatch.setattr("hintloop.rollout.ledger.os.fsync", stall)
    beats = 0

    async def run(server: TeacherServer) -> TeacherAnswer:
        async def beat() -> None:
            nonlocal beats
            while True:
                ledger.snapshot()
                beats += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        async with httpx.AsyncClient() as client:
            teacher = Teacher(priced(server), client, timeout_s=0.5, attempts=1, in_flight=2, ledger=ledger)
            answer = await teacher.ask(MESSAGES, [])
        beating.cancel()
        return answer

    with teaching(lambda number, body: says(CALL)) as server:
        answer = asyncio.run(run(server))
        assert server.requests == []
    assert (answer.error, answer.cost_usd) == ("no answer within 0.5 s", 0.0)
    assert beats > 3
    assert ledger.reserved_usd > 0
    goes_on.set()
    ledger.close()
    assert (ledger.reserved_usd, ledger.spent_usd, ledger.unwritten) == (0, 0, 0)


def test_a_cancelled_question_is_billed_and_leaves_nothing_open(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    bill = Bill("e0")

    async def run(server: TeacherServer, after: float | None) -> None:
        async with httpx.AsyncClient() as client:
            teacher = Teacher(priced(server), client, timeout_s=60, attempts=3, in_flight=2, ledger=ledger)
            asking = asyncio.create_task(teacher.ask(MESSAGES, [], bill))
            if after is None:
                await until(lambda: bool(server.requests))
            else:
                await asyncio.sleep(after)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: ledger.reserved_usd == 0)

    with teaching(lambda number, body: HANG) as server:
        for after in (0.0, 0.001, 0.003, None):
            asyncio.run(run(server, after))
    assert bill.usd == pytest.approx(ledger.spent_usd, abs=1e-7)
    assert bill.usd > 0
    assert ledger.reserved_usd == 0
    ledger.close()


@pytest.mark.parametrize(("own", "most"), [(None, 3), (2, 2)])
def test_each_teacher_has_its_own_limit_of_requests_at_the_same_time(own: int | None, most: int) -> None:
    running, peaks = {"one": 0, "two": 0}, {"one": 0, "two": 0}

    async def reply(request: httpx.Request) -> httpx.Response:
        host = request.url.host
        running[host] += 1
        peaks[host] = max(peaks[host], running[host])
        await asyncio.sleep(0.005)
        running[host] -= 1
        return httpx.Response(200, content=says(CALL).body)

    async def run() -> list[TeacherAnswer]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            teachers = [
                Teacher(
                    TeacherSpec(name=name, base_url=f"http://{name}/v1", model="m", in_flight=limit),
                    client,
                    timeout_s=60,
                    attempts=1,
                    in_flight=3,
                )
                for name, limit in (("one", own), ("two", None))
            ]
            return await asyncio.gather(*(each.ask(MESSAGES, []) for _ in range(9) for each in teachers))

    assert all(answer.calls for answer in asyncio.run(run()))
    assert peaks == {"one": most, "two": 3}


def test_a_teacher_that_is_overloaded_for_ever_is_given_up() -> None:
    with teaching(lambda number, body: Reply(b"slow down", 429)) as server:
        answer = ask(priced(server), attempts=3)
        assert len(server.requests) == 3
    assert answer.error == "HTTP 429: slow down"
    with teaching(lambda number, body: Reply(b"", 429, {"retry-after": "3600"})) as server:
        answer = ask(priced(server), attempts=3, timeout_s=1.0)
        assert len(server.requests) == 1
    assert answer.error == "no answer within 1 s"


@pytest.mark.parametrize("retry_after", ["1", "date"])
def test_retry_after_is_honoured_by_every_question(retry_after: str) -> None:
    arrived: list[float] = []

    def answer(number: int, body: Any) -> Reply:
        arrived.append(time.time())
        value = formatdate(int(time.time()) + 2, usegmt=True) if retry_after == "date" else "1"
        return Reply(b"", 429, {"Retry-After": value}) if number == 0 else says(CALL)

    async def run(server: TeacherServer) -> list[TeacherAnswer]:
        async with httpx.AsyncClient() as client:
            teacher = Teacher(priced(server), client, timeout_s=60, attempts=2, in_flight=9)
            first = asyncio.create_task(teacher.ask(MESSAGES, []))
            await until(lambda: teacher._pace._not_before > 0)
            return [await teacher.ask(MESSAGES, []), await first]

    with teaching(answer) as server:
        assert all(one.calls == (CALL,) for one in asyncio.run(run(server)))
    assert all(later - arrived[0] >= 0.99 for later in arrived[1:])


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5x", "Mon, 99 Nov 2026 00:00:00 GMT", "٣"])
def test_a_retry_after_that_says_nothing_is_ignored(text: str) -> None:
    assert seconds_to_wait(text) is None


def test_no_minute_sees_more_requests_than_allowed() -> None:
    """At 1200 a minute: 120 at once, then 1081 a minute."""

    async def run() -> list[float]:
        pace, began, taken = Pace(1200), time.monotonic(), []
        for _ in range(132):
            await pace.take()
            taken.append(time.monotonic() - began)
        return taken

    taken = asyncio.run(run())
    assert taken[119] < 119 * 60 / 1081 / 2
    assert taken[131] >= 11 * 60 / 1081 - 0.05
    for per_minute in (0.5, 1, 7, 60, 600):
        pace = Pace(per_minute)
        assert pace._rate is not None
        assert pace._burst + 60 * pace._rate <= per_minute + 1


def test_a_question_that_gives_up_waiting_takes_nothing_from_the_pace() -> None:
    async def run() -> float:
        pace = Pace(60)
        for _ in range(6):
            await pace.take()
        waiting = [asyncio.create_task(pace.take()) for _ in range(50)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        started = time.monotonic()
        await pace.take()
        return time.monotonic() - started

    assert asyncio.run(run()) < 25  # about 1 s; behind 50 others, 50 s


@pytest.mark.parametrize("echo", [401, 500, 200])
def test_the_key_is_in_no_error_whatever_the_teacher_repeats(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], echo: int
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "  sk-secret\n")
    with teaching(lambda number, body: Reply(b"bad key sk-secret", echo)) as server:
        answer = ask(priced(server, api_key_env="TEACHER_KEY"))
        assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert answer.error
    assert "secret" not in repr(answer)
    assert "secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("key", ["sk secret", "sk-secret\nx", "sk-sécret", "\x00secret"])
def test_a_key_that_cannot_be_one_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("os.environ", {"TEACHER_KEY": key})
    with pytest.raises(ValueError, match="TEACHER_KEY holds no key") as raised:
        ask(TeacherSpec(name="one", base_url=URL, model="m", api_key_env="TEACHER_KEY"))
    assert "cret" not in str(raised.value)
