"""Gemini CLI files, both forms: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify
from hintloop.replay.ingest.trace import Usage

from .recordings import Record, balanced, lines, read
from .samples import GEMINI_META, document, gemini_call, gemini_document, gemini_lines, gemini_message


def one(data: bytes) -> Any:
    traces, report = read(data, "gemini_cli")
    assert balanced(report)
    (trace,) = traces
    return trace, report


def call_of(call: Record) -> Any:
    messages = [gemini_message("user", 1, "go"), gemini_message("gemini", 2, "", toolCalls=[call])]
    trace, report = one(document({**GEMINI_META, "messages": messages}))
    return trace.messages[1].calls[0], report


@pytest.mark.parametrize("data", [document(gemini_document()), lines(gemini_lines())])
def test_both_forms_hold_the_same_conversation(data: bytes) -> None:
    trace, report = one(data)
    assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
        ("user", "list the files", 0),
        ("assistant", "I look.", 1),
        ("assistant", "", 1),
        ("assistant", "There is a.py", 0),
    ]
    first = trace.messages[1]
    assert (first.thinking, first.usage, first.model) == ("Plan\nlook", Usage(10, 5), "gemini-x")
    assert first.calls[0].arguments == '{"command":"ls"}'
    assert first.calls[0].result.exit_code == 127
    assert (trace.session, trace.branch) == ("g1", "main")
    assert report.ignored["info"] == 1


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (gemini_call("c", "Output: x\nExit Code: 0"), None),
        (gemini_call("c", "Output: Exit Code: 3"), None),
        (gemini_call("c", "Error: boom\nExit Code: 1"), ("runtime_error", "model")),
        (gemini_call("c", "Failed to edit, could not find the string to replace.", "error", name="replace"),
         ("edit_no_match", "model")),
        (gemini_call("c", 'Tool "x" not found in registry.', "error", name="x"), ("tool_not_found", "model")),
        (gemini_call("c", "fetch failed", "error", name="web_fetch"), ("connection_error", "infra")),
        (gemini_call("c", "[Operation Cancelled]", "cancelled"), ("permission_denied", "user")),
        (gemini_call("c", status="error", result=[]), ("runtime_error", "infra")),
    ],
)  # fmt: skip
def test_status_response_and_exit_code_say_how_a_call_went(call: Record, verdict: Any) -> None:
    made, _ = call_of(call)
    failure = classify(made)
    assert (failure and (failure.kind, failure.cause)) == verdict


@pytest.mark.parametrize("status", ["validating", "scheduled", "awaiting_approval", "executing", "success"])
def test_a_call_without_result_stays_without(status: str) -> None:
    made, report = call_of(gemini_call("c", status=status, result=None))
    assert made.result is None
    assert report.notes["call_without_result"] == 1


def test_calls_without_id_or_time_and_odd_results_are_read() -> None:
    bare = {"name": "read_file", "args": None, "status": "success", "result": "plain"}
    made, _ = call_of(bare)
    assert (made.call_id, made.arguments, made.result.text) == ("", "null", "plain")
    parts = [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "x"}}]
    made, report = call_of(gemini_call("c", result=parts))
    assert made.result.text == "a\n[image]"
    assert report.notes["image"] == 1


def test_a_message_that_is_written_again_counts_once_with_its_last_form() -> None:
    records = [*gemini_lines()[:3], gemini_message("gemini", 2, "better"), gemini_message("gemini", 5, "end")]
    trace, report = one(lines(records))
    assert [m.text for m in trace.messages] == ["list the files", "better", "end"]
    assert report.ignored["rewritten"] == 1


def test_a_rewind_leaves_a_conversation_of_its_own() -> None:
    records = [*gemini_lines(), {"$rewindTo": "m3"}, gemini_message("gemini", 6, "other")]
    traces, report = read(lines(records), "gemini_cli")
    assert [(t.branch, [m.text for m in t.messages]) for t in traces] == [
        ("rewound1", ["list the files", "I look.", "", "There is a.py"]),
        ("main", ["list the files", "I look.", "other"]),
    ]
    assert [m.copied for m in traces[1].messages] == [True, True, False]
    assert balanced(report)


def test_a_rewind_to_an_unknown_message_clears_all() -> None:
    records = [
        *gemini_lines(),
        {"$rewindTo": "nobody"},
        *[gemini_message(k, 7 + n, k) for n, k in enumerate(["user", "gemini"])],
    ]
    traces, _ = read(lines(records), "gemini_cli")
    assert [m.text for m in traces[-1].messages] == ["user", "gemini"]


def test_a_new_list_of_messages_takes_the_place_of_all() -> None:
    changed = [gemini_message("user", 1, "summary"), gemini_message("gemini", 9, "kept")]
    records = [*gemini_lines(), {"$set": {"messages": changed}}, gemini_message("gemini", 10, "on")]
    traces, report = read(lines(records), "gemini_cli")
    assert [t.branch for t in traces] == ["before_change1", "main"]
    assert [(m.text, m.copied) for m in traces[1].messages] == [
        ("summary", True),
        ("kept", False),
        ("on", False),
    ]
    assert balanced(report)
    assert report.notes["messages_replaced"] == 1


@pytest.mark.parametrize("text", ["/help", "?", "<session_context>x", "<hook_context>y"])
def test_what_did_not_go_to_the_model_is_left_out(text: str) -> None:
    trace, report = one(lines([*gemini_lines(), gemini_message("user", 8, text)]))
    assert len(trace.messages) == 4
    assert report.notes["injected_text"] == 1


def test_content_may_hold_parts_calls_and_answers() -> None:
    parts = [
        {"text": "hm", "thought": True},
        {"text": "I look."},
        {"functionCall": {"id": "c1", "name": "ls", "args": {}}},
    ]
    answer = [{"functionResponse": {"id": "c1", "name": "ls", "response": {"output": {"files": 1}}}}]
    messages = [
        gemini_message("user", 1, "go"),
        gemini_message("gemini", 2, parts),
        gemini_message("user", 3, answer),
    ]
    trace, _ = one(document({**GEMINI_META, "messages": messages}))
    (made,) = trace.messages[1].calls
    assert (trace.messages[1].text, made.name, made.result.text) == ("I look.", "ls", '{"files":1}')


def test_parallel_calls_are_one_turn_and_a_sub_agent_has_its_own_file() -> None:
    calls = [gemini_call("a", "A"), gemini_call("b", "B")]
    records = [
        {**GEMINI_META, "kind": "subagent"},
        gemini_message("user", 1, "go"),
        gemini_message("gemini", 2, "", toolCalls=calls),
    ]
    trace, _ = one(lines(records))
    assert [call.result.text for call in trace.messages[1].calls] == ["A", "B"]
    assert trace.branch == "side"


def test_odd_messages_are_skipped_by_reason() -> None:
    odd = [gemini_message("hologram", 6, "x"), gemini_message("user", 7, 5), {"what": 1}]
    _, report = one(lines([*gemini_lines(), *gemini_lines(), *odd]))
    assert report.skipped == {"unknown_type": 2, "malformed_message": 1}
