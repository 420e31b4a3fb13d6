"""mini-swe-agent files: each known quirk, and that every record is accounted for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.episodes import to_episode
from hintloop.replay.ingest.redact import redact_trace
from hintloop.replay.ingest.report import Report

from .recordings import Record, balanced, read
from .samples import document, mini_assistant, mini_document, mini_messages, mini_seen, mini_v1


def all_of(value: Any) -> Any:
    traces, report = read(document(value), "mini_swe_agent")
    assert balanced(report)
    return traces, report


def one(messages: list[Record]) -> Any:
    (trace,), report = all_of(mini_document(messages))
    return trace, report


PROMPT = mini_messages()[:2]


def test_calls_may_be_tool_calls_or_shell_blocks_which_leave_the_text() -> None:
    (trace,), report = all_of(mini_document())
    assert [(m.role, m.text) for m in trace.messages] == [
        ("system", "SETTING"),
        ("user", "list the files"),
        ("assistant", "I look."),
        ("assistant", "Again."),
    ]
    calls = [m.calls[0] for m in trace.messages[2:]]
    assert [json.loads(call.arguments)["command"] for call in calls] == ["lss", "ls"]
    assert [call.result.exit_code for call in calls] == [127, 0]
    assert (trace.model, trace.versions) == ("claude-x", ("2.1.0",))
    assert report.ignored == {"exit": 1}
    assert report.notes == {"exit:Submitted": 1}


def test_version_1_is_a_bare_list_with_return_codes_in_the_text() -> None:
    (trace,), _ = all_of(mini_v1())
    calls = [m.calls[0] for m in trace.messages if m.calls]
    assert [call.result.exit_code for call in calls] == [127, None]
    assert [m.text for m in trace.messages[2:]] == ["I look.", "Done."]
    failure = classify(calls[0])
    assert failure is not None
    assert (failure.kind, failure.cause) == ("command_not_found", "model")


def test_parallel_calls_are_one_turn() -> None:
    actions = [{"command": "a"}, {"command": "b"}]
    both = {"role": "assistant", "content": "both", "extra": {"actions": actions}}
    trace, _ = one([*PROMPT, both, mini_seen("A", 0), mini_seen("B", 1)])
    assert [call.result.text for call in trace.messages[2].calls] == ["A", "B"]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (mini_seen("ok", 0, "c"), None),
        (mini_seen("boom", 1, "c"), ("runtime_error", "model")),
        (mini_seen("Command 'x' timed out after 30 seconds", -1, "c", "An error occurred: ... timed out",
                   exception_type="TimeoutExpired"), ("timeout", "model")),
        (mini_seen("", -1, "c", "An error occurred: the container is gone", exception_type="NotFound"),
         ("runtime_error", "infra")),
        (mini_seen("action was not executed", -1, "c", "action was not executed"), ("permission_denied", "user")),
    ],
)  # fmt: skip
def test_errors_have_a_kind_and_a_cause(seen: Record, expected: Any) -> None:
    trace, _ = one([*PROMPT, mini_assistant("x", "c"), seen])
    failure = classify(trace.messages[2].calls[0])
    assert (failure and (failure.kind, failure.cause)) == expected


def complaint(**extra: Any) -> Record:
    text = "Expected exactly 1 action, found 0."
    return {"role": "user", "content": text, "extra": {"interrupt_type": "FormatError", **extra}}


TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "bsh", "arguments": "{}"}}
RESPONSE = {"choices": [{"message": {"role": "assistant", "content": "hm", "tool_calls": [TOOL_CALL]}}]}


@pytest.mark.parametrize(
    ("extra", "text", "calls"),
    [({"model_response": "no block"}, "no block", 0), ({"response": RESPONSE}, "hm", 1)],
)
def test_an_answer_that_is_no_call_is_a_failure_in_a_conversation_of_its_own(
    extra: Record, text: str, calls: int
) -> None:
    (side, main), report = all_of(mini_document([*PROMPT, complaint(**extra), *mini_messages()[2:]]))
    assert (side.branch, main.branch) == ("format_error1", "main")
    assert [(m.role, m.copied) for m in side.messages] == [
        ("system", True),
        ("user", True),
        ("assistant", False),
        ("user", False),
    ]
    failing = side.messages[2]
    assert (failing.text, len(failing.calls)) == (text, calls)
    assert (failing.failure.kind, failing.failure.cause) == ("json_decode", "model")
    assert [m.role for m in main.messages] == ["system", "user", "user", "assistant", "assistant"]
    episode = to_episode(side, set(), report)
    assert [site.turn for site in episode.hint_sites] == [2]


def test_secrets_in_what_went_wrong_are_replaced() -> None:
    secret = "ghp_" + "a1" * 18
    seen = mini_seen("x", -1, "c", f"An error occurred with {secret}", exception_type="NotFound")
    wrong = complaint(model_response="no block")
    wrong["content"] = f"I see {secret}"
    traces, _ = all_of(mini_document([*PROMPT, mini_assistant("x", "c"), seen, wrong, *mini_messages()[2:]]))
    found: Counter[str] = Counter()
    episodes = [to_episode(redact_trace(trace, found), set(), Report()) for trace in traces]
    assert secret not in str(episodes)
    assert found["github_token"] >= 3


def test_version_1_keeps_the_answer_that_it_could_not_use() -> None:
    complained = "Please always provide EXACTLY ONE action"
    wrong = [{"role": "assistant", "content": "no block"}, {"role": "user", "content": complained}]
    (trace,), _ = all_of([*mini_v1()[:2], *wrong, *mini_v1()[2:]])
    assert trace.messages[2].failure.kind == "json_decode"
    assert trace.messages[3].text == complained


def test_a_complaint_about_an_answer_that_is_not_there_makes_no_site() -> None:
    (trace,), report = all_of(mini_document([*PROMPT, complaint(response="repr"), *mini_messages()[2:]]))
    assert report.notes["failed_message_not_recorded"] == 1
    assert to_episode(trace, set(), Report()).hint_sites[0].turn == 3


@pytest.mark.parametrize("kind", ["UserInterruption", "UserRejection", "UserNewTask"])
def test_what_a_user_says_in_between_is_a_message_and_no_error(kind: str) -> None:
    said = {"role": "user", "content": "stop", "extra": {"interrupt_type": kind}}
    trace, report = one([*mini_messages()[:4], said])
    assert trace.messages[-1].text == "stop"
    assert report.notes[kind] == 1
    assert trace.messages[2].failure is None


@pytest.mark.parametrize(
    "status", ["Submitted", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError", "KeyError"]
)
def test_the_end_is_counted_and_is_no_message(status: str) -> None:
    value = mini_document(
        [*mini_messages()[:4], {"role": "exit", "content": status, "extra": {"traceback": "x"}}]
    )
    value["info"]["exit_status"] = status
    (trace,), report = all_of(value)
    assert (len(trace.messages), report.ignored["exit"], report.notes[f"exit:{status}"]) == (3, 1, 1)
    assert trace.grade is None


def test_commands_of_the_user_are_messages_and_so_are_their_results() -> None:
    typed = {"role": "user", "content": "User command: ls", "extra": {"actions": [{"command": "ls"}]}}
    trace, report = one([*PROMPT, typed, mini_seen("a.py", 0), *mini_messages()[2:]])
    assert [m.text for m in trace.messages[2:4]] == ["User command: ls", "a.py"]
    assert report.notes["human_command"] == 1


def test_messages_in_the_form_of_the_responses_api_are_read() -> None:
    output = [
        {"type": "reasoning", "summary": []},
        {"type": "message", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"command":"ls"}'},
    ]
    seen = {"type": "function_call_output", "call_id": "c", "output": "a.py", "extra": {"returncode": 0}}
    trace, report = one([*PROMPT, {"object": "response", "output": output, "extra": {"actions": []}}, seen])
    (call,) = trace.messages[2].calls
    assert (trace.messages[2].text, call.name, call.result.text) == ("I look.", "bash", "a.py")
    assert report.notes["thinking"] == 1


def test_odd_messages_are_skipped_by_reason() -> None:
    _, report = one([*mini_messages(), *mini_messages(), {"role": "ghost"}, {"role": "user", "content": 5}])
    assert report.skipped == {"unknown_role": 1, "malformed_message": 1}
