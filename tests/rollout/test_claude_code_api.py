"""Claude Code files for scripts: states that teachers can be asked about, examples with their errors marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hintloop.envs.models import ToolCall
from hintloop.replay.ingest.report import Refused
from hintloop.rollout.claude_code_api import (
    SYSTEM_PROMPT,
    ClaudeCodeIngester,
    ClaudeState,
    claude_states_to_trace_examples,
    default_classify_error,
)
from hintloop.rollout.config import TeacherSpec
from hintloop.rollout.replay_api import TraceState, extract_dpo_pairs, replay_trace

from .teacher_server import says, teaching

SECRET = "ghp_" + "a1" * 18


class Lines:
    """Records of a Claude Code file, each the child of the one before."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, kind: str, content: Any, *, side: bool = False, root: bool = False, **message: Any) -> None:
        number = len(self.records)
        record = {
            "type": kind,
            "uuid": f"u{number}",
            "parentUuid": None if root or not number else f"u{number - 1}",
            "sessionId": "s1",
            "isSidechain": side,
            "timestamp": "2025-09-07T09:52:03Z",
            "message": {"role": kind, "content": content, **message},
        }
        self.records.append(record)

    def turn(
        self, number: int, command: str, result: str, *, failed: bool = False, side: bool = False
    ) -> None:
        use = {"type": "tool_use", "id": f"c{number}", "name": "Bash", "input": {"command": command}}
        self.add(
            "assistant",
            [{"type": "text", "text": f"step {number}"}, use],
            side=side,
            id=f"m{number}",
            model="x",
        )
        block = {"type": "tool_result", "tool_use_id": f"c{number}", "is_error": failed, "content": result}
        self.add("user", [block], side=side)

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(each) + "\n" for each in self.records))
        return path


def lines() -> Lines:
    """A failed command, a good one and a last word; a sub-agent with one command."""
    made = Lines()
    made.add("user", f"list the files with {SECRET}")
    made.turn(1, "lss", "lss: command not found", failed=True)
    made.turn(2, "ls", "a.py")
    made.add("assistant", [{"type": "text", "text": "done"}], id="m3", model="x")
    made.add("user", "look around", side=True, root=True)
    made.turn(4, "pwd", "/w", side=True)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return lines().write(tmp_path / "s1.jsonl")


def test_each_turn_with_a_call_is_a_state(file: Path) -> None:
    ingester = ClaudeCodeIngester()
    states = list(ingester.ingest(file))
    assert [state.action for state in states] == [
        ToolCall(name="Bash", arguments={"command": "lss"}),
        ToolCall(name="Bash", arguments={"command": "ls"}),
    ]
    assert states[0].messages[0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert [message["role"] for message in states[1].messages] == ["system", "user", "assistant", "tool"]
    assert states[0].tools[0]["name"] == "Bash"
    assert (states[0].failure, states[1].failure, dict(states[1].failed)) == (
        "lss: command not found",
        None,
        {2: "lss: command not found"},
    )
    stats = ingester.stats
    assert (stats.files, stats.states, stats.conversations, stats.sidechains_skipped) == (1, 2, 2, 1)
    assert (stats.turns_without_call, stats.records, stats.secrets) == (1, 9, {"github_token": 1})


def test_every_option_is_honoured(file: Path) -> None:
    assert len(list(ClaudeCodeIngester(skip_sidechain=False).ingest(file))) == 3
    kept = list(ClaudeCodeIngester(keep_secrets=True, system_prompt=None).ingest(file))
    assert SECRET in kept[0].messages[0]["content"]
    assert SECRET not in next(iter(ClaudeCodeIngester().ingest(file))).messages[1]["content"]
    asked = next(iter(ClaudeCodeIngester(system_prompt="Be brief.").ingest(file)))
    assert asked.messages[0]["content"] == "Be brief."


def test_a_history_has_at_most_so_many_tokens(tmp_path: Path) -> None:
    made = Lines()
    made.add("user", "go")
    for number in range(1, 8):
        made.turn(number, "x" * 10, "y" * 100)
    file = made.write(tmp_path / "long.jsonl")
    ingester = ClaudeCodeIngester(system_prompt=None, max_history_tokens=700, count_tokens=len)
    states = list(ingester.ingest(file))
    told = [
        sum(len(each["content"]) + len(json.dumps(each.get("tool_calls", ""))) for each in state.messages)
        for state in states
    ]
    assert len(states) == 7
    assert max(told) <= 700 + 2 * len(states[-1].messages)  # `""` where there are no calls
    assert (
        ingester.stats.histories_cut
        == sum(len(state.messages) < 2 * n + 1 for n, state in enumerate(states))
        > 0
    )
    assert all(state.messages[0]["content"] == "go" for state in states)
    narrow = ClaudeCodeIngester(max_history_tokens=1)
    assert list(narrow.ingest(file)) == []
    assert narrow.stats.histories_too_long == 7


def test_a_folder_is_walked_and_strangers_are_refused_by_name(file: Path) -> None:
    (file.parent / "notes.txt").write_text("no trace")
    ingester = ClaudeCodeIngester()
    assert len(list(ingester.ingest(file.parent))) == 2
    assert (ingester.stats.files, ingester.stats.files_refused) == (2, 1)
    with pytest.raises(Refused, match="not a trace"):
        list(ClaudeCodeIngester().ingest(file.parent / "notes.txt"))
    chat = file.parent / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]))
    with pytest.raises(Refused, match="not of Claude Code"):
        list(ClaudeCodeIngester().ingest(str(chat)))


def test_examples_mark_the_turn_that_failed_or_the_one_behind_it(file: Path) -> None:
    states = list(ClaudeCodeIngester().ingest(file))
    failing = claude_states_to_trace_examples(states)
    marks = [[turn["tool_error"] for turn in example["turns"]] for example in failing]
    assert marks == [[None, None, "command_not_found"], [None, None, "command_not_found", None, None]]
    assert failing[0]["state_id"] == states[0].state_id
    assert failing[0]["turns"][-1]["content"] == 'Bash {"command": "lss"}'
    assert failing[1]["turns"][2]["content"] == 'step 1\nBash {"command": "lss"}'
    recovery = claude_states_to_trace_examples(states, classify_error=lambda text: "odd", site="recovery")
    marks = [[turn["tool_error"] for turn in example["turns"]] for example in recovery]
    assert marks == [[None, None, None], [None, None, None, None, "odd"]]
    plain = TraceState(states[0].messages, states[0].tools, states[0].action)
    (example,) = claude_states_to_trace_examples([plain])
    assert all(turn["tool_error"] is None for turn in example["turns"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Error: File does not exist.", "file_not_found"),
        ("bash: foo: command not found", "command_not_found"),
        ("Permission denied", "permission_denied"),
        ("something odd", "runtime_error"),
        ("", "runtime_error"),
    ],
)
def test_an_error_text_has_a_kind(text: str, kind: str) -> None:
    assert default_classify_error(text) == kind


def test_states_go_to_teachers_as_they_are(file: Path, tmp_path: Path) -> None:
    states = list(ClaudeCodeIngester().ingest(file))
    good = ToolCall(name="Bash", arguments={"command": "ls -a"})
    with teaching(lambda number, body: says(good)) as server:
        specs = [TeacherSpec(name=name, base_url=server.url, model=name) for name in ("a", "b")]
        results = replay_trace(states, specs, folder=tmp_path / "replay")
        assert all(
            set(message) <= {"role", "content", "tool_calls", "tool_call_id"}
            for message in server.requests[0]["messages"]
        )
    pairs = extract_dpo_pairs(states, results)
    assert [(pair.chosen, pair.agreed) for pair in pairs] == [((good,), 2), ((good,), 2)]


def test_the_shared_claude_code_file_gives_states(shared_data: Path) -> None:
    (file,) = (shared_data / "traces").glob("claude_code_*.jsonl")
    ingester = ClaudeCodeIngester(skip_sidechain=False, max_history_tokens=4000)
    states = list(ingester.ingest(file))
    assert ingester.stats.states == len(states) > 10
    assert sum(isinstance(state, ClaudeState) and state.failure is not None for state in states) == 3
