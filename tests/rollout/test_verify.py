"""Trials: an action is tried in a copy of the state that it is for, and the episode never notices."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from hintloop.agent.engine import Sampling
from hintloop.agent.episode import EpisodeSpec
from hintloop.envs.client import Refused, open_session
from hintloop.envs.environment import CodingEnvironment
from hintloop.envs.errors import Cause
from hintloop.envs.grading.result import VisibleResult
from hintloop.envs.models import ToolCall, ToolResult, Trial
from hintloop.envs.pool import EnvPool
from hintloop.envs.sandbox.base import USUAL, Sandbox, SandboxDead, SandboxSpec
from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.task import RepositoryTests, Script, Task
from hintloop.envs.trials import MAX_KEPT, visible_share
from hintloop.replay.episode import Episode, PreferencePair
from hintloop.rollout.asking import AskRule, PairCounts
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.episodes import play_in
from hintloop.rollout.pairs import PairMaker
from hintloop.rollout.teachers import Teacher
from hintloop.rollout.teaching import Watch

from . import double_task
from .double_task import MENDED, PATH, TASK
from .teacher_server import HANG, says_all, teaching

READ = ToolCall(name="read_file", arguments={"path": PATH})
LOST = ToolCall(name="read_file", arguments={"path": "nowhere.py"})
MEND = ToolCall(name="write_file", arguments={"path": PATH, "content": MENDED})
RUIN = ToolCall(name="write_file", arguments={"path": PATH, "content": "x"})
SUBMIT = ToolCall(name="submit")


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


def kept(call: ToolCall, keep: str = "always") -> ToolCall:
    return ToolCall(name=call.name, arguments=call.arguments, malformed=call.malformed, keep=keep)


def trial(call: ToolCall, before: int, *then: ToolCall, tests: bool = False) -> ToolCall:
    return call.model_copy(
        update={"trial": Trial(before=before, then=[one.model_dump() for one in then], tests=tests)}
    )


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    with LocalProvider() as local:
        yield local


@pytest.fixture
def env(provider: LocalProvider) -> Iterator[CodingEnvironment]:
    made = CodingEnvironment(provider)
    made.reset(task_id=TASK.task_id)
    yield made
    made.close()
    assert len(provider._open) == 0


def copies(provider: LocalProvider) -> int:
    """Sandboxes beside the episode's own."""
    return len(provider._open) - 1


def test_a_trial_sees_the_state_before_its_step_and_changes_nothing(env: CodingEnvironment) -> None:
    env.step(kept(RUIN))
    env.step(READ)
    before = env.step(trial(READ, 1))
    assert (before.output, before.done, before.error) == (
        "1: def double(x):\n2:     return x + 2\n3: ",
        False,
        None,
    )
    tried = env.step(trial(MEND, 1, READ, tests=True))
    assert "x + x" in tried.output
    assert tried.reward_parts == {"visible": 1.0}
    run_tests = ToolCall(name="run_tests")
    for calls, kind in (
        ((run_tests, READ), "test_failure"),
        ((run_tests, LOST, READ), "file_not_found"),
        ((READ, LOST, run_tests), "file_not_found"),
    ):
        error = env.step(trial(calls[0], 1, *calls[1:])).error
        assert error is not None
        assert error.kind == kind
    assert env.step(trial(ToolCall(name="run_tests"), 1, tests=True)).reward_parts == {"visible": 0.5}
    assert env.state.step_count == 2
    assert env.step(READ).output == "1: x"


def test_trials_go_on_after_the_end_and_say_that_it_is_over(env: CodingEnvironment) -> None:
    env.step(kept(LOST, "on_error"))
    env.step(kept(MEND))
    assert env.step(SUBMIT).reward == 1.0
    for step in (1, 2):
        result = env.step(trial(READ, step, LOST))
        assert (result.done, result.reward) == (True, None)
        assert result.error is not None
        assert (result.error.kind, result.error.cause) == ("file_not_found", Cause.MODEL)
    assert env.step(SUBMIT).error.cause is Cause.INFRA


@pytest.mark.parametrize("step", [0, 1, 2, 99])
def test_a_state_that_was_not_kept_is_refused(env: CodingEnvironment, step: int) -> None:
    env.step(READ)
    env.step(kept(MEND, "on_error"))
    with pytest.raises(ValueError, match=f"the state before step {step} was not kept"):
        env.step(trial(READ, step))
    env.step(kept(LOST, "on_error"))
    env.reset(task_id=TASK.task_id)
    with pytest.raises(ValueError, match="not kept"):
        env.step(trial(READ, 3))


def test_a_state_is_copied_only_when_it_is_about_to_change(
    env: CodingEnvironment, provider: LocalProvider
) -> None:
    seen = []
    for call in (
        kept(LOST, "on_error"),
        kept(ToolCall(malformed="{"), "on_error"),
        kept(READ),
        MEND,  # one copy for the three before it
        kept(MEND, "on_error"),  # works, so nobody needs it
        kept(ToolCall(name="run_tests"), "on_error"),
        kept(bash("true"), "on_error"),  # copied, and dropped as it works
        kept(bash("echo > made; false"), "on_error"),
        kept(RUIN),
    ):
        env.step(call)
        seen.append(copies(provider))
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 3]
    assert all("x + 2" in env.step(trial(READ, step)).output for step in (1, 2, 3))
    assert "made" not in env.step(trial(bash("ls"), 8)).output
    assert "made" in env.step(trial(bash("ls"), 9)).output
    assert copies(provider) == 3


def test_few_states_are_kept_at_the_same_time(env: CodingEnvironment, provider: LocalProvider) -> None:
    for number in range(MAX_KEPT + 2):
        env.step(kept(bash(f"echo {number} > n")))
    assert copies(provider) == MAX_KEPT
    assert env.step(trial(bash("cat n"), MAX_KEPT)).output == f"{MAX_KEPT - 2}\n"
    with pytest.raises(ValueError, match="not kept"):
        env.step(trial(READ, MAX_KEPT + 1))


class Crowded:
    """A provider that starts one sandbox, which cannot be copied."""

    isolation = "none"

    def __init__(self, provider: LocalProvider):
        self._provider = provider

    def start(self, files: dict[str, str], spec: SandboxSpec = USUAL) -> Sandbox:
        sandbox = self._provider.start(files, spec)
        sandbox._start_other = self._refuse
        return sandbox

    def _refuse(self) -> Any:
        raise SandboxDead("no room")

    def close(self) -> None:
        self._provider.close()


def test_a_state_that_cannot_be_copied_costs_the_trial_and_not_the_episode(provider: LocalProvider) -> None:
    env = CodingEnvironment(Crowded(provider))
    env.reset(task_id=TASK.task_id)
    assert env.step(kept(MEND)).error is None
    with pytest.raises(ValueError, match="not kept"):
        env.step(trial(READ, 1))
    assert env.step(SUBMIT).reward == 1.0
    env.close()


def test_a_copy_that_dies_is_a_failed_trial_and_the_episode_goes_on(
    env: CodingEnvironment, provider: LocalProvider
) -> None:
    env.step(kept(MEND))
    copy = list(provider._open.values())[1]
    copy.close()
    result = env.step(trial(READ, 1))
    assert (result.error.cause, result.done) == (Cause.INFRA, False)
    assert env.step(SUBMIT).reward == 1.0


@pytest.mark.parametrize(
    ("output", "share"),
    [
        ("== 1 failed, 3 passed in 0.1s ==", 0.75),
        ("3 passed\n== 2 passed, 2 errors ==", 0.5),
        ("Segmentation fault", 0.0),
        ("== 4 failed ==", 0.0),
    ],
)
def test_the_share_of_a_commands_tests_is_what_it_says(output: str, share: float) -> None:
    tests = RepositoryTests(Script({}, "true"), visible="pytest")
    task = Task("x/y", "", {}, tests, {})
    assert visible_share(task, VisibleResult(False, output)) == share
    assert visible_share(task, VisibleResult(True, output)) == 1.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ready = tmp_path_factory.mktemp("server") / "ready"
    server = subprocess.Popen([sys.executable, double_task.__file__, str(ready)])
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert server.poll() is None, "the server does not start"
            assert time.monotonic() < deadline, "the server is not ready after a minute"
            time.sleep(0.05)
        yield ready.read_text().strip()
    finally:
        server.terminate()
        server.wait(30)


def test_trials_over_the_wire_leave_the_session_good_for_more(url: str) -> None:
    async def run() -> list[Any]:
        client = await open_session(url)
        await client.reset(task_id=TASK.task_id)
        await client.step(kept(MEND))
        tried = (await client.step(trial(READ, 1, RUIN, tests=True))).observation
        with pytest.raises(Refused, match="was not kept"):
            await client.step(trial(READ, 5))
        end = await client.step(SUBMIT)
        assert client.reusable
        late = (await client.step(trial(LOST, 1))).observation
        assert client.reusable
        await client.reset(task_id=TASK.task_id)
        await client.close()
        return [tried, end.reward, late]

    tried, reward, late = asyncio.run(run())
    assert (tried.error, tried.reward_parts, tried.done) == (None, {"visible": 0.0}, False)
    assert reward == 1.0
    assert (late.error.kind, late.done) == ("file_not_found", True)


def text(call: ToolCall) -> str:
    made = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{made}\n</tool_call>"


Played = tuple[Episode, tuple[PreferencePair, ...], PairCounts]


@pytest.fixture
def play(url: str, make_player: Any) -> Callable[..., Played]:
    """Play the turns, with a teacher that wants ``chosen``; that hangs where there is none."""

    def play(turns: list[str], *chosen: ToolCall, **rule: Any) -> Played:
        async def run(teacher_url: str) -> Played:
            counts = PairCounts()
            async with AsyncExitStack() as stack:
                pool = EnvPool(url, size=1)
                stack.push_async_callback(pool.close)
                client = await stack.enter_async_context(httpx.AsyncClient())
                spec = TeacherSpec(name="one", base_url=teacher_url, model="m")
                teacher = Teacher(spec, client, timeout_s=30, attempts=1, in_flight=4)
                made = AskRule(
                    **({"agree": 1, "ask_probability": 0.0, "max_asks": 3, "deadline_s": 30.0} | rule)
                )
                maker = PairMaker("e0", [teacher], made, counts)
                player = make_player(lambda session, turn: turns[turn])
                spec = EpisodeSpec("e0", "g0", TASK.task_id)
                played = await play_in(pool.session, player, spec, Sampling(1.0, 400), Watch(maker))
                return played.episode, await maker.pairs(), counts

        with teaching(lambda number, body: says_all(*chosen) if chosen else HANG) as server:
            return asyncio.run(run(server.url))

    return play


def test_an_action_that_makes_no_error_is_a_verified_pair(play: Any) -> None:
    episode, (pair,), counts = play([text(LOST), text(RUIN), text(SUBMIT)], READ, verify="no_error")
    assert episode.turns[pair.turn].error_kind == "file_not_found"
    assert pair.verified
    assert (counts.pairs, dict(counts.unverified)) == (1, {})


def test_an_action_that_fails_where_the_agent_stood_is_no_pair(play: Any) -> None:
    worse = ToolCall(name="edit_file", arguments={"path": PATH, "old": "x + x", "new": "x"})
    # After the second turn it would work; before the first, it does not.
    _, pairs, counts = play([text(LOST), text(MEND), text(SUBMIT)], worse, verify="no_error")
    assert (pairs, dict(counts.unverified)) == ((), {"edit_no_match": 1})


FURTHER = ToolCall(name="edit_file", arguments={"path": PATH, "old": "x + x", "new": "2 * x"})
TEST = ToolCall(name="run_tests")


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ((MEND, FURTHER), None),
        ((TEST, MEND), None),
        ((FURTHER, MEND), "edit_no_match"),  # in this order there is nothing to edit yet
        ((MEND, LOST, READ), "file_not_found"),
        ((TEST, LOST), "file_not_found"),  # the failing test is not all that goes wrong
    ],
)
def test_all_calls_of_an_action_are_tried_in_their_order_and_none_may_fail(
    play: Any, chosen: tuple[ToolCall, ...], problem: str | None
) -> None:
    _, pairs, counts = play([text(LOST), text(SUBMIT)], *chosen, verify="no_error")
    assert [pair.verified for pair in pairs] == [True] * (problem is None)
    assert dict(counts.unverified) == ({problem: 1} if problem else {})
    for pair in pairs:
        assert [line.partition(" ")[0] for line in pair.chosen_text.split("\n")] == [c.name for c in chosen]


@pytest.mark.parametrize(
    ("own", "chosen", "verified"), [(LOST, MEND, 1), (LOST, READ, 0), (MEND, READ, 0), (RUIN, READ, 1)]
)
def test_better_tests_compares_with_the_agents_own_action(
    play: Any, own: ToolCall, chosen: ToolCall, verified: int
) -> None:
    turns = [text(own), text(SUBMIT)]
    _, pairs, counts = play(turns, chosen, verify="better_tests", ask="all", max_asks=1)
    assert [pair.verified for pair in pairs] == [True] * verified
    assert dict(counts.unverified) == ({} if verified else {"not better": 1})


def test_a_turn_of_several_calls_is_undone_as_a_whole(play: Any) -> None:
    turns = [text(MEND) + "\n" + text(LOST), text(SUBMIT)]
    chosen = ToolCall(name="edit_file", arguments={"path": PATH, "line": 2, "old": "+ 2", "new": "+ x"})
    _, (pair,), _ = play(turns, chosen, verify="no_error", ask="all", max_asks=1)
    assert pair.verified
    _, pairs, counts = play(turns, chosen, verify="better_tests", ask="all", max_asks=1)
    assert (pairs, dict(counts.unverified)) == ((), {"not better": 1})


def test_a_teacher_that_never_answers_keeps_the_environment_until_the_deadline_only(play: Any) -> None:
    started = time.monotonic()
    turns = [text(LOST), text(SUBMIT)]
    _, pairs, counts = play(turns, verify="no_error", deadline_s=0.2)
    assert (pairs, counts.late, counts.asked_turns) == ((), 1, 1)
    assert time.monotonic() - started < 25


def test_a_result_is_as_ever_where_nobody_asks_for_trials(env: CodingEnvironment) -> None:
    first, second = env.step(kept(LOST, "on_error")), env.step(LOST)
    assert isinstance(first, ToolResult)
    assert (first.error.kind, second.error.kind) == ("file_not_found", "repeated_failure")
