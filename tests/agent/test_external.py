"""Agent programs as real processes, against an environment that answers from a list and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hintloop.agent import guard
from hintloop.agent.chat_messages import read_request
from hintloop.agent.engine import EngineError, Sample, Sampling
from hintloop.agent.episode import EpisodeLost, EpisodeSpec, Played, Player, TurnEvent
from hintloop.agent.external import open_external
from hintloop.agent.lines import Lines
from hintloop.agent.policy import ChatFormat
from hintloop.envs.client import EnvironmentLost, StepResult, step_result
from hintloop.envs.errors import tool_error
from hintloop.envs.models import TaskInfo, ToolCall, ToolResult
from hintloop.envs.tools import TOOL_PROMPT, TOOLS, failure
from hintloop.replay.episode import Outcome
from hintloop.rollout.engines.scripted import ScriptedEngine

PROGRAM = Path(__file__).parent / "agent_program.py"
SIMPLE = Path(__file__).parents[2] / "examples" / "simple_agent.py"
TASK = TaskInfo(
    task_id="bugfix/x",
    instruction="Fix solution.py: f should give: the sum",
    files=["solution.py"],
    tools=list(TOOLS.values()),
    tool_prompt=TOOL_PROMPT,
    max_turns=8,
)
SPEC = EpisodeSpec("g000000-0", "g000000", "bugfix/x")
MISSING = failure(tool_error("file_not_found", "no such file: a.py", path="a.py", files=["solution.py"]))
BROKEN_BASH = ToolResult(
    output="error: runtime error (exit code 3)\nboom",
    error=tool_error("runtime_error", "runtime error (exit code 3)", command="false"),
    exit_code=3,
)
SOLVED = ToolResult(output="submitted", done=True, reward=1.0, reward_parts={"tests": 1.0})
INFRA = failure(tool_error("connection_error", "the sandbox is gone")).model_copy(update={"done": True})


@dataclass
class Environment:
    """``answer`` gives the result of a call, or raises."""

    answer: Callable[[ToolCall], ToolResult]
    calls: list[ToolCall] = field(default_factory=list)

    async def reset(self, **kwargs: Any) -> StepResult[ToolResult]:
        return step_result(ToolResult(task=TASK))

    async def step(self, action: ToolCall) -> StepResult[ToolResult]:
        self.calls.append(action)
        return step_result(self.answer(action))


def world(call: ToolCall) -> ToolResult:
    """Reading a.py fails, a failing command fails, submitting ends."""
    if call.name == "submit":
        return SOLVED
    if call.malformed is not None:
        return failure(tool_error("json_decode", "no tool call", text=call.malformed))
    if call.name == "read_file":
        return MISSING if call.arguments["path"] == "a.py" else ToolResult(output="1: def f():")
    if call.name == "bash":
        failing = "false" in call.arguments["command"] or "git" in call.arguments["command"]
        return BROKEN_BASH if failing else ToolResult(output="fine", exit_code=0)
    if call.name not in TOOLS:
        return failure(tool_error("tool_not_found", "unknown tool", name=call.name, tools=list(TOOLS)))
    return ToolResult(output="ok")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def player_of(chat: ChatFormat, texts: Sequence[str], **changes: Any) -> Player:
    stop = chat.renderer.get_stop_token_ids()[0]
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: texts[turn], stop_id=stop, version=3)
    return Player(
        **{"engine": engine, "chat": chat, "model": "student", "env": "coding", "max_tokens": 4000} | changes
    )


async def run_external(
    player: Player,
    env: Any,
    command: str,
    *,
    idle_s: float = 60.0,
    observe: Any = None,
    keep: Any = None,
    max_new_tokens: int = 400,
    refuse_sampling: bool = False,
) -> Played:
    async with open_external(player, command, idle_s=idle_s, refuse_sampling=refuse_sampling) as agent:
        return await agent.play(env, SPEC, Sampling(1.0, max_new_tokens), observe, keep)


def mode(name: str) -> str:
    if name == "plain":
        return f'"{sys.executable}" -I -S "{SIMPLE}"'
    return f'"{sys.executable}" -I -S "{PROGRAM}" {name}'


def play(chat: ChatFormat, texts: Sequence[str], name: str, env: Any = None, **options: Any) -> Played:
    changes = {key: options.pop(key) for key in ("max_tokens", "engine", "hint_role") if key in options}
    env = env or Environment(world)
    return asyncio.run(run_external(player_of(chat, texts, **changes), env, mode(name), **options))


def test_an_episode_of_a_program_is_the_one_that_the_player_makes(chat: ChatFormat) -> None:
    texts = [call("read_file", path="a.py"), "no call", call("read_file", path="solution.py"), call("submit")]
    ours, theirs = Environment(world), Environment(world)
    expected = asyncio.run(player_of(chat, texts).play(ours, SPEC, Sampling(1.0, 400)))
    played = play(chat, texts, "plain", theirs)
    assert theirs.calls == ours.calls
    same = {"created_at": 0.0, "turns": ()}
    assert replace(played.episode, **same) == replace(expected.episode, **same)
    assert [replace(turn, seconds=0) for turn in played.episode.turns] == [
        replace(turn, seconds=0) for turn in expected.episode.turns
    ]
    assert [site.kind for site in played.episode.hint_sites] == ["file_not_found", "json_decode"]
    assert played.notes == expected.notes


def test_tools_of_a_program_are_rendered_and_their_errors_are_sites(chat: ChatFormat) -> None:
    events: list[TurnEvent] = []
    kept: list[tuple[int, int]] = []

    def keep(turn: int, sample: Sample, calls: Sequence[ToolCall]) -> Any:
        kept.append((turn, len(calls)))
        return "always"

    texts = [call("read_file", path="a.py"), call("bash", command="false"), call("fly", to="moon"), "done"]
    env = Environment(world)
    played = play(chat, texts, "tools", env, observe=events.append, keep=keep, max_new_tokens=100)
    episode = played.episode
    assert [site.kind for site in episode.hint_sites] == ["file_not_found", "runtime_error", "tool_not_found"]
    assert "there is no fly" in episode.hint_sites[2].hint
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0)
    assert env.calls[-1] == ToolCall(name="submit")
    assert [each.keep for each in env.calls] == ["always", "no", "always", "no", "always", "no", "no"]
    assert kept == [(0, 1), (1, 1), (2, 1)]
    assert [(event.turn, event.step, event.calls[0].name) for event in events] == [
        (0, 1, "read_file"),
        (1, 3, "bash"),
        (2, 5, "fly"),
    ]
    assert [message["role"] for message in events[1].messages] == ["user", "assistant", "tool"]
    assert {spec["name"] for spec in events[0].task.tools} == set(TOOLS)
    # The program's own failing command after each turn is nobody's mistake, and is told.
    assert played.notes.dropped_sites == {"the call was not the model's": 3}
    assert played.notes.overridden == {"temperature": 4, "top_p": 4}
    text = chat.tokenizer.decode(list(episode.token_ids))
    assert "# Tools" in text
    assert text.endswith("done<|im_end|>")
    sampled = [turn for turn in episode.turns if turn.role == "assistant"]
    assert sum(turn.end - turn.start for turn in sampled) == sum(episode.loss_mask)
    for event in events:
        turn = episode.turns[event.episode_turn]
        assert tuple(episode.token_ids[turn.start : turn.end]) == event.sampled_ids
        assert turn.start == event.conversation.prompt_end(event.turn)


def test_the_sandbox_command_runs_in_the_sandbox_with_its_exit_status(chat: ChatFormat) -> None:
    env = Environment(world)
    played = play(chat, ["cat x | wc", "echo false", "exit"], "shell", env)
    assert [each.arguments.get("command") for each in env.calls] == ["cat x | wc", "echo false", None]
    assert [turn.text for turn in played.episode.turns if turn.role == "user"][1:] == [
        "0: fine",
        "3: error: runtime error (exit code 3)\nboom",
    ]
    assert [site.kind for site in played.episode.hint_sites] == ["runtime_error"]
    assert len(played.episode.reward_parts) == 1, "user messages are appended in place"


def test_an_answer_that_the_program_takes_back_is_counted_and_not_in_the_episode(chat: ChatFormat) -> None:
    first = call("read_file", path="a.py")
    texts = ["Title", call("bash", command="x"), first, call("fly"), call("run_tests"), "no", "done"]
    played = play(chat, texts, "retry")
    episode = played.episode
    text = chat.tokenizer.decode(list(episode.token_ids))
    assert [turn.text for turn in episode.turns if turn.role == "assistant"] == [first, texts[4], "done"]
    assert "fly" not in text
    assert "Title" not in text
    lost = [len(chat.tokenizer.encode(texts[at], add_special_tokens=False)) + 1 for at in (0, 1, 3, 5)]
    assert episode.reward_parts == {"tests": 1.0, "lines": 5.0, "tokens_elsewhere": float(sum(lost))}
    assert [site.kind for site in episode.hint_sites] == ["file_not_found"]
    assert played.notes.dropped_sites == {"the agent took the turn out of its history": 1}


def test_an_observer_is_told_of_turns_of_the_episode_only(chat: ChatFormat) -> None:
    texts = [call("bash", command=f"run {number}") for number in range(5)]
    events: list[TurnEvent] = []
    watched = play(chat, texts, "back", observe=events.append).episode
    # Two turns were told before the program went back behind the first: the line that has them is the episode.
    assert [turn.text for turn in watched.turns if turn.role == "assistant"] == texts[:3]
    assert [event.text for event in events] == texts[:3]
    for event in events:
        turn = watched.turns[event.episode_turn]
        assert tuple(watched.token_ids[turn.start : turn.end]) == event.sampled_ids
    assert watched.reward_parts["lines"] == 2.0
    assert watched.outcome is Outcome.SOLVED


def test_a_rewritten_history_is_a_prompt_and_never_counts_as_sampled(chat: ChatFormat) -> None:
    played = play(chat, ["one", "a longer one"], "rewrite")
    episode = played.episode
    assert [turn.role for turn in episode.turns] == ["user", "context", "user", "assistant", "tool"]
    assert episode.turns[1].text == "It said one"
    assert sum(episode.loss_mask) == len(chat.tokenizer.encode("a longer one")) + 1
    assert episode.reward_parts["lines"] == 2.0


def test_an_episode_without_room_is_truncated_and_the_program_ended(chat: ChatFormat) -> None:
    played = play(chat, ["ok " * 20] * 99, "endless")
    assert played.episode.outcome is Outcome.TRUNCATED
    assert played.episode.reward == 0.0
    cut = play(chat, ["ok " * 20] * 9, "shell", max_tokens=150)
    assert cut.episode.outcome is Outcome.TRUNCATED
    assert len(cut.episode.token_ids) <= 150


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "something broke"),
        ("silent", "without a question"),
        ("unasked", "without a question"),
        ("hang", "more than 1 s"),
    ],
)
def test_a_program_that_breaks_loses_the_episode(chat: ChatFormat, name: str, reason: str) -> None:
    with pytest.raises(EpisodeLost, match=reason) as lost:
        play(chat, ["hi"], name, idle_s=1.0 if name == "hang" else 60.0)
    assert lost.value.reason == "agent"
    assert ("my key is [key]" in str(lost.value)) == (name == "crash")


def test_sampling_settings_of_a_program_are_refused_where_that_is_wanted(chat: ChatFormat) -> None:
    with pytest.raises(EpisodeLost, match=r"400: .*top_p, temperature: .* hold for temperature 1") as lost:
        play(chat, ["hi"], "refused", refuse_sampling=True)
    assert lost.value.reason == "agent"
    # What changes nothing is no such setting, and a program without any is answered.
    unchanged = {"temperature": None, "top_p": 1, "top_k": -1, "logit_bias": {}}
    assert not read_request({"messages": [{"role": "user", "content": "x"}], **unchanged}).sampling
    assert play(chat, [call("submit")], "plain", refuse_sampling=True).episode.reward == 1.0


class Gone(ScriptedEngine):
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sample:
        raise EngineError("the engine is gone")


def raising(error: Exception) -> Callable[[ToolCall], ToolResult]:
    def answer(call: ToolCall) -> ToolResult:
        raise error

    return answer


def test_what_breaks_around_a_program_loses_the_episode_to_that(chat: ChatFormat) -> None:
    engine = Gone(chat.tokenizer, lambda session, turn: "", stop_id=0)
    read = [call("read_file", path="a.py")]
    for reason, options in (
        ("engine", {"engine": engine}),
        ("environment", {"env": Environment(raising(EnvironmentLost("closed")))}),
        ("sandbox", {"env": Environment(lambda action: INFRA)}),
        ("ungraded", {"env": Environment(lambda action: ToolResult(output="x", done=True))}),
    ):
        with pytest.raises(EpisodeLost) as lost:
            play(chat, read, "plain", **options)
        assert lost.value.reason == reason
    with pytest.raises(RuntimeError, match="a bug"):
        play(chat, read, "plain", Environment(raising(RuntimeError("a bug"))))


def test_a_program_sees_its_task_and_nothing_of_this_process(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-secret")
    with pytest.raises(EpisodeLost) as lost:
        play(chat, [], "environment")
    told = json.loads(str(lost.value).split("status 3: ", 1)[1])
    assert "sk-secret" not in str(lost.value)
    assert (told["HINTLOOP_TASK"], told["HINTLOOP_TASK_ID"]) == (TASK.instruction, TASK.task_id)
    assert told["OPENAI_API_KEY"] == told["HINTLOOP_TOKEN"] == "[key]"
    assert told["files"] == ["TASK.md"]
    assert told["HOME"] == told["cwd"] != os.getcwd()
    assert not Path(told["cwd"]).exists()


def test_long_work_for_a_program_is_done_beside_the_event_loop(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: dict[str, bool] = {}

    def watched(owner: type, name: str) -> None:
        work = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            beside.setdefault(name, threading.current_thread() is not threading.main_thread())
            return work(*arguments)

        monkeypatch.setattr(owner, name, noted)

    watched(Lines, "find")
    watched(tempfile.TemporaryDirectory, "cleanup")
    play(chat, ["fine"], "parts", max_tokens=30_000)
    assert beside == {"find": True, "cleanup": True}


def test_episodes_run_side_by_side_each_with_its_own_key(chat: ChatFormat) -> None:
    texts = [call("read_file", path="a.py"), call("submit")]

    async def both() -> list[Played]:
        async with open_external(player_of(chat, texts), mode("plain"), idle_s=60) as agent:
            specs = [replace(SPEC, episode_id=f"g000000-{number}") for number in range(3)]
            return await asyncio.gather(
                *(agent.play(Environment(world), spec, Sampling(1.0, 400)) for spec in specs)
            )

    played = asyncio.run(both())
    assert [each.episode.episode_id for each in played] == ["g000000-0", "g000000-1", "g000000-2"]
    assert len({each.episode.token_ids for each in played}) == 1
    assert all(each.episode.reward == 1.0 for each in played)


def test_a_program_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    file = tmp_path / "pid"
    command = [sys.executable, "-I", "-S", guard.__file__, "sh", "-c", f"sleep 600 & echo $! > {file}; wait"]
    process = subprocess.Popen(command, stdin=theirs, start_new_session=True)
    theirs.close()
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ours.close()
    assert process.wait(30) == -signal.SIGKILL
    assert ends(int(file.read_text()))


def ends(pid: int) -> bool:
    """Whether a process is gone within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_processes_that_a_program_leaves_behind_are_killed(chat: ChatFormat, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = f"sleep 600 & echo $! > {file}; exec {mode('plain')}"
    player = player_of(chat, [call("submit")])
    asyncio.run(run_external(player, Environment(world), command))
    assert ends(int(file.read_text()))
