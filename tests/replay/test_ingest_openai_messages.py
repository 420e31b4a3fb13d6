"""OpenAI-style message lists: each known quirk, and that every record is accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from hintloop.replay.ingest.classify import classify

from .recordings import Record, balanced, lines, read
from .samples import chat_call, chat_messages, chat_row, document

PROMPT = {"role": "user", "content": "go"}


def one(messages: list[Any]) -> Any:
    (trace,), report = read(document({"messages": messages}), "openai_messages")
    assert balanced(report)
    return trace, report


def calls(*made: Any, **more: Any) -> Record:
    return {"role": "assistant", "content": None, "tool_calls": list(made), **more}


def seen(call_id: str, content: Any = "ok", **more: Any) -> Record:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


@pytest.mark.parametrize(
    ("data", "number", "records"),
    [
        (document(chat_messages()), 1, 8),
        (document(chat_row()), 1, 8),
        (document([chat_row(), chat_row()]), 2, 17),
        (lines([chat_row(), chat_row()]), 2, 16),
        (lines(chat_messages()), 1, 7),
    ],
)
def test_all_forms_hold_the_same_conversation(data: bytes, number: int, records: int) -> None:
    traces, report = read(data, "openai_messages")
    assert (len(traces), report.read, report.used) == (number, records, records)
    for trace in traces:
        assert [(m.role, m.text, len(m.calls)) for m in trace.messages] == [
            ("system", "SETTING", 0),
            ("user", "list the files", 0),
            ("assistant", "I look.", 1),
            ("assistant", "", 1),
            ("assistant", "There is a.py", 0),
        ]
    assert [call.arguments for m in traces[0].messages for call in m.calls] == ['{"command":"ls"}'] * 2
    assert report.notes["tool_definitions"] == (number if b"tools" in data else 0)


def test_a_row_may_have_an_id() -> None:
    (trace,), _ = read(document(chat_row()), "openai_messages")
    assert trace.session == "row-1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ok", None),
        ("Error: bash: x: command not found", ("command_not_found", "model")),
        ("The Error: is in the middle", None),
        ("Traceback (most recent call last):\n  x\nKeyError: 1", ("runtime_error", "model")),
        ('{"stdout": "", "stderr": "boom", "exit_code": 1}', ("runtime_error", "model")),
        ('{"exit_code": 0}', None),
        ('{"error": "Unknown tool: x"}', ("tool_not_found", "model")),
        ('{"error": null}', None),
        ("{not json", None),
    ],
)
def test_errors_have_a_kind_and_a_cause(text: str, expected: Any) -> None:
    trace, _ = one([PROMPT, calls(chat_call("c1")), seen("c1", text)])
    failure = classify(trace.messages[1].calls[0])
    assert (failure and (failure.kind, failure.cause)) == expected


def test_parallel_calls_are_one_turn_and_results_come_in_any_order() -> None:
    trace, report = one(
        [PROMPT, calls(chat_call("a"), chat_call("b"), chat_call("c")), seen("b", "B"), seen("a", "A")]
    )
    assert [call.result and call.result.text for call in trace.messages[1].calls] == ["A", "B", None]
    assert report.notes == {"call_without_result": 1}


def test_ids_that_are_used_again_are_paired_by_order_and_orphans_counted() -> None:
    messages = [
        PROMPT,
        seen("x", "orphan"),
        calls(chat_call("c")),
        seen("c", "1"),
        seen("c", "again"),
        calls(chat_call("c")),
        seen("c", "2"),
    ]
    trace, report = one(messages)
    assert [call.result.text for m in trace.messages for call in m.calls] == ["1", "2"]
    assert report.notes == {"repeated_result": 1, "result_without_call": 1}


def test_the_older_function_calls_are_paired_by_name() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "not json"}}
    trace, report = one([PROMPT, old, {"role": "function", "name": "f", "content": "1"}, old,
                         {"role": "function", "name": "g", "content": "2"}])  # fmt: skip
    made = [call for m in trace.messages for call in m.calls]
    assert [(call.arguments, call.result and call.result.text) for call in made] == [
        ('"not json"', "1"),
        ('"not json"', None),
    ]
    assert report.notes == {"result_without_call": 1, "call_without_result": 1}


def test_custom_calls_flat_calls_and_what_is_none() -> None:
    custom = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    flat = {"id": "b", "name": "ls", "args": {"path": "."}}
    trace, report = one([PROMPT, calls(custom, flat, {"id": "c"}, "x")])
    assert [(c.name, c.arguments) for c in trace.messages[1].calls] == [
        ("patch", '{"input":"*** Begin"}'),
        ("ls", '{"path":"."}'),
    ]
    assert report.notes["unknown_block"] == 2


def test_content_has_many_forms() -> None:
    parts = [
        "plain",
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "b"},
        {"type": "image_url", "image_url": {}},
        {"type": "input_audio"},
        {"type": "refusal", "refusal": "no"},
        {"type": "odd"},
    ]
    last = {"role": "assistant", "content": "done", "reasoning_content": "hm"}
    trace, report = one(
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}, calls(), last]
    )
    assert [(m.role, m.text) for m in trace.messages] == [
        ("system", "be brief"),
        ("user", "plain\na\nb\n[image]\n[audio]\nno"),
        ("assistant", "done"),
    ]
    assert trace.messages[-1].thinking == "hm"
    assert report.notes == {"image": 1, "audio": 1, "unknown_block": 1, "thinking": 1, "empty_message": 1}


def test_a_message_of_weight_0_is_context_only() -> None:
    messages = [
        PROMPT,
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "assistant", "content": "b"},
    ]
    trace, _ = one(messages)
    assert [m.copied for m in trace.messages] == [False, True, False]


def test_odd_messages_and_rows_are_skipped_by_reason() -> None:
    odd = [5, {"role": "ghost", "content": "x"}, {"role": "user", "content": 5}]
    _, report = one([*chat_messages(), *chat_messages(), *odd])
    assert report.skipped == {"not_an_object": 1, "unknown_role": 1, "malformed_message": 1}
    traces, report = read(lines([chat_row()] * 4 + [{"odd": 1}]), "openai_messages")
    assert (len(traces), report.skipped) == (4, {"unknown_type": 1})
    _, report = read(lines([*chat_messages(), {"odd": 1}]), "openai_messages")
    assert report.skipped == {"unknown_type": 1}


def test_a_conversation_without_an_answer_is_counted() -> None:
    traces, report = read(document([PROMPT, PROMPT]), "openai_messages")
    assert (traces, report.ignored) == ([], {"conversation_without_answer": 2})
    assert balanced(report)
