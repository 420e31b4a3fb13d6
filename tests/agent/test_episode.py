"""The episode loop against an environment that answers from a list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hintloop.agent.engine import EngineError, Sampling
from hintloop.agent.episode import EpisodeLost, EpisodeSpec, Played, Player, TurnEvent
from hintloop.agent.policy import ChatFormat
from hintloop.envs.client import EnvironmentLost, StepResult, step_result
from hintloop.envs.errors import tool_error
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.tools import TOOL_PROMPT, TOOLS, failure
from hintloop.replay.episode import Outcome
from hintloop.rollout.engines.scripted import ScriptedEngine

TASK = TaskInfo(
    task_id="bugfix/x",
    instruction="Fix solution.py: f should give: the sum",
    files=["solution.py"],
    tools=list(TOOLS.values()),
    tool_prompt=TOOL_PROMPT,
    max_turns=8,
)
SPEC = EpisodeSpec("g000000-0", "g000000", "bugfix/x")
SOLVED = ToolResult(output="submitted", done=True, reward=1.0, reward_parts={"tests": 1.0})
MISSING = failure(tool_error("file_not_found", "no such file: a.py", path="a.py", files=["solution.py"]))
FAILING = ToolResult(output="3/4 pass", error=tool_error("test_failure", "3/4 pass"), exit_code=1)
INFRA = failure(tool_error("connection_error", "the sandbox is gone")).model_copy(update={"done": True})


@dataclass
class ListedEnvironment:
    """Gives one result after the other; an exception in the list is raised."""

    results: list[ToolResult | Exception]
    calls: list[ToolCall] = field(default_factory=list)
    opening: ToolResult = field(default_factory=lambda: ToolResult(task=TASK))

    async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
        assert kwargs == {"task_id": SPEC.task_id, "episode_id": SPEC.episode_id}
        return step_result(self.opening)

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        self.calls.append(action)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return step_result(result)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(
    chat: ChatFormat,
    env: ListedEnvironment,
    texts: Sequence[str],
    *,
    observe: Any = None,
    max_new_tokens: int = 400,
    **player: Any,
) -> Played:
    engine = ScriptedEngine(
        chat.tokenizer,
        lambda session, turn: texts[turn],
        stop_id=chat.renderer.get_stop_token_ids()[0],
        version=3,
    )
    settings: dict[str, Any] = {"model": "student", "env": "coding", "max_tokens": 4000, **player}
    agent = Player(engine=engine, chat=chat, **settings)
    return asyncio.run(agent.play(env, SPEC, Sampling(1.0, max_new_tokens), observe))


def test_a_solved_episode_is_a_linear_transcript(chat: ChatFormat) -> None:
    env = ListedEnvironment([ToolResult(output="1: def f():"), SOLVED])
    played = play(chat, env, [call("read_file", path="solution.py"), call("submit")])
    episode = played.episode
    decode = chat.tokenizer.decode
    assert env.calls == [
        ToolCall(name="read_file", arguments={"path": "solution.py"}),
        ToolCall(name="submit"),
    ]
    assert (episode.outcome, episode.reward, episode.reward_parts) == (Outcome.SOLVED, 1.0, {"tests": 1.0})
    assert [turn.role for turn in episode.turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    texts = [decode(list(episode.token_ids[turn.start : turn.end])) for turn in episode.turns]
    assert texts[0] == f"<|im_start|>system\nTools: {TOOL_PROMPT}<|im_end|>\n"
    assert texts[1] == f"<|im_start|>user\n{TASK.instruction}<|im_end|>\n"
    assert texts[2] == call("read_file", path="solution.py") + "<|im_end|>"
    assert texts[3] == "\n<|im_start|>user\n<tool_response>\n1: def f():\n</tool_response><|im_end|>\n"
    assert texts[5] == ""  # the last result is nothing that the agent ever reads
    assert episode.turns[2].tool_name == "read_file"
    assert json.loads(episode.turns[2].tool_arguments or "") == {"path": "solution.py"}
    assert set(episode.policy_versions) == {-1, 3}
    assert [turn.end - turn.start for turn in episode.turns if turn.role == "assistant"] == [
        sum(episode.loss_mask[turn.start : turn.end]) for turn in episode.turns if turn.role == "assistant"
    ]
    assert not episode.hint_sites
    assert episode.tokenizer_fingerprint == chat.fingerprint


def test_an_error_of_the_agent_becomes_a_hint_site_at_the_turn_that_failed(chat: ChatFormat) -> None:
    env = ListedEnvironment([ToolResult(output="ok"), MISSING, SOLVED])
    texts = [call("run_tests"), call("read_file", path="a.py"), call("submit")]
    played = play(chat, env, texts)
    episode = played.episode
    (site,) = episode.hint_sites
    failing = episode.turns[site.turn]
    assert (failing.role, failing.error_kind, failing.error_cause) == ("assistant", "file_not_found", "model")
    assert (site.start, site.end) == (failing.start, failing.end)
    decode = chat.tokenizer.decode
    assert decode(list(episode.token_ids[site.insert_at : site.start])) == "<|im_start|>assistant\n"
    assert decode(list(site.hint_ids)) == f"<|im_start|>system\n{site.hint}<|im_end|>\n"
    assert site.hint == "Hint: there is no a.py; files are solution.py"
    assert decode(list(episode.token_ids[site.start : site.end])) == texts[1] + "<|im_end|>"
    assert dict(played.notes.errors) == {"file_not_found": 1}


def test_the_hint_names_the_files_of_the_task_where_the_error_does_not(chat: ChatFormat) -> None:
    missing = failure(tool_error("file_not_found", "file not found (exit code 1)", command="cat a.py"))
    env = ListedEnvironment([missing, SOLVED])
    played = play(chat, env, [call("bash", command="cat a.py"), call("submit")])
    assert [site.hint for site in played.episode.hint_sites] == ["Hint: files are solution.py"]


def test_a_hint_that_cannot_be_rendered_is_counted(chat: ChatFormat) -> None:
    texts = [call("run_tests"), call("read_file", path="a.py"), call("submit")]
    played = play(
        chat, ListedEnvironment([ToolResult(output="ok"), MISSING, SOLVED]), texts, hint_role="user"
    )
    assert not played.episode.hint_sites
    assert played.notes.dropped_sites.total() == 1


def test_a_failing_test_is_not_the_agents_error(chat: ChatFormat) -> None:
    played = play(chat, ListedEnvironment([FAILING, SOLVED]), [call("run_tests"), call("submit")])
    assert not played.episode.hint_sites
    assert not played.notes.dropped_sites
    assert played.episode.turns[2].error_cause == "user"
    assert played.episode.turns[3].exit_code == 1


@pytest.mark.parametrize("tests", [ToolResult(output="fine"), FAILING])
def test_the_agents_first_error_in_a_turn_with_several_calls_is_the_turns_error(
    chat: ChatFormat, tests: ToolResult
) -> None:
    wrong = failure(tool_error("type_error", "missing argument: path", name="read_file", required=["path"]))
    env = ListedEnvironment([tests, MISSING, wrong, SOLVED])
    both = "\n".join([call("run_tests"), call("read_file", path="a.py"), call("read_file")])
    events: list[TurnEvent] = []
    played = play(chat, env, [both, call("submit")], observe=events.append)
    assert len(env.calls) == 4
    assert events[0].errors[0].kind == "file_not_found"
    assert [site.kind for site in played.episode.hint_sites] == ["file_not_found"]
    tools = [turn for turn in played.episode.turns if turn.role == "tool"]
    assert [turn.end > turn.start for turn in tools] == [True, False, False, False]
    assert all(a.end <= b.start for a, b in zip(played.episode.turns, played.episode.turns[1:], strict=False))


def test_an_episode_without_room_for_another_token_is_truncated(chat: ChatFormat) -> None:
    env = ListedEnvironment([ToolResult(output="ok")] * 20)
    played = play(chat, env, [call("run_tests")] * 20, max_tokens=500)
    assert played.episode.outcome is Outcome.TRUNCATED
    assert played.episode.reward == 0.0
    assert len(played.episode.token_ids) <= 500
    assert played.episode.loss_mask[-1] == 1


def test_a_turn_that_the_episode_limit_cuts_is_not_executed(chat: ChatFormat) -> None:
    probe = play(chat, ListedEnvironment([SOLVED]), [call("submit")]).episode
    limit = probe.turns[2].start + 5
    env = ListedEnvironment([])
    episode = play(chat, env, [call("submit")], max_tokens=limit).episode
    assert not env.calls
    assert (episode.outcome, len(episode.token_ids)) == (Outcome.TRUNCATED, limit)


def test_a_turn_cut_at_its_own_limit_is_a_malformed_call(chat: ChatFormat) -> None:
    bad = failure(tool_error("json_decode", "bad JSON in the tool call", text="{"))
    env = ListedEnvironment([bad, SOLVED])
    played = play(chat, env, [call("bash", command="x" * 300), call("submit")], max_new_tokens=40)
    assert env.calls[0].malformed is not None
    assert [site.kind for site in played.episode.hint_sites] == ["json_decode"]
    assert played.episode.outcome is Outcome.SOLVED


def test_an_episode_that_ends_without_submitting_is_truncated(chat: ChatFormat) -> None:
    last = ToolResult(output="ok", done=True, reward=0.0)
    assert play(chat, ListedEnvironment([last]), [call("run_tests")]).episode.outcome is Outcome.TRUNCATED
    wrong = SOLVED.model_copy(update={"reward": 0.0})
    assert play(chat, ListedEnvironment([wrong]), [call("submit")]).episode.outcome is Outcome.FAILED


def test_a_thought_that_never_closes_ends_the_episode_and_is_counted(chat: ChatFormat) -> None:
    bad = failure(tool_error("json_decode", "no tool call", text="x"))
    played = play(chat, ListedEnvironment([bad]), ["<think>and now"])
    assert played.episode.outcome is Outcome.TRUNCATED
    assert played.notes.render_failures == 1


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (EnvironmentLost("socket closed"), "environment"),
        (INFRA, "sandbox"),
        (ToolResult(output="submitted", done=True), "ungraded"),
    ],
)
def test_what_breaks_in_the_environment_loses_the_episode(
    chat: ChatFormat, result: ToolResult | Exception, reason: str
) -> None:
    with pytest.raises(EpisodeLost) as lost:
        play(chat, ListedEnvironment([result]), [call("submit")])
    assert lost.value.reason == reason


def test_a_reset_that_fails_loses_the_episode(chat: ChatFormat) -> None:
    for opening, reason in ((INFRA, "sandbox"), (ToolResult(), "environment")):
        with pytest.raises(EpisodeLost) as lost:
            play(chat, ListedEnvironment([], opening=opening), [])
        assert lost.value.reason == reason


def test_an_engine_that_fails_loses_the_episode(chat: ChatFormat) -> None:
    def broken(session: str, turn: int) -> str:
        raise EngineError("gone")

    engine = ScriptedEngine(chat.tokenizer, broken, stop_id=2)
    player = Player(engine=engine, chat=chat, model="m", env="e", max_tokens=4000)
    with pytest.raises(EpisodeLost) as lost:
        asyncio.run(player.play(ListedEnvironment([]), SPEC, Sampling()))
    assert lost.value.reason == "engine"


def test_an_observer_sees_each_turn_with_the_transcript_before_it(chat: ChatFormat) -> None:
    events: list[TurnEvent] = []
    bad = failure(tool_error("json_decode", "no tool call", text="x"))
    texts = ["let me see", call("read_file", path="a.py"), call("submit")]
    played = play(chat, ListedEnvironment([bad, MISSING, SOLVED]), texts, observe=events.append)
    assert [event.turn for event in events] == [0, 1, 2]
    assert [len(event.errors) for event in events] == [1, 1, 0]
    roles = [[message["role"] for message in event.messages] for event in events]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "tool"],
    ]
    made = events[2].messages[4]["tool_calls"][0]
    assert made["function"] == {"name": "read_file", "arguments": '{"path": "a.py"}'}
    assert events[2].messages[5]["tool_call_id"] == made["id"]
    for event in events:
        turn = played.episode.turns[event.episode_turn]
        assert played.episode.token_ids[turn.start : turn.end] == event.sampled_ids
        assert event.conversation.prompt_end(event.turn) == turn.start
